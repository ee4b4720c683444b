"""Two nodes of a Ray cluster: batch inference that is killed loses no row and repeats none, and an engine has a worker
on each node.

The CPU platform of vLLM 0.32 rejects Ray ("current platform cpu does not support ray."), since it names no resource of
Ray. Here a platform plugin names one, which the nodes claim to have. Everything else is vLLM's own.
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
from tests.engine.processes import run_python
from tests.engine.terra.rollouts import generate_by_reference, make_prompt, stack_episodes
from tests.night.test_plugin import check_frames

pytestmark = pytest.mark.timeout(900)

MAX_SECONDS = 240
"""Seconds that a test waits for a condition."""
NUM_ROWS = 48
ROWS_OF_FIRST_FILE = 40
REFUSED_ROW = 5
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
    """The address of two nodes that listen on 127.0.0.1. They know of no model: drivers bring the variables."""
    plugin = tmp_path_factory.mktemp("platform")
    for name, text in PLATFORM.items():
        (plugin / name).parent.mkdir(exist_ok=True)
        (plugin / name).write_text(text)
    node = {
        "node_ip_address": "127.0.0.1",
        "num_cpus": 2,
        "num_gpus": 1,
        "object_store_memory": 200_000_000,
        "include_dashboard": False,
    }
    with (
        # the folder is in /tmp, since the path of a socket must be short
        TemporaryDirectory(prefix="ray-", dir="/tmp") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        # Killed processes leave their sockets in this folder, which is removed. The cluster writes its address into a
        # folder "ray" in it, which only `ray.init` and `ray start` make.
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("TMPDIR", folder)
        Path(folder, "ray").mkdir()
        # with this, a driver has the address 127.0.0.1
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(plugin), prepend=os.pathsep)
        from ray.cluster_utils import Cluster

        nodes = Cluster(initialize_head=True, head_node_args=node)
        try:
            nodes.add_node(**node)
            processes = psutil.Process().children(recursive=True)
            patch.setenv("RAY_ADDRESS", nodes.address)
            yield nodes.address
        finally:
            nodes.shutdown()
            # workers end when their raylet has ended
            _, alive = psutil.wait_procs(processes, timeout=20)
            for process in alive:
                process.kill()


def start_program(inputs: Path, outputs: Path) -> subprocess.Popen[str]:
    """Start the batch inference of tests/night/scripts_batch.py."""
    engine = {"dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True}
    sampling = {"temperature": 0, "max_tokens": 64, "ignore_eos": True, "detokenize": False}
    options = {"model": str(CHECKPOINT.resolve()), "engine": engine, "sampling": sampling}
    command = [sys.executable, "-m", "tests.night.scripts_batch", str(inputs), str(outputs), json.dumps(options)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | VARIABLES,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def list_parts(outputs: Path) -> list[Path]:
    return sorted(outputs.glob("part-*.parquet"))


def wait_for_parts(outputs: Path, count: int, program: subprocess.Popen[str]) -> None:
    """Wait until the program has written so many parts."""
    deadline = time.monotonic() + MAX_SECONDS
    while len(list_parts(outputs)) < count:
        assert program.poll() is None, program.communicate()[0][-5000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_rows(outputs: Path) -> list[dict[str, Any]]:
    """Return the rows of all parts."""
    rows: list[dict[str, Any]] = []
    for part in list_parts(outputs):
        rows += pq.read_table(part).to_pylist()
    return rows


def write_inputs(folder: Path) -> None:
    """Write rows to two files. The second action of REFUSED_ROW is too short."""
    rows = []
    for seed in range(NUM_ROWS):
        episode = make_episode(seed)
        actions = episode.actions[:3].tolist()
        if seed == REFUSED_ROW:
            actions[1] = actions[1][:4]
        rows.append({"id": seed, "prompt": make_prompt(episode), "actions": actions})
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows[:ROWS_OF_FIRST_FILE]), folder / "a.parquet")
    pq.write_table(pa.Table.from_pylist(rows[ROWS_OF_FIRST_FILE:]), folder / "b.parquet")


def check_answers(rows: list[dict[str, Any]]) -> None:
    assert sorted(row["id"] for row in rows) == list(range(NUM_ROWS))
    frames, actions = stack_episodes(range(NUM_ROWS))
    expected = generate_by_reference(frames, actions, 1)[:, 0].tolist()
    for row in rows:
        if row["id"] == REFUSED_ROW:
            sentence = "terra.actions[1]: expected a (6, 3) float32 tensor, got shape (4, 3)."
            assert row["error"].startswith(sentence)
        else:
            assert row["tokens"] == expected[row["id"]]
            assert row["error"] is None


def test_batch_inference_that_is_killed_loses_no_row_and_repeats_none(cluster: str, tmp_path: Path) -> None:
    """The first program is killed, and then an engine of the second one."""
    inputs = tmp_path / "in"
    outputs = tmp_path / "out"
    write_inputs(inputs)

    first = start_program(inputs, outputs)
    wait_for_parts(outputs, 1, first)
    with pytest.raises(MmkitError, match="expected no other run that writes here, got one"):
        run_batch(inputs, outputs, dict, {})
    first.kill()
    first.communicate()
    rows_of_first = read_rows(outputs)

    second = start_program(inputs, outputs)
    # a part has at most two rows, so one part of these is by the second program
    wait_for_parts(outputs, len(rows_of_first) // 2 + 1, second)
    engine_pid = read_rows(outputs)[-1]["pid"]
    os.kill(engine_pid, signal.SIGKILL)
    output, _ = second.communicate(timeout=MAX_SECONDS)

    assert second.returncode == 0, output[-5000:]
    rows = read_rows(outputs)
    rows_of_second = rows[len(rows_of_first) :]
    assert rows[: len(rows_of_first)] == rows_of_first
    refused_by_second = sum(row["error"] is not None for row in rows_of_second)
    assert f"({NUM_ROWS - len(rows_of_first)}, {refused_by_second})" in output
    assert len({row["node"] for row in rows}) == 2
    check_answers(rows)


def test_a_model_of_a_script_reaches_the_workers_of_ray(cluster: str) -> None:
    """The workers share each layer. MMKIT_MODULES tells them of the model; there is no entry point."""
    options = '{"distributed_executor_backend": "ray"}'
    output = run_python(
        "-m", "tests.night.scripts_announce", str(CHECKPOINT), "2", options, VLLM_PLUGINS="mmkit,cpu_on_ray"
    )
    check_frames(output)
