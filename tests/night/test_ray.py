"""Batch inference by Ray that is killed loses no row and repeats none."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.batch import run as run_batch
from examples.terra import CHECKPOINT
from examples.terra.world import make_episode
from mmkit import MmkitError
from tests import ROOT
from tests.engine.terra.rollouts import prompt_of

pytestmark = pytest.mark.timeout(900)

LIMIT = 240
"""Seconds that the test waits for a condition."""
VARIABLES = {"MMKIT_MODULES": "tests.night.scripts_announce", "VLLM_PLUGINS": "mmkit", "VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.fixture
def short() -> Iterator[None]:
    """The paths of sockets are short, and what is killed leaves its sockets."""
    with TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        for variable in ("RAY_TMPDIR", "TMPDIR"):
            patch.setenv(variable, folder)
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


def start(inputs: Path, outputs: Path) -> subprocess.Popen[str]:
    engine = {"dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True}
    sampling = {"temperature": 0, "max_tokens": 64, "ignore_eos": True, "detokenize": False}
    options = {"model": str(CHECKPOINT.resolve()), "engine": engine, "sampling": sampling}
    command = [sys.executable, "-m", "tests.night.scripts_batch", str(inputs), str(outputs), json.dumps(options)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **VARIABLES}, **pipes)


def rows(outputs: Path, parts: int = 0, process: Any = None) -> list[dict[str, Any]]:
    """The rows of all parts, when there are as many parts."""
    until = time.monotonic() + LIMIT
    while len(written := sorted(outputs.glob("part-*.parquet"))) < parts:
        assert process.poll() is None, process.communicate()[0][-5000:]
        assert time.monotonic() < until
        time.sleep(0.02)
    return [row for part in written for row in pq.read_table(part).to_pylist()]


def test_what_is_killed_is_neither_lost_nor_repeated(tmp_path: Path, short: None) -> None:
    """First the program itself, then an engine of the next; one row cannot be answered."""
    inputs, outputs = tmp_path / "in", tmp_path / "out"
    inputs.mkdir()
    episodes = {seed: make_episode(seed) for seed in range(48)}
    actions = {seed: episode.actions[:3].tolist() for seed, episode in episodes.items()}
    actions[5][1] = actions[5][1][:4]
    whole = [{"id": seed, "prompt": prompt_of(e), "actions": actions[seed]} for seed, e in episodes.items()]
    pq.write_table(pa.Table.from_pylist(whole[:40]), inputs / "a.parquet")
    pq.write_table(pa.Table.from_pylist(whole[40:]), inputs / "b.parquet")

    first = start(inputs, outputs)
    rows(outputs, 1, first)
    with pytest.raises(MmkitError, match="expected no other run that writes here, got one"):
        run_batch(inputs, outputs, dict, {})
    first.kill()
    first.communicate()
    before = rows(outputs)

    second = start(inputs, outputs)
    os.kill(rows(outputs, len(before) // 2 + 1, second)[-1]["pid"], signal.SIGKILL)
    told, _ = second.communicate(timeout=LIMIT)
    assert second.returncode == 0, told[-5000:]
    after = rows(outputs)
    assert after[: len(before)] == before
    assert f"({48 - len(before)}, {sum(row['error'] is not None for row in after[len(before) :])})" in told
    assert sorted(row["id"] for row in after) == list(episodes)
    refusal = "terra.actions[1]: expected a (6, 3) float32 tensor, got shape (4, 3)."
    for row in after:
        if row["id"] == 5:
            assert row["error"].startswith(refusal)
        else:
            assert (row["tokens"], row["error"]) == (episodes[row["id"]].frames[3].tolist(), None)
