"""The benchmarks measure what they say. None of these tests looks at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import growth, measure, plots, report, terra_gpu
from examples.terra.reference import LlamaActionForCausalLM

ROOT = Path(__file__).parents[2]


def test_an_exponent_is_the_slope():
    assert measure.exponent([1, 10, 100], [2.0, 20.0, 200.0]) == pytest.approx(1)
    assert measure.exponent([1, 10, 100], [3.0, 300.0, 30_000.0]) == pytest.approx(2)


def test_ratios_are_of_pairs():
    found = measure.ratio({"ours": [1.0, 4.0, 3.0], "theirs": [2.0, 4.0, 2.0]}, "ours", "theirs")
    assert (found["ratio"], found["ours_ms"], found["theirs_ms"]) == (1.0, 3000.0, 2000.0)


def test_the_tables_of_the_page_are_the_stored_results():
    page = (ROOT / "docs" / "performance.md").read_text()
    for name, table in report.tables().items():
        assert table in page, f"python -m benchmarks.report prints another table of {name}"


@pytest.mark.parametrize("name", ["bench-overhead.png", "bench-growth.png", "bench-terra-cpu.png"])
def test_the_pictures_are_those_of_the_stored_results(name, drawn):
    made, kept = (
        np.asarray(Image.open(folder / name).convert("L"), int) for folder in (drawn, ROOT / "docs" / "images")
    )
    assert made.shape == kept.shape
    assert (np.abs(made - kept) > 64).mean() < 0.002  # another version of a font


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn")
    plots.main(folder)
    return folder


# -- the GPU's, in its tiny mode ---------------------------------------------------------------------------------------


def test_parameters_are_counted_right():
    tiny = terra_gpu.config(tiny=True)
    model = LlamaActionForCausalLM._from_config(tiny)
    assert terra_gpu.parameters(tiny) == sum(parameter.numel() for parameter in model.parameters())
    assert terra_gpu.read_parameters(tiny) == terra_gpu.parameters(tiny) - model.model.embed_tokens.weight.numel()


def test_the_published_size():
    assert terra_gpu.parameters(terra_gpu.config(tiny=False)) == pytest.approx(2.04e9, rel=0.01)


def test_bytes_are_those_of_each_step():
    tiny, streams, known = terra_gpu.config(tiny=True), 3, 4
    head = tiny.hidden_size // tiny.num_attention_heads
    least = 0
    for step in range(tiny.num_image_patches):
        positions = known * tiny.num_spatio_embeddings + step
        cache = tiny.num_hidden_layers * 2 * tiny.num_key_value_heads * head * positions * 4
        least += terra_gpu.read_parameters(tiny) * 4 + streams * cache
    assert terra_gpu.frame_bytes(tiny, streams, known) == least


@pytest.mark.engine
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


@pytest.mark.engine
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


# -- processing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [growth.items, growth.replaced, growth.mixed])
@pytest.mark.parametrize("count", [2, 20])
def test_requests_are_what_they_say(make, count):
    processor, prompt, data = make(count)
    outcome = growth.rendering(processor, prompt, data)()
    assert sum(map(len, outcome["mm_placeholders"].values())) == sum(map(len, data.values())) == count
    hashes, copied = growth.floor(processor, prompt, data)()
    assert sum(map(len, hashes.values())) == count
    assert copied == prompt


def test_numbered_targets_are_distinct():
    processor, prompt, data = growth.replaced(100, numbered=True)
    outcome = growth.rendering(processor, prompt, data)()
    assert len(outcome["mm_placeholders"]["series"]) == 100


def test_prompts_are_as_long_as_they_say():
    _, prompt, _ = growth.items(6, 10_000)
    assert len(prompt) == pytest.approx(10_000, abs=6)


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
