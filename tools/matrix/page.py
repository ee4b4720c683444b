"""What came of the matrix, as tables of Markdown and as docs/data/versions.md.

    python -m tools.matrix.page

writes the page anew from docs/data/versions.json; `make matrix` does the same at its end.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.shared import ROOT
from tools.shared import table as markdown

STORED = ROOT / "docs" / "data" / "versions.json"
PAGE = ROOT / "docs" / "data" / "versions.md"

Entry = Mapping[str, Any]
"""A release: its facts, and under `checks` what each check told."""

COUNTS = {
    "cases": "cases",
    "laws": "pairs",
    "plugins": "requests",
    "differential": "requests",
    "engine": "ids",
    "serve": "ids",
}
"""The columns of the checks, and what each counts."""

TEMPLATE = Path(__file__).with_name("versions.md.template")


def table(entries: Sequence[Entry]) -> str:
    """A row per release: what each check counted, or how many failures it has."""
    head = ("vLLM", "kernels", "transformers", *COUNTS, "ids digest")
    return markdown(head, map(_row, entries))


def _row(entry: Entry) -> list[str]:
    checks = entry["checks"]
    about = (entry[key] or "" for key in ("version", "kernels", "transformers"))
    digest = checks.get("engine", {}).get("digest", "")
    return [*about, *(_cell(name, checks.get(name)) for name in COUNTS), digest]


def _cell(name: str, check: Mapping[str, Any] | None) -> str:
    if check is None:
        return ""
    if check["failures"]:
        return f"{len(check['failures'])} failed"
    if not check.get("routes", True):
        return "no routes"
    count = check.get(COUNTS[name], sum(check.get("specs", {}).values()))
    refused = sum(refusal["count"] for refusal in check.get("refused", {}).values())
    silent = "".join(f"; {law} silent" for law in check.get("silent", ()))
    return f"{count} {COUNTS[name]}" + (f", {refused} refused" if refused else "") + silent


def laws(entries: Sequence[Entry]) -> str:
    """Which laws ran, with how many drawn examples."""
    told = [entry["checks"]["laws"] for entry in entries if "laws" in entry["checks"]]
    numbers = {", ".join(check["laws"]) for check in told}
    examples = {str(check["examples"]) for check in told}
    return (
        f"{' or '.join(sorted(numbers))} with {' or '.join(sorted(examples))} drawn examples each"
    )


def specs(entries: Sequence[Entry]) -> str:
    """A row per spec, a pair of columns per version of transformers."""
    oldest = {entry["transformers"]: entry["checks"] for entry in reversed(entries)}
    columns = [(check, version) for version in oldest for check in ("cases", "laws")]
    told = [oldest[version].get(check, {}).get("specs", {}) for check, version in columns]
    names = dict.fromkeys(name for counts in told for name in counts)
    rows = [[name, *(str(counts.get(name, "")) for counts in told)] for name in names]
    return markdown(["spec", *map(", ".join, columns)], rows)


def exceptions(entries: Sequence[Entry]) -> str:
    """A row per spec and check that a release refuses in part: where, how often, and why."""
    where: defaultdict[tuple[str, str, str, int], list[str]] = defaultdict(list)
    for entry in entries:
        for check, told in entry["checks"].items():
            for name, refusal in told.get("refused", {}).items():
                why = " ".join(refusal["why"].split()).replace("|", "\\|")
                where[name, check, why, refusal["count"]].append(entry["version"])
    if not where:
        return "None."
    rows = (
        [name, check, str(count), _span(versions), why]
        for (name, check, why, count), versions in sorted(where.items())
    )
    return markdown(("spec", "check", "refused", "vLLM", "why"), rows)


def _span(versions: Sequence[str]) -> str:
    """Releases, newest first, as a range."""
    return versions[0] if len(versions) == 1 else f"{versions[-1]} to {versions[0]}"


def failures(entries: Sequence[Entry]) -> list[str]:
    """What failed, and digests of ids that differ."""
    failed = [
        f"{entry['version']}, {name}: {failure}"
        for entry in entries
        for name, check in entry["checks"].items()
        for failure in check["failures"]
    ]
    checks = [check for entry in entries for check in entry["checks"].values()]
    digests = {check["digest"] for check in checks if check.get("digest")}
    if len(digests) > 1:
        failed.append(f"Terra's ids differ between versions: {sorted(digests)}")
    return failed


def page(entries: Sequence[Entry]) -> str:
    """The whole of docs/data/versions.md."""
    failed = failures(entries)
    outcome = "No check failed." if not failed else f"**{len(failed)} checks failed.**"
    return TEMPLATE.read_text().format(
        releases=len(entries),
        oldest=entries[-1]["version"],
        newest=entries[0]["version"],
        outcome=outcome,
        table=table(entries),
        specs=specs(entries),
        exceptions=exceptions(entries),
        laws=laws(entries),
    )


def write() -> None:
    PAGE.write_text(page(json.loads(STORED.read_text())))


if __name__ == "__main__":
    write()
