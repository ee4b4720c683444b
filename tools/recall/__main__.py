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

from .bugs import REPLAYS

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
    """How the results are not what `REPLAYS` states of a bug."""
    replayed = REPLAYS[number]
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


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.recall", description="Replay public bugs of vLLM."
    )
    parser.add_argument(
        "numbers", nargs="*", type=int, metavar="BUG", choices=[[], *REPLAYS], help="all"
    )
    numbers = parser.parse_args().numbers or list(REPLAYS)
    by_version: dict[str, list[int]] = defaultdict(list)
    for number in numbers:
        for version in filter(None, (REPLAYS[number].affected, REPLAYS[number].fixed)):
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
