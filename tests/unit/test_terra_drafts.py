"""Drafts of frames, and how vLLM is asked for them."""

import re

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


def prompt_of(frames: np.ndarray, actions: int) -> np.ndarray:
    """Frames with the placeholders of an action after each."""
    return np.pad(frames, ((0, 0), (0, actions)), constant_values=99).astype(np.int32).reshape(-1)


def steps(drafter: Drafter, frames: np.ndarray, frame: np.ndarray, streams: int = 1) -> tuple[int, int]:
    """Steps of an engine whose model draws a frame after others, and the tokens that were drafted."""
    known = prompt_of(frames, drafter.positions - len(frame))
    drawn, count, drafted = 1, 1, 0  # the prompt's own step draws the first token
    while drawn < len(frame):
        draft = drafter.drafts(np.concatenate([known, frame[:drawn]]), streams)
        right = next((i for i, token in enumerate(draft) if token != frame[drawn + i]), len(draft))
        drawn, count, drafted = drawn + right + 1, count + 1, drafted + len(draft)
    assert drawn == len(frame)
    return count, drafted


@given(st.data())
def test_a_draft_is_of_tokens_that_were_seen_and_never_longer_than_the_frame(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    actions, streams = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 1000))
    cells = rows * columns
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    known = prompt_of(random.integers(0, 5, (data.draw(st.integers(0, 12)), cells)), actions)
    begun = random.integers(0, 5, data.draw(st.integers(0, cells + actions - 1))).astype(np.int32)
    drafter = Drafter(FrameMotion(rows, columns, data.draw(st.integers(0, 3))), cells + actions)
    draft = drafter.drafts(np.concatenate([known, begun]), streams)
    assert len(draft) <= max(0, cells - 1 - len(begun))
    assert set(draft) <= set(known.tolist()) - {99}


def test_the_town_takes_few_steps_a_frame() -> None:
    """Most of it stands still, and the frames so far have shown most of what moves."""
    drafter = Drafter(FrameMotion(CELLS, CELLS), CELLS**2 + NUM_WAYPOINTS)
    counts = [
        steps(drafter, episode.frames[:known], episode.frames[known])[0]
        for episode in map(make_episode, range(6))
        for known in range(CONTEXT_FRAMES, len(episode.frames))
    ]
    assert np.mean(counts) <= 11


def test_more_streams_draft_less_and_so_do_worlds_that_cannot_be_told() -> None:
    random = np.random.default_rng(0)
    drafter = Drafter(FrameMotion(CELLS, CELLS), CELLS**2)
    still = np.tile(random.integers(0, 500, CELLS**2), (6, 1))
    noisy = np.where(random.random(still.shape) < 0.2, random.integers(0, 500, still.shape), still)
    counted = [
        steps(drafter, world[:5], world[5], streams)
        for world, streams in ((still, 1), (noisy, 1), (noisy, 8), (noisy, 64))
    ]
    per_step = [drafted / (count - 1) for count, drafted in counted]
    assert per_step[0] == CELLS**2 - 2
    assert per_step == sorted(set(per_step), reverse=True)


@pytest.mark.parametrize(("cells", "rows", "grid"), [(100, None, (10, 10)), (576, 18, (18, 32)), (24, None, (4, 6))])
def test_the_grid_is_that_of_the_config(cells: int, rows: int | None, grid: tuple[int, int]) -> None:
    sizes = {"num_image_patches": cells, "num_spatio_embeddings": cells + 6}
    assert LlamaActionConfig(**sizes, num_image_rows=rows).grid == grid
    with pytest.raises(ValueError, match=r"num_image_rows \(7\) must divide num_image_patches \(\d+\)\."):
        LlamaActionConfig(**sizes, num_image_rows=7)


def test_before_0_22_1_ngrams_draft_and_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "find_spec", lambda name: None)
    sentence = r"This vLLM takes no drafts of frames, as 0\.22\.1 and later do: n-grams draft 8 tokens instead\."
    with pytest.warns(UserWarning, match=re.compile(f"^{sentence}$")):
        assert drafts.speculation(63) == drafts.ngrams(8)
