"""The benchmarks run, in small. None of these tests looks at a time."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import overhead, terra_gpu
from tests.engine.processes import run

pytestmark = pytest.mark.timeout(900)


def results(folder: Path, name: str, *options: str) -> dict[str, Any]:
    """What a benchmark stores."""
    run("-m", f"benchmarks.{name}", *options, MMKIT_RESULTS=str(folder), CUDA_VISIBLE_DEVICES="")
    (stored,) = folder.iterdir()
    loaded: dict[str, Any] = json.loads(stored.read_text())
    return loaded


def test_terra_on_a_cpu(tmp_path: Path) -> None:
    options = ["--frames", "8", "--rounds", "2", "--streams", "1"]
    (row,) = results(tmp_path, "terra_cpu", *options)["rows"]
    assert row["identical"]
    assert row["steps"]["hf"] == row["steps"]["none"] == 64
    assert row["steps"]["frames"] < row["steps"]["ngrams"] < 48
    assert row["cached"] > 0


def test_overhead_of_one_model(tmp_path: Path) -> None:
    measured = results(tmp_path, "overhead", "--rounds", "3", "--systems", "llava")["systems"]["llava"]
    assert measured["requests"] > 20
    for part in overhead.PARTS:
        assert measured[part]["ratio"] > 0


def test_every_part_of_the_gpus_benchmark_runs_tiny(tmp_path: Path) -> None:
    rows = results(tmp_path, "terra_gpu", "--tiny", "--frames", "2", "--streams", "2")["rows"]
    assert [row["part"] for row in rows] == list(terra_gpu.PARTS)
    for row in rows:
        assert row["frames_per_second"] > 0
        assert 0 < row["of_bound"] < 1
