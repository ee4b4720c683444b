"""What the benchmarks share: ratios inside one run, medians with their spread, stored results."""

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


def quiet_libraries() -> None:
    """Set as few threads and messages as can be, before torch or vLLM is imported."""
    # numba gives torch as many threads as there are cores
    shared.quiet_libraries(NUMBA_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")


def compare(seconds: Mapping[str, Sequence[float]], ours: str, theirs: str) -> dict[str, Any]:
    """Return the ratio of two series that were measured in turns.

    These are the median of the ratios of their pairs, with the percentiles 10 and 90, and the
    median milliseconds of each series.
    """
    ratios = [a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
    p10, p90 = np.percentile(ratios, [10, 90])
    return {
        "ratio": statistics.median(ratios),
        "p10": float(p10),
        "p90": float(p90),
        f"{ours}_ms": statistics.median(seconds[ours]) * 1000,
        f"{theirs}_ms": statistics.median(seconds[theirs]) * 1000,
    }


def format_ratio(figure: Mapping[str, Any]) -> str:
    """Return a ratio as tables show it."""
    return f"{figure['ratio']:.2f} ({figure['p10']:.2f}-{figure['p90']:.2f})"


def show_progress(values: Iterable[Any], what: str) -> Any:
    """Return the values, with a bar."""
    return tqdm(values, desc=what, disable=None)


def store(
    name: str, report: Mapping[str, Any], columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print a report as a table of Markdown, and keep both in the folder of results.

    The machine of the figures is stored with them.
    """
    table = shared.format_table(columns, rows)
    folder = find_folder()
    folder.mkdir(parents=True, exist_ok=True)
    result = {"on": describe_machine(), **report, "table": table.splitlines()}
    (folder / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(table)


def find_folder() -> Path:
    """Return the folder of results, which MMKIT_RESULTS names where it is another one."""
    return Path(os.environ.get("MMKIT_RESULTS", RESULTS))


def describe_machine() -> dict[str, Any]:
    """Return the device and the versions that figures depend on."""
    import torch
    import transformers
    import vllm

    device = f"{platform.machine()} CPU"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    return {
        "device": device,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
