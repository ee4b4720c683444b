"""What came of the matrix, as tables of Markdown and as docs/data/versions.md.

    python -m tools.matrix.page

writes the page anew from docs/data/versions.json; `make matrix` does the same at its end.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.shared import ROOT, format_table

STORED = ROOT / "docs" / "data" / "versions.json"
PAGE = ROOT / "docs" / "data" / "versions.md"

Entry = Mapping[str, Any]
"""A release: its facts, and under `checks` the result of each check."""

COUNTS = {
    "cases": "cases",
    "laws": "pairs",
    "plugins": "requests",
    "differential": "requests",
    "sounds": "files",
    "engine": "ids",
    "serve": "ids",
    "one_class": "requests",
}
"""The columns of the checks, and what each counts."""

TEMPLATE = Path(__file__).with_name("versions.md.template")


def write() -> None:
    """Write the page from the stored results."""
    PAGE.write_text(format_page(json.loads(STORED.read_text())))


def format_page(entries: Sequence[Entry]) -> str:
    """Return the whole of docs/data/versions.md."""
    outcome = "No check failed."
    failures = find_failures(entries)
    if failures:
        outcome = f"**{len(failures)} checks failed.**"
    return TEMPLATE.read_text().format(
        releases=len(entries),
        oldest=entries[-1]["version"],
        newest=entries[0]["version"],
        outcome=outcome,
        table=format_entries(entries),
        specs=format_specs(entries),
        exceptions=format_exceptions(entries),
        laws=format_laws(entries),
        one_class=format_releases_without(entries, "one_class"),
    )


def find_failures(entries: Sequence[Entry]) -> list[str]:
    """Return a sentence for each failure, and one if digests of ids differ."""
    failures = []
    digests: set[str] = set()
    for entry in entries:
        for name, check in entry["checks"].items():
            for failure in check["failures"]:
                failures.append(f"{entry['version']}, {name}: {failure}")
            if check.get("digest"):
                digests.add(check["digest"])
    if len(digests) > 1:
        failures.append(f"Terra's ids differ between versions: {sorted(digests)}")
    return failures


def format_entries(entries: Sequence[Entry]) -> str:
    """Return a row per release: what each check counted, or how many failures it has."""
    head = ["vLLM", "kernels", "transformers", *COUNTS, "ids digest"]
    rows = []
    for entry in entries:
        row = [entry["version"] or "", entry["kernels"] or "", entry["transformers"] or ""]
        for name in COUNTS:
            row.append(_format_cell(name, entry["checks"].get(name)))
        row.append(entry["checks"].get("engine", {}).get("digest", ""))
        rows.append(row)
    return format_table(head, rows)


def _format_cell(name: str, check: Mapping[str, Any] | None) -> str:
    """Return what a check counted, as a cell."""
    if check is None:
        return ""
    if check["failures"]:
        return f"{len(check['failures'])} failed"
    if not check.get("routes", True):
        return "no routes"
    count = check.get(COUNTS[name], sum(check.get("specs", {}).values()))
    cell = f"{count} {COUNTS[name]}"
    num_refused = sum(refusal["count"] for refusal in check.get("refused", {}).values())
    if num_refused:
        cell += f", {num_refused} refused"
    for law in check.get("silent", ()):
        cell += f"; {law} silent"
    return cell


def format_releases_without(entries: Sequence[Entry], check: str) -> str:
    """Return how many releases a check ran on, and those on which it did not run."""
    without = [str(entry["version"]) for entry in entries if check not in entry["checks"]]
    if not without:
        return f"all {len(entries)}"
    return f"{len(entries) - len(without)}, and not on {', '.join(without)}"


def format_laws(entries: Sequence[Entry]) -> str:
    """Return which laws ran, with how many drawn examples."""
    laws: set[str] = set()
    examples: set[str] = set()
    for entry in entries:
        if "laws" in entry["checks"]:
            check = entry["checks"]["laws"]
            laws.add(", ".join(check["laws"]))
            examples.add(str(check["examples"]))
    return f"{' or '.join(sorted(laws))} with {' or '.join(sorted(examples))} drawn examples each"


def format_specs(entries: Sequence[Entry]) -> str:
    """Return a row per spec, with a pair of columns per version of transformers."""
    # the oldest release with each version of transformers
    checks_by_version = {entry["transformers"]: entry["checks"] for entry in reversed(entries)}
    head = ["spec"]
    columns: list[Mapping[str, int]] = []
    for version, checks in checks_by_version.items():
        for name in ("cases", "laws"):
            head.append(f"{name}, {version}")
            columns.append(checks.get(name, {}).get("specs", {}))
    rows: dict[str, list[str]] = {}
    for column in columns:
        for name in column:
            rows[name] = [name]
    for name, row in rows.items():
        for column in columns:
            row.append(str(column.get(name, "")))
    return format_table(head, rows.values())


class Refusal(NamedTuple):
    """What a release refuses of a spec in a check."""

    spec: str
    check: str
    why: str
    count: int


def format_exceptions(entries: Sequence[Entry]) -> str:
    """Return a row per spec and check that releases refuse in part."""
    versions: defaultdict[Refusal, list[str]] = defaultdict(list)
    for entry in entries:
        for check, result in entry["checks"].items():
            for spec, refusal in result.get("refused", {}).items():
                why = " ".join(refusal["why"].split()).replace("|", "\\|")
                versions[Refusal(spec, check, why, refusal["count"])].append(entry["version"])
    if not versions:
        return "None."
    rows = []
    for refusal in sorted(versions):
        releases = _format_range(versions[refusal])
        rows.append([refusal.spec, refusal.check, str(refusal.count), releases, refusal.why])
    return format_table(("spec", "check", "refused", "vLLM", "why"), rows)


def _format_range(versions: Sequence[str]) -> str:
    """Return releases, newest first, as a range."""
    if len(versions) == 1:
        return versions[0]
    return f"{versions[-1]} to {versions[0]}"


if __name__ == "__main__":
    write()
