"""Count the words of the documentation, page by page: ``python -m tools.words``, or ``make words``.

Words are those of ``wc -w``, code and tables included. What programs write (docs/data/) and the
changelog are not counted. The figures inform; nothing limits them.
"""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def count_words() -> dict[str, int]:
    """Return the words of each page, by its path in the repository."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    words = {}
    for page in pages:
        path = page.relative_to(ROOT).as_posix()
        if not path.startswith("docs/data/"):
            words[path] = len(page.read_text(encoding="utf-8").split())
    return words


def main() -> None:
    words = count_words()
    for path, count in words.items():
        print(f"{count:>7,}  {path}")
    print(f"{sum(words.values()):>7,}  all pages")


if __name__ == "__main__":
    main()
