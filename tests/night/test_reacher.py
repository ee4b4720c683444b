"""The robot of the examples: trained anew, and driven by openpi's client through vLLM beside transformers."""

import json
from pathlib import Path

import pytest
import torch

from examples.reacher import CHECKPOINT
from examples.reacher.__main__ import SEEDS
from examples.reacher.report import Result
from examples.reacher.seeds import count_touched
from examples.reacher.train import TRAINING_STEPS, train
from tests import ROOT
from tests.engine.processes import run_python

pytestmark = pytest.mark.timeout(1200)


def test_a_model_that_is_trained_anew_touches_the_discs() -> None:
    """With another seed than the checkpoint's; python -m examples.reacher.seeds judges more of them."""
    torch.set_num_threads(1)
    model, processor = train(TRAINING_STEPS, seed=1)
    num_scenes = 300
    assert count_touched(model, processor, SEEDS[0], num_scenes) >= 0.97 * num_scenes


def test_openpis_client_drives_it_as_transformers_does_and_as_the_documentation_says(tmp_path: Path) -> None:
    run_python("-m", "examples.reacher", str(CHECKPOINT), "--out", str(tmp_path))

    results = [Result(**result) for result in json.loads((tmp_path / "robot.json").read_text())]
    stored = [Result(**result) for result in json.loads((ROOT / "docs" / "data" / "robot.json").read_text())]
    for result, expected in zip(results, stored, strict=True):
        assert result.equal >= 0.99 * result.scenes
        for count, expected_count in zip(result, expected, strict=True):
            assert abs(count - expected_count) <= 3
    assert (tmp_path / "robot.gif").stat().st_size < 400_000
