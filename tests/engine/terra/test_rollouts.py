"""Rollouts: the ids of the reference, caches, batch inference. tests/night/test_terra.py has the engines that draft
frames, and how good the world is."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import vllm
from vllm.config import CompilationMode

from examples.batch import Generate
from examples.terra import batch
from examples.terra.worlds import make_episode

from .rollouts import PAD, expected, generate, reference, request, stacked


def test_greedy_ids_are_those_of_the_reference(terra: Any) -> None:
    """22 frames of each of 2 drives never seen."""
    frames, actions = stacked(range(200, 202))
    assert np.array_equal(generate(terra, frames, actions), expected(frames, actions))


def test_a_window_slides_as_in_the_reference(terra: Any) -> None:
    """Three slides, the last one before the last frame."""
    frames, actions = stacked(range(200, 201), 36)
    steps = list(terra.rollout(frames[:, :3], actions, 33, keep=20))
    tokens = np.stack([step.tokens for step in steps], axis=1)
    assert np.array_equal(tokens, expected(frames, actions, 33, keep=20))
    assert [step.prompt_tokens // 70 for step in steps] == [*range(3, 25), *range(20, 25), *range(20, 25), 20]


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (None, "The model holds at most 25 frames, not 26. Say how many to keep."),
        (0, "keep must be from 1 to 24 frames, not 0."),
        (25, "keep must be from 1 to 24 frames, not 25."),
    ],
)
def test_more_frames_than_the_model_holds_need_a_window(terra: Any, keep: int | None, message: str) -> None:
    frames, actions = stacked(range(200, 201))
    for rollout, of in ((terra.rollout, np.asarray), (reference().rollout, torch.from_numpy)):
        with pytest.raises(ValueError) as caught:
            next(rollout(of(frames[:, :3]), of(actions), 23, keep=keep))
        assert str(caught.value) == message


def test_compiled_and_cached(terra: Any) -> None:
    """The prefix cache serves the history."""
    config = terra.llm.llm_engine.vllm_config
    assert not config.model_config.enforce_eager
    assert config.compilation_config.mode != CompilationMode.NONE
    frames, actions = stacked(range(300, 301))
    steps = list(terra.rollout(frames[:, :3], actions, 22))[1:]
    assert sum(s.cached_tokens for s in steps) >= 0.95 * sum(s.prompt_tokens for s in steps)


def test_batches_of_rollouts(terra: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an actor makes of rows: the ids of the engine, of contexts of two lengths, beside a row that is refused."""
    monkeypatch.setattr("examples.terra.rollout.VllmTerra", lambda model: terra)
    batch.write_episodes(tmp_path / "episodes.parquet", 4)
    rows = pq.read_table(tmp_path / "episodes.parquet").to_pylist()
    rows[1]["context"] = rows[1]["context"][:2]
    rows[2]["actions"][0][0][0] = float("nan")
    answers = batch.Rollouts("", 2)(rows)
    assert answers.pop(2)["error"].startswith("terra.actions[0]: expected finite values")
    del rows[2]
    for row, answer in zip(rows, answers, strict=True):
        context, actions = (np.array([row[name]]) for name in ("context", "actions"))
        assert np.array_equal([answer["tokens"]], generate(terra, context, actions.astype("float32"), 2))


def test_batches_of_one_request_per_row(terra: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "LLM", lambda model: terra.llm)
    worker = Generate("", {}, {"max_tokens": 64, "temperature": 0, "ignore_eos": True, "detokenize": False})
    episodes = [make_episode(seed) for seed in range(5)]
    sent = map(request, episodes)
    rows: list[Any] = [{"prompt": one["prompt_token_ids"], **one["multi_modal_data"]} for one in sent]
    rows[1]["prompt"], rows[2]["actions"], rows[4]["more"] = None, None, [1]
    answers = worker(rows)
    for answer, episode in ((answers[i], episodes[i]) for i in (0, 3)):
        assert answer["tokens"] == expected(episode.frames[None], episode.actions[None], 1)[0, 0].tolist()
    assert answers[1]["error"] == "prompt: expected a text or a list of token ids, got a NoneType."
    assert f"got 18 placeholders [{PAD}] and no item" in answers[2]["error"]
    assert "'more'" in answers[4]["error"]
