"""Replay public bugs of vLLM on the releases that had them: ``python -m tools.recall --help``, or
``make recall``."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from tqdm import tqdm

from tools.matrix.checks import PREFIX
from tools.matrix.trees import ROOT, build, environment

from .bugs import BUGS, Bug

PAGE = ROOT / "docs" / "data" / "recall.md"
SECONDS = 1200
"""Time for the replays on one release."""

Results = Mapping[tuple[int, str], Mapping[str, Any]]
"""By bug and release."""


def run(version: str, numbers: Iterable[int]) -> dict[tuple[int, str], dict[str, Any]]:
    """What the laws say of some bugs on one release, in a process of its own."""
    command = [sys.executable, "-m", "tools.recall.replay", *map(str, numbers)]
    variables = {**os.environ, **environment(version)}
    try:
        process = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {}
    lines = [line for line in process.stdout.splitlines() if line.startswith(PREFIX)]
    results = [json.loads(line.removeprefix(PREFIX)) for line in lines]
    return {(result["bug"], version): result for result in results}


def failures(number: int, results: Results) -> list[str]:
    """How the results are not what `BUGS` states of a bug."""
    replayed = BUGS[number].replay
    assert replayed is not None
    nothing = {"status": "no result", "message": "the process ended"}
    found = results.get((number, replayed.affected), nothing)
    told = []
    if found["status"] != "violated" or not re.search(replayed.message, found["message"]):
        told.append(
            f"{number}, {replayed.law} on {replayed.affected}: expected {replayed.message!r}, "
            f"got {found['status']}: {found['message']}"
        )
    elif found["seconds"] > replayed.seconds:
        told.append(
            f"{number}, {replayed.law} on {replayed.affected}: took {found['seconds']} s, "
            f"stated are {replayed.seconds} s"
        )
    if replayed.fixed is not None:
        after = results.get((number, replayed.fixed), nothing)
        if after["status"] != "holds":
            told.append(
                f"{number}, {replayed.law} on {replayed.fixed}, which is fixed: "
                f"{after['status']}: {after['message']}"
            )
    return told


def row(number: int, bug: Bug) -> str:
    """A row of the page's table."""
    if bug.replay is not None:
        law = bug.replay.law
        how = f"replayed on {bug.replay.affected}; "
        how += f"holds on {bug.replay.fixed}" if bug.replay.fixed else "holds on none up to 0.33.0"
    elif bug.rebuilt:
        law, how = "", f"rebuilt: {bug.rebuilt.replace('_', ' ')}"
    else:
        law, how = "", f"not caught: {bug.missed}"
    return f"| {number} | {bug.issues} | {bug.symptom} | {law} | {how} |"


def counts() -> str:
    """The counts of the page."""
    replayed = [bug.replay for bug in BUGS.values() if bug.replay is not None]
    rebuilt = sum(bool(bug.rebuilt) for bug in BUGS.values())
    fixed = sum(one.fixed is not None for one in replayed)
    return (
        f"Of {len(BUGS)} bugs {len(replayed)} are replayed, {rebuilt} are rebuilt, and "
        f"{len(BUGS) - len(replayed) - rebuilt} are not caught. Of those that are replayed, "
        f"{fixed} are fixed in a later release, and there the law holds."
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.recall", description="Replay public bugs of vLLM."
    )
    replayable = [number for number, bug in BUGS.items() if bug.replay is not None]
    parser.add_argument(
        "numbers", nargs="*", type=int, metavar="BUG", choices=[[], *replayable], help="all"
    )
    numbers = parser.parse_args().numbers or replayable
    by_version: dict[str, list[int]] = defaultdict(list)
    for number in numbers:
        replayed = BUGS[number].replay
        for version in (replayed.affected, replayed.fixed) if replayed else ():
            if version is not None:
                by_version[version].append(number)
    build(list(by_version))
    results: dict[tuple[int, str], dict[str, Any]] = {}
    for version, some in tqdm(by_version.items(), unit="release", disable=None):
        results |= run(version, some)
    for (number, version), result in sorted(results.items()):
        first = result["message"].split("\n")[0][:200]
        seconds = result.get("seconds", 0)
        print(f"{number:>3} {version:8} {seconds:6.1f} s  {result['status']}  {first}")
    told = [failure for number in numbers for failure in failures(number, results)]
    print("", *told, sep="\n")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
