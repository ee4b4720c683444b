"""Print the tables of the stored results, as the pages of docs/ have them.

``python -m benchmarks.report``.
"""

import json

from .measure import RESULTS


def main() -> None:
    for name, table in read_tables().items():
        print(f"{name}:\n\n{table}\n")


def read_tables() -> dict[str, str]:
    """Return a table of Markdown for each stored result that has one."""
    tables = {}
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        if "table" in result:
            tables[path.stem] = "\n".join(result["table"])
    return tables


if __name__ == "__main__":
    main()
