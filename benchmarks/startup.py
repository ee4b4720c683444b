"""What mmkit costs before the first request: ``python -m benchmarks.startup --help``.

Import times are those of new processes that have imported torch and numpy before. What torch makes
may leave a full collection due, for which the next import of any size waits; so it is done first.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Annotated

import typer

from . import measure

IMPORT = """\
import gc, numpy, time, torch
gc.collect()
start = time.perf_counter()
import mmkit
print(time.perf_counter() - start)
"""


def main(
    rounds: Annotated[int, typer.Option(min=3, help="Processes, and makings of each spec.")] = 15,
) -> None:
    """Import time, and the time in which classes are generated."""
    milliseconds = {"importing mmkit": []}
    for _ in measure.progress(range(rounds), "imports"):
        command = [sys.executable, "-c", IMPORT]
        finished = subprocess.run(command, capture_output=True, text=True, check=True)
        milliseconds["importing mmkit"].append(float(finished.stdout) * 1000)
    for name, values in classes(rounds).items():
        milliseconds[f"the classes of {name}"] = values
    spreads = {what: spread(values) for what, values in milliseconds.items()}
    cells = [
        [what, f"{ms['median']:.1f} ms", f"{ms['least']:.1f} to {ms['most']:.1f} ms"]
        for what, ms in spreads.items()
    ]
    measure.store("startup", {"rounds": rounds, "ms": spreads}, ["", "median", "from, to"], cells)


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": ordered[len(ordered) // 2], "least": ordered[0], "most": ordered[-1]}


def classes(rounds: int) -> dict[str, list[float]]:
    """Milliseconds to generate the classes of a spec, once vLLM is imported."""
    from examples.gallery.deepseek_vl2 import DEEPSEEK_VL2
    from examples.llava_like.spec import LLAVA_LIKE
    from examples.terra.spec import TERRA

    _ = TERRA.classes  # imports vLLM
    timings: dict[str, list[float]] = {}
    for spec in (TERRA, LLAVA_LIKE, DEEPSEEK_VL2):
        timings[spec.name] = []
        for _ in range(rounds):
            fresh = spec.model_copy()  # whose classes are not there yet
            start = time.perf_counter()
            _ = fresh.classes
            timings[spec.name].append((time.perf_counter() - start) * 1000)
    return timings


if __name__ == "__main__":
    measure.quiet()
    typer.run(main)
