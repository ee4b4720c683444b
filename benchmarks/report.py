"""The tables of the stored results, as the pages of docs/ have them:
``python -m benchmarks.report``."""

import json

from .measure import RESULTS


def tables() -> dict[str, str]:
    """A table of Markdown for each stored result that has one."""
    stored = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    return {name: "\n".join(one["table"]) for name, one in stored.items() if "table" in one}


if __name__ == "__main__":
    for name, table in tables().items():
        print(f"{name}:\n\n{table}\n")
