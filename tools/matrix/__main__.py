"""Run the same specs on many versions of vLLM: ``python -m tools.matrix --help``, or ``make matrix
VERSIONS="..."``."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .checks import CHECKS, EXAMPLES, PREFIX
from .page import STORED, failures, table, write
from .trees import RELEASES, ROOT, build, environment, facts, known

LOGS = Path("out", "matrix")
SECONDS = 900
"""Time for the checks of one process: they take a minute on an idle machine."""

PROCESSES = (("cases", "differential"), ("laws", "training"), ("engine",), ("serve",))
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
                result.pop("transformers", None)
                entry["checks"][result.pop("check")] = result
    return entry


def _results(
    version: str, names: Sequence[str], options: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The results of checks in a process of their own; a failure for each that it does not tell
    of."""
    log = LOGS / f"{version}-{'-'.join(names)}.log"
    command = [sys.executable, "-m", "tools.matrix.checks", *names, *options]
    variables = {**os.environ, **environment(version)}
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ended = f"ended with {process.wait(SECONDS)}"
        except subprocess.TimeoutExpired:
            ended = f"did not end in {SECONDS} s"
        finally:
            _end(process)
    lines = [
        line for line in log.read_text(errors="replace").splitlines() if line.startswith(PREFIX)
    ]
    results = {
        result["check"]: result
        for result in map(json.loads, (line.removeprefix(PREFIX) for line in lines))
    }
    for name in names:
        yield results.get(name, {"check": name, "failures": [f"{ended}, see {log}"]})


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def merged(entries: Sequence[Mapping[str, Any]], path: Path = STORED) -> list[Mapping[str, Any]]:
    """Results with the stored ones of other versions, and of other checks of these."""
    known = (
        {entry["version"]: entry for entry in json.loads(path.read_text())} if path.exists() else {}
    )
    for entry in entries:
        before = known.get(entry["version"], {"checks": {}})
        known[entry["version"]] = {
            **entry,
            "checks": {**before["checks"], **entry["checks"]},
        }
    return [known[version] for version in RELEASES if version in known]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.matrix", description="Run the specs on versions of vLLM."
    )
    parser.add_argument("versions", nargs="*", metavar="VERSION", type=known, help="default: all")
    parser.add_argument(
        "--checks", nargs="+", choices=CHECKS, default=list(CHECKS), help="default: all"
    )
    parser.add_argument(
        "--examples", type=int, default=EXAMPLES, help="per law and spec (%(default)s)"
    )
    parser.add_argument(
        "--laws", nargs="+", default=[], metavar="LAW", help="default: all that need no model"
    )
    parser.add_argument("--jobs", type=int, default=1, help="versions at a time")
    parser.add_argument(
        "--store", type=Path, default=STORED, help="where results are kept (%(default)s)"
    )
    options = parser.parse_args()
    versions = options.versions or list(RELEASES)
    passed_on = [
        "--examples",
        str(options.examples),
        *(["--laws", *options.laws] if options.laws else []),
    ]
    build(versions)
    LOGS.mkdir(parents=True, exist_ok=True)
    entries = []
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = pool.map(lambda version: run(version, options.checks, passed_on), versions)
        for entry in tqdm(runs, total=len(versions), unit="version", disable=None):
            entries.append(entry)
            options.store.write_text(json.dumps(merged(entries, options.store), indent=2) + "\n")
            tqdm.write(table([entry]).splitlines()[-1])
    failed = failures(entries)
    if options.store == STORED:
        write()
    print("", table(entries), "", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
