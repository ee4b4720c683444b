"""What mmkit costs before the first request: ``python -m benchmarks.startup --help``.

Import times are those of new processes, in turns, that have imported torch and numpy before. What
torch makes may leave a full collection due: the next import of any size then waits until the
collector has looked at all of it. So mmkit's is measured with that done before, and right after
torch.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Annotated, Any

import typer

from . import measure

IMPORTS = {
    "mmkit": ("gc.collect()", "mmkit"),
    "mmkit, right after torch": ("pass", "mmkit"),
}
"""What is done before the clock starts, and what is imported then."""


def main(
    rounds: Annotated[int, typer.Option(min=3, help="Processes of each kind, in turns.")] = 15,
) -> None:
    """Import time, and the time in which classes are generated."""
    clock = "time.perf_counter()"
    code = (
        f"import gc, numpy, time, torch; {{}}; start = {clock}; import {{}}; print({clock} - start)"
    )
    taken: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for _ in measure.progress(range(rounds), "imports"):
        for name, (before, module) in IMPORTS.items():
            command = [sys.executable, "-c", code.format(before, module)]
            finished = subprocess.run(command, capture_output=True, text=True, check=True)
            taken[name].append(float(finished.stdout) * 1000)
    report: dict[str, Any] = {
        "rounds": rounds,
        "import_ms": {name: spread(values) for name, values in taken.items()},
    }
    report["classes_ms"] = {name: spread(values) for name, values in classes(rounds).items()}
    rows = [(f"importing {name}", ms) for name, ms in report["import_ms"].items()]
    rows += [(f"the classes of {name}", ms) for name, ms in report["classes_ms"].items()]
    cells = [
        [what, f"{ms['median']:.1f} ms", f"{ms['least']:.1f} to {ms['most']:.1f} ms"]
        for what, ms in rows
    ]
    measure.store("startup", report, ["", "median", "from, to"], cells)


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": ordered[len(ordered) // 2], "least": ordered[0], "most": ordered[-1]}


def classes(rounds: int) -> dict[str, list[float]]:
    """Milliseconds to generate the classes of a spec, once vLLM is imported."""
    from examples.gallery.deepseek_vl2 import DEEPSEEK_VL2
    from examples.llava_like.spec import LLAVA_LIKE
    from examples.terra.spec import TERRA
    from mmkit.generate import classes as generated

    _ = TERRA.classes  # imports vLLM
    timings: dict[str, list[float]] = {}
    for spec in (TERRA, LLAVA_LIKE, DEEPSEEK_VL2):
        timings[spec.name] = []
        for _ in range(rounds):
            fresh = spec.model_copy()  # whose classes are not there yet
            start = time.perf_counter()
            generated(fresh)
            timings[spec.name].append((time.perf_counter() - start) * 1000)
    return timings


if __name__ == "__main__":
    measure.quiet()
    typer.run(main)
