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
    milliseconds = {"importing mmkit": measure_import(rounds)}
    for name, values in measure_generation(rounds).items():
        milliseconds[f"the classes of {name}"] = values
    figures = {}
    rows = []
    for what, values in milliseconds.items():
        ordered = sorted(values)
        median, least, most = ordered[len(ordered) // 2], ordered[0], ordered[-1]
        figures[what] = {"median": median, "least": least, "most": most}
        rows.append([what, f"{median:.1f} ms", f"{least:.1f} to {most:.1f} ms"])
    measure.store("startup", {"rounds": rounds, "ms": figures}, ["", "median", "from, to"], rows)


def measure_import(rounds: int) -> list[float]:
    """Return the milliseconds to import mmkit, in new processes."""
    milliseconds = []
    for _ in measure.show_progress(range(rounds), "imports"):
        command = [sys.executable, "-c", IMPORT]
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        milliseconds.append(float(process.stdout) * 1000)
    return milliseconds


def measure_generation(rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds to generate the classes of each spec, once vLLM is imported."""
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
    measure.quiet_libraries()
    typer.run(main)
