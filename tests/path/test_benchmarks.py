"""The benchmarks measure what they say. None of these tests looks at a time."""

import numpy as np
import pytest
from PIL import Image

from benchmarks import growth, measure, plots, report, terra_gpu
from examples.terra.reference import LlamaActionForCausalLM
from tests import ROOT


def test_an_exponent_is_the_slope_and_ratios_are_of_pairs():
    assert measure.exponent([1, 10, 100], [3.0, 300.0, 30_000.0]) == pytest.approx(2)
    ratios = measure.ratio({"ours": [1.0, 4.0, 3.0], "theirs": [2.0, 4.0, 2.0]}, "ours", "theirs")
    assert (ratios["ratio"], ratios["ours_ms"], ratios["theirs_ms"]) == (1.0, 3000.0, 2000.0)


def test_the_tables_of_the_pages_are_the_stored_results():
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("data/performance.md", "performance-terra.md"))
    for name, table in report.tables().items():
        assert table in pages, f"python -m benchmarks.report prints another table of {name}"


def test_the_pictures_are_those_of_the_stored_results(tmp_path):
    plots.main(tmp_path)
    for name in ("bench-overhead.png", "bench-growth.png", "bench-terra-cpu.png"):
        pictures = (Image.open(folder / name).convert("L") for folder in (tmp_path, ROOT / "docs" / "images"))
        fresh, stored = (np.asarray(picture, int) for picture in pictures)
        assert fresh.shape == stored.shape
        assert (np.abs(fresh - stored) > 64).mean() < 0.002  # another version of a font


# -- the GPU's, in its tiny mode ---------------------------------------------------------------------------------------


def test_parameters_are_counted_right():
    tiny = terra_gpu.config(tiny=True)
    model = LlamaActionForCausalLM._from_config(tiny)
    assert terra_gpu.parameters(tiny) == sum(parameter.numel() for parameter in model.parameters())
    assert terra_gpu.read_parameters(tiny) == terra_gpu.parameters(tiny) - model.model.embed_tokens.weight.numel()
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
