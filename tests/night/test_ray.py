"""Ray starts the processes of vLLM: those that share each layer, on two nodes, and the copies behind one port, on one,
since vLLM wants an address for each node there.

The CPU platform of vLLM 0.32 refuses Ray ("current platform cpu does not support ray."), since it names no resource of
Ray. Here a platform plugin names one, which the nodes claim to have; all else is vLLM's own.
"""

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.terra import CHECKPOINT
from examples.terra.world import Episode, make_episode
from mmkit import MmkitError
from mmkit.serve import Client
from mmkit.serve.batch import run as run_batch
from mmkit.serve.process import Server
from tests.engine.processes import run
from tests.engine.ray_nodes import end_batch, nodes, rows, start_batch, wait_for_parts
from tests.engine.terra.rollouts import prompt_of
from tests.engine.test_plugin import check_frames

pytestmark = pytest.mark.timeout(900)

FILES = {
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
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH with the platform plugin."""
    folder = tmp_path_factory.mktemp("platform")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)]))


@pytest.fixture
def cluster(request: pytest.FixtureRequest, path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The variables of programs that use a cluster, of as many nodes as the parameter says, for two processes."""
    monkeypatch.setenv("PYTHONPATH", path)
    with nodes(request.param, num_cpus=2, num_gpus=2 // request.param) as cluster:
        yield {"RAY_ADDRESS": cluster.address, "PYTHONPATH": path}


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_a_model_of_a_script_reaches_the_workers_of_ray(cluster: dict[str, str]) -> None:
    """One worker on each node, that share each layer. MMKIT_MODULES tells them of the model, and no entry point."""
    command = ("-m", "tests.engine.scripts_announce", str(CHECKPOINT), "2", '{"distributed_executor_backend": "ray"}')
    check_frames(run(*command, **cluster, VLLM_PLUGINS="mmkit,cpu_on_ray"))


@pytest.mark.parametrize("cluster", [1], indirect=True)
def test_copies_behind_one_port(cluster: dict[str, str], tmp_path: Path) -> None:
    options = "--data-parallel-size 2 --data-parallel-backend ray --enforce-eager"
    options += " --data-parallel-address 127.0.0.1 --skip-tokenizer-init --dtype float32 --max-num-seqs 8"
    environment = {**cluster, "MMKIT_MODULES": ""}
    episodes = [make_episode(seed) for seed in range(8)]
    with (
        Server(CHECKPOINT, *options.split(), environment=environment, log=tmp_path / "log") as server,
        Client(server.url) as client,
        ThreadPoolExecutor(len(episodes)) as threads,
    ):

        def ids(episode: Episode) -> list[int]:
            items = {"actions": list(episode.actions[:3])}
            answer = client.generate(prompt_of(episode), items, max_tokens=64, temperature=0, ignore_eos=True)
            return list(answer.choices[0].token_ids)

        assert list(threads.map(ids, episodes)) == [episode.frames[3].tolist() for episode in episodes]
        scraped = httpx.get(f"{server.url}/metrics").text
    for copy in range(2):
        assert re.search(rf'vllm:request_success_total{{engine="{copy}",finished_reason="length".* [1-9]', scraped)


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_what_is_killed_is_neither_lost_nor_repeated(cluster: dict[str, str], tmp_path: Path) -> None:
    inputs, outputs = tmp_path / "in.parquet", tmp_path / "out"
    names = [f"row {i}" for i in range(60)]
    pq.write_table(pa.table({"id": names}), inputs)
    first = start_batch(cluster["RAY_ADDRESS"], "Slow", inputs, outputs, seconds=0.3)
    wait_for_parts(outputs, 2, first)
    with pytest.raises(MmkitError, match="expected no other run that writes here, got one"):
        run_batch(inputs, outputs, dict, {})
    first.kill()
    first.communicate()
    kept = rows(outputs)

    second = start_batch(cluster["RAY_ADDRESS"], "Slow", inputs, outputs, seconds=0.3)
    found = wait_for_parts(outputs, len(kept) // 2 + 2, second)
    os.kill(pq.read_table(found[-1])["pid"][0].as_py(), signal.SIGKILL)
    assert f"({60 - len(kept)}, 0)" in end_batch(second)
    answered = rows(outputs)
    assert answered[: len(kept)] == kept
    assert sorted(row["id"] for row in answered) == sorted(names)
    assert len({row["pid"] for row in answered[len(kept) :]}) == 3  # two, and one in place of the killed
    assert len({row["node"] for row in answered}) == 2
