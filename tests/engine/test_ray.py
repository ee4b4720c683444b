"""Batch inference on two nodes of a Ray cluster: an engine that is killed loses no row, and repeats none."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.terra import CHECKPOINT
from examples.terra.world import make_episode
from tests.engine.ray_nodes import end_batch, nodes, rows, start_batch, wait_for_parts
from tests.engine.terra.rollouts import prompt_of


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with nodes(2, num_cpus=2) as cluster:
        yield cluster


def test_engines_on_two_nodes_give_the_same_ids(cluster: Any, tmp_path: Path) -> None:
    """An engine is killed while it answers, and one row cannot be answered."""
    inputs, outputs = tmp_path / "in", tmp_path / "out"
    inputs.mkdir()
    episodes = {seed: make_episode(seed) for seed in range(24)}
    actions = {seed: episode.actions[:3].tolist() for seed, episode in episodes.items()}
    actions[5][1] = actions[5][1][:4]
    whole = [{"id": seed, "prompt": prompt_of(e), "actions": actions[seed]} for seed, e in episodes.items()]
    pq.write_table(pa.Table.from_pylist(whole[:20]), inputs / "a.parquet")
    pq.write_table(pa.Table.from_pylist(whole[20:]), inputs / "b.parquet")

    engine = {"dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True}
    sampling = {"temperature": 0, "max_tokens": 64, "ignore_eos": True, "detokenize": False}
    process = start_batch(
        cluster.address, "Told", inputs, outputs, model=str(CHECKPOINT.resolve()), engine=engine, sampling=sampling
    )
    (first, *_) = wait_for_parts(outputs, 1, process)
    os.kill(pq.read_table(first)["pid"][0].as_py(), signal.SIGKILL)
    assert "(24, 1)" in end_batch(process)

    answered = {row["id"]: row for row in rows(outputs)}
    assert len(rows(outputs)) == len(answered) == 24
    refusal = "terra.actions[1]: expected a (6, 3) float32 tensor, got shape (4, 3)."
    assert answered.pop(5)["error"].startswith(refusal)
    for seed, row in answered.items():
        assert row["tokens"] == episodes[seed].frames[3].tolist()
        assert row["error"] is None
    assert len({row["node"] for row in answered.values()}) == 2
