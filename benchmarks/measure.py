"""What the benchmarks share: ratios inside one run, medians with their spread, tables, stored
results."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from tools import shared

RESULTS = Path(__file__).parent / "results"


def quiet() -> None:
    """As few threads and messages as can be: call it before torch or vLLM is imported."""
    # numba gives torch as many threads as there are cores
    shared.quiet_libraries(NUMBA_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")


def ratio(seconds: Mapping[str, Sequence[float]], ours: str, theirs: str) -> dict[str, Any]:
    """Medians of two series that were taken in turns, and the median, least and most of the ratios
    of their pairs."""
    ratios = [a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
    low, high = np.percentile(ratios, [10, 90])
    return {
        "ratio": statistics.median(ratios),
        "p10": float(low),
        "p90": float(high),
        **{f"{side}_ms": statistics.median(seconds[side]) * 1000 for side in (ours, theirs)},
    }


def shown(figure: Mapping[str, Any]) -> str:
    """A ratio as tables show it."""
    return f"{figure['ratio']:.2f} ({figure['p10']:.2f}-{figure['p90']:.2f})"


def progress(things: Iterable[Any], what: str) -> Any:
    """The things, with a bar."""
    return tqdm(things, desc=what, disable=None)


def store(
    name: str, report: Mapping[str, Any], columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print a report as a table of Markdown, and keep both in `benchmarks/results`.

    MMKIT_RESULTS names another folder. What the figures were taken on is kept with them.
    """
    table = shared.format_table(columns, rows)
    folder = Path(os.environ.get("MMKIT_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"on": machine(), **report, "table": table.splitlines()}
    (folder / f"{name}.json").write_text(json.dumps(kept, indent=2) + "\n")
    print(table)


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    import torch
    import transformers
    import vllm

    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    )
    return {
        "device": device,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
