"""The example of real recordings: data, baselines, what is written of a run, and the checkpoint in transformers."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from examples.vowels import CHECKPOINT
from examples.vowels.baselines import answer_by_regression, compute_distances
from examples.vowels.extract import read_split
from examples.vowels.model import VowelsForCausalLM
from examples.vowels.picture import draw
from examples.vowels.recordings import NUM_SPEAKERS, Split, augment, count_right, load_recordings
from examples.vowels.report import Counts, choose_panels, write_line, write_table
from examples.vowels.spec import VOWELS
from mmkit import InputError
from tests import ROOT

DATA = ROOT / "docs" / "data"
COUNTS = Counts(**json.loads((DATA / "vowels.json").read_text()))
TEST = load_recordings("test")


@pytest.mark.parametrize(("split", "count"), [("train", 270), ("test", 370)])
def test_the_recordings_are_those_of_the_data_set(split: Split, count: int) -> None:
    recordings = load_recordings(split)
    assert len(recordings) == count
    lengths = [len(recording.frames) for recording in recordings]
    assert (min(lengths), max(lengths)) == ((7, 26) if split == "train" else (7, 29))
    counts = np.bincount([recording.speaker for recording in recordings]).tolist()
    # as the description of the data set has them
    assert counts == ([0] + [30] * NUM_SPEAKERS if split == "train" else [0, 31, 35, 88, 44, 29, 24, 40, 50, 29])
    for recording in recordings:
        assert recording.frames.shape[1:] == (12,)
        assert recording.frames.dtype == np.float32


def test_a_file_of_the_data_set_is_read() -> None:
    recordings, speakers = read_split("# about it\n@equalLength false\n@data\n1,2,3:4,5,6:9\n0.5:-1.25:1\n")
    assert speakers == [9, 1]
    assert [frames.tolist() for frames in recordings] == [[[1, 4], [2, 5], [3, 6]], [[0.5, -1.25]]]


def test_a_changed_recording_is_one_that_the_model_takes() -> None:
    rng = np.random.default_rng(0)
    for recording in TEST[::10]:
        changed = augment(recording.frames, rng)
        assert changed.dtype == np.float32
        assert 5 <= len(changed) <= 32
        assert np.abs(changed.mean(0) - recording.frames.mean(0)).max() < 0.5


def measure_by_all_paths(first: np.ndarray, second: np.ndarray) -> float:
    """Return the distance of dynamic time warping as it is defined: the least over all paths."""
    last = (len(first) - 1, len(second) - 1)

    def measure(row: int, column: int) -> float:
        cost = float(np.square(first[row] - second[column]).sum())
        if (row, column) == last:
            return cost
        steps = []
        for row_step, column_step in itertools.product((0, 1), repeat=2):
            if (row_step or column_step) and row + row_step <= last[0] and column + column_step <= last[1]:
                steps.append(measure(row + row_step, column + column_step))
        return cost + min(steps)

    return measure(0, 0)


def test_the_distance_of_the_baseline_is_that_of_dynamic_time_warping() -> None:
    rng = np.random.default_rng(0)
    lengths = np.array([1, 3, 5])
    padded = np.zeros((3, 5, 2))
    for index, length in enumerate(lengths):
        padded[index, :length] = rng.normal(size=(length, 2))
    frames = rng.normal(size=(4, 2))
    distances = compute_distances(frames, padded, lengths)
    for index, length in enumerate(lengths):
        assert distances[index] == pytest.approx(measure_by_all_paths(frames, padded[index, :length]))


def test_the_regression_of_the_documentation() -> None:
    answers = answer_by_regression(load_recordings("train"), TEST)
    assert abs(count_right(answers, TEST) - COUNTS.regression) <= 1


def test_the_checkpoint_in_transformers_names_the_speakers() -> None:
    """A tenth of the recordings; at night all of them, over HTTP as well."""
    model = VowelsForCausalLM.from_pretrained(CHECKPOINT).eval()
    processor = VOWELS.hf_processor(model.config, PreTrainedTokenizerFast.from_pretrained(CHECKPOINT))
    recordings = TEST[::10]
    answers = [model.answer(processor, recording.frames) for recording in recordings]
    assert count_right(answers, recordings) >= 0.95 * len(recordings)
    assert count_right(answers, recordings[9:] + recordings[:9]) <= 0.2 * len(recordings)

    sentence = "vowels.recording[0]: expected a (1..32, 12) float32 tensor, got shape (33, 12)."
    with pytest.raises(InputError, match=re.escape(sentence)):
        model.answer(processor, np.zeros((33, 12), dtype=np.float32))


def test_the_picture_shows_what_is_wrong() -> None:
    answers = [recording.answer for recording in TEST]
    neighbours = answers.copy()
    answers[50] = "speaker 9"
    neighbours[40] = "speaker 8"
    svg = draw(choose_panels(TEST, answers, neighbours))
    assert svg.count("<polyline") == 4 * 12
    assert svg.count('class="wrong"') == 2
    assert '<tspan class="wrong">1-NN DTW: speaker 8</tspan>, truth: speaker 2' in svg


def test_the_page_has_the_line_of_the_run() -> None:
    page = (ROOT / "docs" / "vowels.md").read_text()
    assert write_line(COUNTS) in re.sub("<!--.*?-->", "", page).replace("\n", " ")


def test_the_page_has_the_table_of_the_run() -> None:
    assert write_table(COUNTS) in (ROOT / "docs" / "vowels.md").read_text()


def test_the_licence_of_the_recordings_is_beside_them() -> None:
    text = Path(ROOT / "examples" / "vowels" / "RECORDINGS.md").read_text()
    assert "Creative Commons Attribution 4.0" in text
    assert "10.24432/C5NS47" in text
