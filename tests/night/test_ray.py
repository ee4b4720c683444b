"""Two nodes of a Ray cluster: batch inference that is killed loses no row and repeats none, and an engine of two
workers, one on each node.

The CPU platform of vLLM 0.32 refuses Ray ("current platform cpu does not support ray."), since it names no resource of
Ray. Here a platform plugin names one, which the nodes claim to have; all else is vLLM's own.
"""

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

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.batch import run as run_batch
from examples.terra import CHECKPOINT
from examples.terra.worlds import make_episode
from mmkit import MmkitError
from tests import ROOT
from tests.engine.processes import run
from tests.engine.terra.rollouts import expected, prompt_of, stacked
from tests.night.test_plugin import check_frames

pytestmark = pytest.mark.timeout(900)

LIMIT = 240
"""Seconds that a test waits for a condition."""
VARIABLES = {"MMKIT_MODULES": "tests.night.scripts_announce", "VLLM_PLUGINS": "mmkit", "VLLM_LOGGING_LEVEL": "ERROR"}
PLATFORM = {
    "cpu_on_ray.py": "def platform(): return 'cpu_on_ray_platform.CpuOnRay'",
    "cpu_on_ray_platform.py": """
from vllm.platforms.cpu import CpuPlatform


class CpuOnRay(CpuPlatform):
    ray_device_key = "GPU"
""",
    "cpu_on_ray-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: cpu_on_ray\nVersion: 1\n",
    "cpu_on_ray-1.dist-info/entry_points.txt": "[vllm.platform_plugins]\ncpu_on_ray = cpu_on_ray:platform\n",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of two nodes that listen on 127.0.0.1 and know nothing of models: drivers bring the variables."""
    plugin = tmp_path_factory.mktemp("platform")
    for name, text in PLATFORM.items():
        (plugin / name).parent.mkdir(exist_ok=True)
        (plugin / name).write_text(text)
    node = {"node_ip_address": "127.0.0.1", "num_cpus": 2, "num_gpus": 1}
    node |= {"object_store_memory": 200_000_000, "include_dashboard": False}
    with (
        TemporaryDirectory(prefix="ray-", dir="/tmp") as folder,  # the paths of sockets are short
        pytest.MonkeyPatch.context() as patch,
    ):
        # the cluster's address is written into Ray's own folder, which only `ray.init` and `ray start` make; and what
        # is killed leaves its sockets
        for variable in ("RAY_TMPDIR", "TMPDIR"):
            patch.setenv(variable, folder)
        Path(folder, "ray").mkdir()
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # a driver's own address is 127.0.0.1
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(plugin)])))
        from ray.cluster_utils import Cluster

        nodes = Cluster(initialize_head=True, head_node_args=node)
        try:
            nodes.add_node(**node)
            started = psutil.Process().children(recursive=True)
            patch.setenv("RAY_ADDRESS", nodes.address)
            yield nodes.address
        finally:
            nodes.shutdown()
            _, alive = psutil.wait_procs(started, timeout=20)  # workers end when their raylet has gone
            for process in alive:
                process.kill()


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


def test_what_is_killed_is_neither_lost_nor_repeated(cluster: str, tmp_path: Path) -> None:
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
    assert len({row["node"] for row in after}) == 2
    frames = expected(*stacked(range(48)), 1)[:, 0].tolist()
    refusal = "terra.actions[1]: expected a (6, 3) float32 tensor, got shape (4, 3)."
    for row in after:
        if row["id"] == 5:
            assert row["error"].startswith(refusal)
        else:
            assert (row["tokens"], row["error"]) == (frames[row["id"]], None)


def test_a_model_of_a_script_reaches_the_workers_of_ray(cluster: str) -> None:
    """They share each layer. MMKIT_MODULES tells them of the model, and no entry point."""
    command = ("-m", "tests.night.scripts_announce", str(CHECKPOINT), "2", '{"distributed_executor_backend": "ray"}')
    check_frames(run(*command, VLLM_PLUGINS="mmkit,cpu_on_ray"))
