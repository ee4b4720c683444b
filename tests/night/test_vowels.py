"""The model of real recordings: trained anew, and asked over HTTP beside transformers and the baselines."""

import json
from pathlib import Path

import pytest
import torch

from examples.vowels.recordings import count_right, load_recordings
from examples.vowels.report import Counts
from examples.vowels.train import train
from tests import ROOT
from tests.engine.processes import run_python

pytestmark = pytest.mark.timeout(900)

TEST = load_recordings("test")


def test_a_model_that_is_trained_anew_names_the_speakers() -> None:
    """Its weights are equal to those of the checkpoint only on the machine that trained both."""
    torch.set_num_threads(1)
    model, processor = train(load_recordings("train"), 600, seed=0)
    answers = [model.answer(processor, recording.frames) for recording in TEST]
    assert count_right(answers, TEST) >= 355


def test_the_server_answers_as_transformers_does_and_as_the_documentation_says(tmp_path: Path) -> None:
    run_python("-m", "examples.vowels", "--out", str(tmp_path))

    counts = Counts(**json.loads((tmp_path / "vowels.json").read_text()))
    assert abs(counts.http - counts.transformers) <= 1
    assert abs(counts.swapped - counts.http) <= 1
    assert counts.before_swap <= 0.15 * counts.recordings
    stored = Counts(**json.loads((ROOT / "docs" / "data" / "vowels.json").read_text()))
    for count, expected in zip(counts, stored, strict=True):
        assert abs(count - expected) <= 1
    assert (tmp_path / "vowels.svg").read_text() == (ROOT / "docs" / "images" / "vowels.svg").read_text()
