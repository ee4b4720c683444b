"""What an actor of batch inference makes of rows: the ids of the engine, also beside rows that are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import vllm

from examples.terra import batch
from examples.terra.world import make_episode
from mmkit.serve.batch import Generate

from .rollouts import generate, request

FRAMES = 2


def test_rollouts(terra: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of contexts of two lengths."""
    monkeypatch.setattr("examples.terra.rollout.VllmTerra", lambda model: terra)
    batch.write_episodes(tmp_path / "episodes.parquet", 4)
    rows = pq.read_table(tmp_path / "episodes.parquet").to_pylist()
    rows[1]["context"] = rows[1]["context"][:2]
    rows[2]["actions"][0][0][0] = float("nan")
    answers = batch.Rollouts("", FRAMES)(rows)
    assert answers.pop(2)["error"].startswith("terra.actions[0]: expected finite values")
    del rows[2]
    for row, answer in zip(rows, answers, strict=True):
        context, actions = (np.array([row[name]]) for name in ("context", "actions"))
        assert np.array_equal([answer["tokens"]], generate(terra, context, actions.astype("float32"), FRAMES))


def test_one_request_per_row(terra: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "LLM", lambda model: terra.llm)
    worker = Generate("", {}, {"max_tokens": 64, "temperature": 0, "ignore_eos": True, "detokenize": False})
    episodes = [make_episode(seed) for seed in range(6)]
    rows = []
    for seed, episode in enumerate(episodes):
        sent = request(episode)
        rows.append({"id": seed, "prompt": sent["prompt_token_ids"], **sent["multi_modal_data"]})
    rows[1]["prompt"], rows[2]["actions"], rows[4]["more"] = None, None, [1]
    answers = worker(rows)
    good = [
        answer["tokens"] == e.frames[3].tolist()
        for answer, e in zip(answers, episodes, strict=True)
        if "tokens" in answer
    ]
    assert good == [True] * 3
    assert answers[1]["error"] == "prompt: expected a text or a list of token ids, got a NoneType."
    assert "got 18 placeholder id(s) 31 and no item" in answers[2]["error"]
    assert "'more'" in answers[4]["error"]
