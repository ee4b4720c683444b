"""The benchmarks run, in small. None of these tests looks at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import report, terra_gpu

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
def test_every_part_of_the_gpus_benchmark_runs_tiny(tmp_path):
    variables = {**os.environ, "MMKIT_RESULTS": str(tmp_path), "MMKIT_MODULES": "", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.terra_gpu", "--tiny", "--frames", "2", "--streams", "2"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "terra_gpu_tiny.json").read_text())["rows"]
    assert [row["part"] for row in rows] == list(terra_gpu.PARTS)
    for row in rows:
        assert row["frames_per_second"] > 0
        assert 0 < row["of_measured_bound"] < 1
        assert row["times_hf"] > 0
        assert (row["cached"] or 0) > 0 or row["part"] == "hf"


@pytest.mark.timeout(900)
def test_terra_on_a_cpu_with_drafts(tmp_path):
    """Drafts may hold placeholder ids, since the history does: they are embedded without data, and never accepted."""
    variables = {**os.environ, "MMKIT_RESULTS": str(tmp_path), "MMKIT_MODULES": ""}
    command = [sys.executable, "-m", "benchmarks.terra_cpu", "--frames", "8", "--rounds", "2"]
    done = subprocess.run(
        [*command, "--streams", "2", "--drafts", "8"], cwd=ROOT, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "terra_cpu.json").read_text())["rows"]
    assert row["identical"]
    assert row["steps"] < 48  # of 64 tokens
    assert row["cached"] > 0
    assert row["each"]["ratio"] > 0 < row["together"]["ratio"]


def test_overhead_of_one_model(tmp_path):
    variables = {**os.environ, "MMKIT_RESULTS": str(tmp_path), "MMKIT_MODULES": ""}
    command = [sys.executable, "-m", "benchmarks.overhead", "--rounds", "3", "--systems", "llava"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "overhead.json").read_text())
    found = made["systems"]["llava"]
    assert found["requests"] > 20
    for part in report.PARTS:
        assert found[part]["ratio"] > 0
    assert found["uncached_own"]["generated_ms"] < found["uncached"]["generated_ms"]
