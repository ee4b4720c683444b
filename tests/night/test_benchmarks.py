"""The benchmarks run on small inputs. No test compares times."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import overhead, scale, terra_gpu
from tests.engine.processes import run_python

pytestmark = pytest.mark.timeout(900)


def run_benchmark(folder: Path, name: str, *options: str) -> dict[str, Any]:
    """Run a benchmark, and return the results that it stores."""
    run_python("-m", f"benchmarks.{name}", *options, MMKIT_RESULTS=str(folder), CUDA_VISIBLE_DEVICES="")
    (file,) = folder.iterdir()
    results: dict[str, Any] = json.loads(file.read_text())
    return results


def test_terra_on_a_cpu(tmp_path: Path) -> None:
    results = run_benchmark(tmp_path, "terra_cpu", "--frames", "8", "--rounds", "2", "--streams", "1")
    (row,) = results["rows"]
    assert row["identical"]
    assert row["steps"]["hf"] == row["steps"]["none"] == 64
    assert row["steps"]["frames"] < row["steps"]["ngrams"] < 48
    assert row["cached"] > 0


def test_one_class_beside_two(tmp_path: Path) -> None:
    results = run_benchmark(tmp_path, "one_class", "--tokens", "4", "--rounds", "2", "--eager")
    assert [row["batch"] for row in results["rows"]] == [1, 8]
    assert min(results["mib"].values()) > 100


def test_overhead_of_one_model(tmp_path: Path) -> None:
    results = run_benchmark(tmp_path, "overhead", "--rounds", "3", "--systems", "llava")
    llava = results["systems"]["llava"]
    assert llava["requests"] > 20
    for part in overhead.PARTS:
        assert llava[part]["ratio"] > 0


def test_pixels_of_llava(tmp_path: Path) -> None:
    results = run_benchmark(tmp_path, "pixels", "--rounds", "3", "--systems", "llava")
    by_name = {row["by"]: row for row in results["rows"]}
    for row in by_name.values():
        assert row["levels"] < 0.1
        assert min(row["ms"].values()) > 0
    floats = by_name["spec, floats"]["bytes"]
    for name in ("spec, bytes", "torchvision, bytes"):
        assert 2 * by_name[name]["bytes"] == floats  # bfloat16 has two bytes


def test_every_part_of_the_gpus_benchmark_runs_tiny(tmp_path: Path) -> None:
    results = run_benchmark(tmp_path, "terra_gpu", "--tiny", "--frames", "2", "--streams", "2")
    rows = results["rows"]
    assert [row["part"] for row in rows] == list(terra_gpu.PARTS)
    for row in rows:
        assert row["frames_per_second"] > 0
        assert 0 < row["of_bound"] < 1


def test_a_request_takes_time_in_proportion_to_its_items_and_ids(tmp_path: Path) -> None:
    """Calls of functions, since no test looks at a time."""
    run_python(
        *("-m", "benchmarks.scale", "--items", "1000", "--ids", "10000", "--rounds", "1"), MMKIT_RESULTS=str(tmp_path)
    )
    rows = []
    for name in ("scale", "scale_ids"):
        rows += json.loads((tmp_path / f"{name}.json").read_text())["rows"]
    assert {row["method"] for row in rows} == set(scale.METHODS)
    for row in rows:
        assert row["growth_of_calls"] < 1.1, row


def test_robots(tmp_path: Path) -> None:
    results = run_benchmark(tmp_path, "robots", "--observations", "4")
    assert all(0 < part["fastest_ms"] <= part["first_ms"] for part in results["parts"].values())


def test_robots_at_servers(tmp_path: Path) -> None:
    results = run_benchmark(tmp_path, "robots_served", "--robots", "2", "--observations", "2", "--rounds", "1")
    assert [row["prefix_caching"] for row in results["rows"]] == [True, False]
    for row in results["rows"]:
        assert row["rate"] > 0
        parts = [row[name]["median_ms"] for name in ("unpack", "process", "engine", "decode")]
        assert min(parts) > 0
