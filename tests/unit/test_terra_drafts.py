"""Drafts of frames, and how vLLM is asked for them."""

import re
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.terra import drafts
from examples.terra.configuration import LlamaActionConfig
from examples.terra.drafts import Drafter, FrameMotion
from examples.terra.drive.drives import NUM_WAYPOINTS
from examples.terra.drive.simulator import CELLS
from examples.terra.worlds import CONTEXT_FRAMES, make_episode

PLACEHOLDER = 99


class Steps(NamedTuple):
    """What an engine does for one frame."""

    count: int
    drafted: int


def make_prompt(frames: np.ndarray, actions: int) -> np.ndarray:
    """Return frames with the placeholders of an action after each."""
    return np.pad(frames, ((0, 0), (0, actions)), constant_values=PLACEHOLDER).astype(np.int32).reshape(-1)


def count_steps(drafter: Drafter, frames: np.ndarray, frame: np.ndarray, streams: int = 1) -> Steps:
    """Return the steps of an engine whose model draws a frame after others."""
    prompt = make_prompt(frames, drafter.positions - len(frame))
    num_drawn = 1  # the prompt's own step draws the first token
    count = 1
    num_drafted = 0
    while num_drawn < len(frame):
        draft = drafter.draft_tokens(np.concatenate([prompt, frame[:num_drawn]]), streams)
        num_right = 0
        while num_right < len(draft) and draft[num_right] == frame[num_drawn + num_right]:
            num_right += 1
        num_drawn += num_right + 1
        count += 1
        num_drafted += len(draft)
    assert num_drawn == len(frame)
    return Steps(count, num_drafted)


@given(st.data())
def test_a_draft_is_of_tokens_that_were_seen_and_never_longer_than_the_frame(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 6))
    columns = data.draw(st.integers(1, 6))
    actions = data.draw(st.integers(0, 3))
    streams = data.draw(st.integers(1, 1000))
    cells = rows * columns
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    frames = random.integers(0, 5, (data.draw(st.integers(0, 12)), cells))
    prompt = make_prompt(frames, actions)
    begun = random.integers(0, 5, data.draw(st.integers(0, cells + actions - 1))).astype(np.int32)
    drafter = Drafter(FrameMotion(rows, columns, data.draw(st.integers(0, 3))), cells + actions)

    draft = drafter.draft_tokens(np.concatenate([prompt, begun]), streams)

    assert len(draft) <= max(0, cells - 1 - len(begun))
    assert set(draft) <= set(prompt.tolist()) - {PLACEHOLDER}


def test_the_town_takes_few_steps_a_frame() -> None:
    """Most of it stands still, and the frames so far have shown most of what moves."""
    drafter = Drafter(FrameMotion(CELLS, CELLS), CELLS**2 + NUM_WAYPOINTS)
    counts = []
    for seed in range(6):
        frames = make_episode(seed).frames
        for index in range(CONTEXT_FRAMES, len(frames)):
            counts.append(count_steps(drafter, frames[:index], frames[index]).count)
    assert np.mean(counts) <= 11


def test_more_streams_draft_less_and_so_do_worlds_that_cannot_be_predicted() -> None:
    random = np.random.default_rng(0)
    drafter = Drafter(FrameMotion(CELLS, CELLS), CELLS**2)
    still = np.tile(random.integers(0, 500, CELLS**2), (6, 1))
    noisy = np.where(random.random(still.shape) < 0.2, random.integers(0, 500, still.shape), still)
    per_step = []
    for world, streams in ((still, 1), (noisy, 1), (noisy, 8), (noisy, 64)):
        steps = count_steps(drafter, world[:5], world[5], streams)
        per_step.append(steps.drafted / (steps.count - 1))
    assert per_step[0] == CELLS**2 - 2
    assert per_step == sorted(set(per_step), reverse=True)


@pytest.mark.parametrize(
    ("cells", "rows", "grid"),
    [
        pytest.param(100, None, (10, 10), id="square"),
        pytest.param(576, 18, (18, 32), id="of so many rows"),
        pytest.param(24, None, (4, 6), id="as square as can be"),
    ],
)
def test_the_grid_is_that_of_the_config(cells: int, rows: int | None, grid: tuple[int, int]) -> None:
    sizes = {"num_image_patches": cells, "num_spatio_embeddings": cells + 6}
    assert LlamaActionConfig(**sizes, num_image_rows=rows).grid == grid
    with pytest.raises(ValueError, match=r"num_image_rows \(7\) must divide num_image_patches \(\d+\)\."):
        LlamaActionConfig(**sizes, num_image_rows=7)


def test_before_0_22_1_ngrams_draft_and_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "find_spec", lambda name: None)
    sentence = r"This vLLM takes no drafts of frames, as 0\.22\.1 and later do: n-grams draft 8 tokens instead\."
    with pytest.warns(UserWarning, match=re.compile(f"^{sentence}$")):
        assert drafts.make_speculative_config(63) == drafts.make_ngram_config(8)
