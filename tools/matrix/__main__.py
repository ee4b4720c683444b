"""Run the same specs on many versions of vLLM: ``python -m tools.matrix --help``, or ``make matrix
VERSIONS="..."``."""

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from tools.shared import told

from .checks import CHECKS, EXAMPLES
from .page import STORED, failures, table, write
from .trees import RELEASES, build, environment, facts, known

LOGS = Path("out", "matrix")
SECONDS = 900
"""Time for the checks of one process: they take a minute on an idle machine."""

PROCESSES = (("cases", "plugins", "differential"), ("laws",), ("engine",), ("serve",))
"""Checks that run in one process; an engine has its own, which it may take down with it."""


def run(version: str, checks: Sequence[str], options: Sequence[str] = ()) -> dict[str, Any]:
    """What came of some checks on one version."""
    tree = facts(version)
    entry: dict[str, Any] = {
        "version": version,
        "kernels": tree["kernels"],
        "transformers": tree["transformers"],
        "patches": len(tree["patches"]),
        "checks": {},
    }
    for group in PROCESSES:
        if names := [name for name in group if name in checks]:
            for result in _results(version, names, options):
                if (ran := result.pop("vllm", version)).partition("+")[0] != version:
                    result["failures"].append(f"ran on vLLM {ran}")
                entry["checks"][result.pop("check")] = result
    return entry


def _results(version: str, names: Sequence[str], options: Sequence[str]) -> list[dict[str, Any]]:
    """The results of checks in a process of their own; a failure for each that it does not tell
    of."""
    log = LOGS / f"{version}-{'-'.join(names)}.log"
    command = ("tools.matrix.checks", *names, *options)
    results, ended = told(*command, log=log, seconds=SECONDS, variables=environment(version))
    by_name = {result["check"]: result for result in results}
    return [by_name.get(name, {"check": name, "failures": [ended]}) for name in names]


def merged(entries: Sequence[Mapping[str, Any]], path: Path) -> list[Mapping[str, Any]]:
    """Results with the stored ones of other versions, and of other checks of these."""
    stored = json.loads(path.read_text()) if path.exists() else []
    known = {entry["version"]: entry for entry in stored}
    for entry in entries:
        before = known.get(entry["version"], {"checks": {}})
        known[entry["version"]] = {**entry, "checks": {**before["checks"], **entry["checks"]}}
    return [known[version] for version in RELEASES if version in known]


def main(
    versions: Annotated[list[str] | None, typer.Argument(parser=known)] = None,
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

    def of_version(version: str) -> dict[str, Any]:
        at_an_end = version in (chosen[0], chosen[-1])
        return run(version, [*checks.split(), *(ends.split() if at_an_end else ())], options)

    with ThreadPoolExecutor(jobs) as pool:
        for entry in tqdm(pool.map(of_version, chosen), total=len(chosen), disable=None):
            entries.append(entry)
            store.write_text(json.dumps(merged(entries, store), indent=2) + "\n")
            tqdm.write(table([entry]).splitlines()[-1])
    failed = failures(entries)
    if store == STORED:
        write()
    print("", table(entries), "", *failed, sep="\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
