"""The benchmarks measure what they say. None of these tests looks at a time."""

import pytest

from benchmarks import measure, report, terra_gpu
from examples.terra.reference import LlamaActionForCausalLM
from tests import ROOT


def test_ratios_are_of_pairs():
    ratios = measure.ratio({"ours": [1.0, 4.0, 3.0], "theirs": [2.0, 4.0, 2.0]}, "ours", "theirs")
    assert (ratios["ratio"], ratios["ours_ms"], ratios["theirs_ms"]) == (1.0, 3000.0, 2000.0)


def test_the_tables_of_the_pages_are_the_stored_results():
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("data/performance.md", "performance-terra.md"))
    for name, table in report.tables().items():
        assert table in pages, f"python -m benchmarks.report prints another table of {name}"


# -- the GPU's, in its tiny mode ---------------------------------------------------------------------------------------


def test_parameters_are_counted_right():
    tiny = terra_gpu.config(tiny=True)
    model = LlamaActionForCausalLM._from_config(tiny)
    assert terra_gpu.parameters(tiny) == sum(parameter.numel() for parameter in model.parameters())
    assert terra_gpu.read_parameters(tiny) == terra_gpu.parameters(tiny) - model.model.embed_tokens.weight.numel()
    assert terra_gpu.parameters(terra_gpu.config(tiny=False)) == pytest.approx(2.04e9, rel=0.01)
