"""Batch inference on two nodes of a Ray cluster: what is killed is not lost, and nothing comes twice."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.terra import CHECKPOINT
from examples.terra.world import make_episode
from mmkit import MmkitError
from mmkit.serve.batch import run
from tests import ROOT
from tests.engine.ray_nodes import nodes, parts
from tests.engine.terra.rollouts import prompt_of

LIMIT = 240
"""Seconds that a test waits for a condition."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with nodes(2, num_cpus=2) as cluster:
        yield cluster


def start(cluster: Any, worker: str, inputs: Path, outputs: Path, **options: Any) -> subprocess.Popen[str]:
    """A run of tests/engine/scripts_batch.py. A model is known by the module that MMKIT_MODULES names alone."""
    environment = {
        **os.environ,
        "RAY_ADDRESS": cluster.address,
        "MMKIT_MODULES": "tests.engine.scripts_announce",
        "VLLM_PLUGINS": "mmkit",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [sys.executable, "-m", "tests.engine.scripts_batch", worker, inputs, outputs, json.dumps(options)]
    return subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_parts(outputs: Path, count: int, process: subprocess.Popen[str]) -> list[Path]:
    until = time.monotonic() + LIMIT
    while len(found := parts(outputs)) < count:
        assert process.poll() is None, process.communicate()[0][-5000:]
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


def end(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output[-5000:]
    return output


def rows(outputs: Path) -> list[dict[str, Any]]:
    return [row for part in parts(outputs) for row in pq.read_table(part).to_pylist()]


def test_what_is_killed_is_neither_lost_nor_repeated(cluster: Any, tmp_path: Path) -> None:
    inputs, outputs = tmp_path / "in.parquet", tmp_path / "out"
    names = [f"row {i}" for i in range(60)]
    pq.write_table(pa.table({"id": names}), inputs)
    first = start(cluster, "Slow", inputs, outputs, seconds=0.3)
    wait_for_parts(outputs, 2, first)
    with pytest.raises(MmkitError, match="expected no other run that writes here, got one"):
        run(inputs, outputs, dict, {})
    first.kill()
    first.communicate()
    kept = rows(outputs)

    second = start(cluster, "Slow", inputs, outputs, seconds=0.3)
    found = wait_for_parts(outputs, len(kept) // 2 + 2, second)
    os.kill(pq.read_table(found[-1])["pid"][0].as_py(), signal.SIGKILL)
    assert f"({60 - len(kept)}, 0)" in end(second)
    answered = rows(outputs)
    assert answered[: len(kept)] == kept
    assert sorted(row["id"] for row in answered) == sorted(names)
    assert len({row["pid"] for row in answered[len(kept) :]}) == 3  # two, and one in place of the killed
    assert len({row["node"] for row in answered}) == 2


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
    process = start(cluster, "Told", inputs, outputs, model=str(CHECKPOINT.resolve()), engine=engine, sampling=sampling)
    (first, *_) = wait_for_parts(outputs, 1, process)
    os.kill(pq.read_table(first)["pid"][0].as_py(), signal.SIGKILL)
    assert "(24, 1)" in end(process)

    answered = {row["id"]: row for row in rows(outputs)}
    assert len(rows(outputs)) == len(answered) == 24
    refusal = "terra.actions[1]: expected a (6, 3) float32 tensor, got shape (4, 3)."
    assert answered.pop(5)["error"].startswith(refusal)
    for seed, row in answered.items():
        assert row["tokens"] == episodes[seed].frames[3].tolist()
        assert row["error"] is None
    assert len({row["node"] for row in answered.values()}) == 2
