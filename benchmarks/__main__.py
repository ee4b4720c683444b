"""All benchmarks, one after the other: ``python -m benchmarks``, or ``make bench``.

Each runs in a process of its own and writes `benchmarks/results/<name>.json`.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import torch
import typer

ALL = (
    "startup",
    "overhead",
    "outline",
    "scale",
    "render",
    "pixels",
    "pixels_served",
    "one_class",
    "terra_cpu",
    "serve_load",
    "robots",
    "robots_served",
    "terra_gpu",
)


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Of {', '.join(ALL)}; all by default.")
    ] = None,
) -> None:
    """Run benchmarks."""
    unknown = set(names or ()) - set(ALL)
    if unknown:
        raise typer.BadParameter(
            f"{', '.join(sorted(unknown))}: expected names among {', '.join(ALL)}."
        )
    failed = []
    for name in names or ALL:
        arguments = []
        if name == "terra_gpu" and not torch.cuda.is_available():
            arguments = ["--tiny"]
        print(f"== {name} {' '.join(arguments)}", flush=True)
        process = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *arguments])
        if process.returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
