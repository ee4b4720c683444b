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

from .rollouts import PAD, generate, generate_by_reference, load_reference, make_request, stack_episodes


def test_greedy_ids_are_those_of_the_reference(terra: Any) -> None:
    """22 frames of each of 2 drives that were not trained on."""
    frames, actions = stack_episodes(range(200, 202))
    assert np.array_equal(generate(terra, frames, actions), generate_by_reference(frames, actions))


def test_a_window_slides_as_in_the_reference(terra: Any) -> None:
    """It slides twice, the last time before the last frame."""
    frames, actions = stack_episodes(range(200, 201), 33)

    steps = list(terra.rollout(frames[:, :22], actions, 9, keep=20))

    tokens = np.stack([step.tokens for step in steps], axis=1)
    assert np.array_equal(tokens, generate_by_reference(frames, actions, 9, context=22, keep=20))
    frames_of_prompts = [step.prompt_tokens // 70 for step in steps]
    assert frames_of_prompts == [22, 23, 24, 20, 21, 22, 23, 24, 20]


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        pytest.param(None, "The model holds at most 25 frames, not 26. Say how many to keep.", id="no window"),
        pytest.param(0, "keep must be from 1 to 24 frames, not 0.", id="an empty window"),
        pytest.param(25, "keep must be from 1 to 24 frames, not 25.", id="a window of all frames"),
    ],
)
def test_more_frames_than_the_model_holds_need_a_window(terra: Any, keep: int | None, message: str) -> None:
    frames, actions = stack_episodes(range(200, 201))
    context = frames[:, :3]

    with pytest.raises(ValueError) as refusal:
        next(terra.rollout(context, actions, 23, keep=keep))
    with pytest.raises(ValueError) as refusal_of_reference:
        next(load_reference().rollout(torch.from_numpy(context), torch.from_numpy(actions), 23, keep=keep))

    assert str(refusal.value) == message
    assert str(refusal_of_reference.value) == message


def test_the_engine_is_compiled_and_its_prefix_cache_serves_the_history(terra: Any) -> None:
    config = terra.llm.llm_engine.vllm_config
    assert not config.model_config.enforce_eager
    assert config.compilation_config.mode != CompilationMode.NONE

    frames, actions = stack_episodes(range(300, 301))
    steps = list(terra.rollout(frames[:, :3], actions, 22))
    later_steps = steps[1:]

    cached_tokens = sum(step.cached_tokens for step in later_steps)
    prompt_tokens = sum(step.prompt_tokens for step in later_steps)
    assert cached_tokens >= 0.95 * prompt_tokens


def test_batch_inference_of_rollouts_gives_the_ids_of_the_engine(
    terra: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contexts of the rows have two lengths, and one row is refused."""

    def get_terra(model: str) -> Any:
        return terra

    monkeypatch.setattr("examples.terra.rollout.VllmTerra", get_terra)
    batch.write_episodes(tmp_path / "episodes.parquet", 4)
    rows = pq.read_table(tmp_path / "episodes.parquet").to_pylist()
    rows[1]["context"] = rows[1]["context"][:2]
    rows[2]["actions"][0][0][0] = float("nan")

    answers = batch.Rollouts("", 2)(rows)

    assert answers.pop(2)["error"].startswith("terra.actions[0]: expected finite values")
    del rows[2]
    for row, answer in zip(rows, answers, strict=True):
        context = np.array([row["context"]])
        actions = np.array([row["actions"]], dtype="float32")
        assert np.array_equal([answer["tokens"]], generate(terra, context, actions, 2))


def test_batch_inference_answers_good_rows_and_tells_why_others_are_refused(
    terra: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_llm(model: str) -> Any:
        return terra.llm

    monkeypatch.setattr(vllm, "LLM", get_llm)
    worker = Generate("", {}, {"max_tokens": 64, "temperature": 0, "ignore_eos": True, "detokenize": False})
    episodes = [make_episode(seed) for seed in range(5)]
    rows: list[Any] = []
    for episode in episodes:
        request = make_request(episode)
        rows.append({"prompt": request["prompt_token_ids"], "actions": request["multi_modal_data"]["actions"]})
    rows[1]["prompt"] = None
    rows[2]["actions"] = None
    rows[4]["more"] = [1]

    answers = worker(rows)

    for number in (0, 3):
        episode = episodes[number]
        (frame,) = generate_by_reference(episode.frames[None], episode.actions[None], 1)[0].tolist()
        assert answers[number]["tokens"] == frame
    assert answers[1]["error"] == "prompt: expected a text or a list of token ids, got a NoneType."
    assert f"got 18 placeholders [{PAD}] and no item" in answers[2]["error"]
    assert "'more'" in answers[4]["error"]
