"""The words of the documentation, page by page: ``python -m tools.words``, or ``make words``.

Words are those of ``wc -w``, code and tables included. What programs write (docs/data/) and the
changelog have no budget.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGETS = {"README.md": 450, "docs/reference/": 7_500, "": 28_000}
"""The most words of the pages whose path begins so."""


def counts() -> dict[str, int]:
    """The words of each page, by its path in the repository."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    words = {
        page.relative_to(ROOT).as_posix(): len(page.read_text(encoding="utf-8").split())
        for page in pages
    }
    return {path: count for path, count in words.items() if not path.startswith("docs/data/")}


def main() -> int:
    words = counts()
    for path, count in words.items():
        print(f"{count:>7,}  {path}")
    exceeded = False
    for start, budget in BUDGETS.items():
        used = sum(count for path, count in words.items() if path.startswith(start))
        exceeded |= used > budget
        print(f"{used:>7,}  of {budget:,}  {start or 'all pages'}")
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
