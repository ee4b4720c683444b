"""Run the same specs on many versions of vLLM.

``python -m tools.matrix --help``, or ``make matrix VERSIONS="..."``.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from tools.shared import run_module

from .checks import CHECKS, EXAMPLES
from .page import STORED, find_failures, format_entries, write
from .trees import RELEASES, build, environment, parse_version, read_facts

LOGS = Path("out", "matrix")
SECONDS = 900
"""Time for the checks of one process: they take a minute on an idle machine."""

PROCESSES = (
    ("cases", "plugins", "differential", "sounds"),
    ("laws",),
    ("engine",),
    ("serve",),
    ("one_class",),
)
"""Checks that run in one process; an engine has its own, which it may take down with it."""


def run(version: str, checks: Sequence[str], options: Sequence[str] = ()) -> dict[str, Any]:
    """Return the results of checks on one version."""
    tree = read_facts(version)
    entry: dict[str, Any] = {
        "version": version,
        "kernels": tree["kernels"],
        "transformers": tree["transformers"],
        "patches": len(tree["patches"]),
        "checks": {},
    }
    for group in PROCESSES:
        names = [name for name in group if name in checks]
        if not names:
            continue
        for result in run_in_process(version, names, options):
            vllm_version = result.pop("vllm", version)
            if vllm_version.partition("+")[0] != version:
                result["failures"].append(f"ran on vLLM {vllm_version}")
            name = result.pop("check")
            entry["checks"][name] = result
    return entry


def run_in_process(
    version: str, names: Sequence[str], options: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the results of checks in a process of their own.

    A check that prints no result has failed.
    """
    results, ending = run_module(
        "tools.matrix.checks",
        *names,
        *options,
        log=LOGS / f"{version}-{'-'.join(names)}.log",
        seconds=SECONDS,
        variables=environment(version),
    )
    by_name = {result["check"]: result for result in results}
    return [by_name.get(name, {"check": name, "failures": [ending]}) for name in names]


def merge_with_stored(entries: Sequence[Mapping[str, Any]], path: Path) -> list[Mapping[str, Any]]:
    """Return results with the stored ones of other versions, and of other checks of these."""
    merged: dict[str, Mapping[str, Any]] = {}
    if path.exists():
        for entry in json.loads(path.read_text()):
            merged[entry["version"]] = entry
    for entry in entries:
        checks = dict(entry["checks"])
        if entry["version"] in merged:
            checks = merged[entry["version"]]["checks"] | checks
        merged[entry["version"]] = {**entry, "checks": checks}
    return [merged[version] for version in RELEASES if version in merged]


def main(
    versions: Annotated[list[str] | None, typer.Argument(parser=parse_version)] = None,
    checks: Annotated[str, typer.Option(help="On every version.")] = " ".join(CHECKS),
    ends: Annotated[str, typer.Option(help="On the first and the last version only.")] = "",
    laws: Annotated[str, typer.Option(help="Default: all that need no model.")] = "",
    examples: Annotated[int, typer.Option(help="Per law and spec.")] = EXAMPLES,
    jobs: Annotated[int, typer.Option(help="Versions at a time.")] = 1,
    store: Annotated[Path, typer.Option(help="Where results are kept.")] = STORED,
) -> None:
    """Run the specs on versions of vLLM, by default on all, and print one table."""
    chosen = versions or list(RELEASES)
    options = ["--examples", str(examples), "--laws", laws]
    build(chosen)
    entries = []

    def run_version(version: str) -> dict[str, Any]:
        names = checks.split()
        if version in (chosen[0], chosen[-1]):
            names.extend(ends.split())
        return run(version, names, options)

    with ThreadPoolExecutor(jobs) as pool:
        for entry in tqdm(pool.map(run_version, chosen), total=len(chosen), disable=None):
            entries.append(entry)
            store.write_text(json.dumps(merge_with_stored(entries, store), indent=2) + "\n")
            tqdm.write(format_entries([entry]).splitlines()[-1])
    failures = find_failures(entries)
    if store == STORED:
        write()
    print(f"\n{format_entries(entries)}\n")
    for failure in failures:
        print(failure)
    sys.exit(int(bool(failures)))


if __name__ == "__main__":
    typer.run(main)
