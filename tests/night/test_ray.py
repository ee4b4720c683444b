"""Ray starts the processes of vLLM, on two nodes: those that share each layer, and the copies behind one port.

The CPU platform of vLLM 0.32 refuses Ray ("current platform cpu does not support ray."), since it names no resource of
Ray. Here a platform plugin names one, which the nodes claim to have; all else is vLLM's own.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.terra import CHECKPOINT
from examples.terra.world import make_episode
from mmkit.serve import Client
from mmkit.serve.process import Server
from tests.engine.processes import run
from tests.engine.ray_nodes import nodes
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
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Of programs that use a cluster of two nodes, each of which has room for one process of a model."""
    folder = tmp_path_factory.mktemp("platform")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)]))
    with pytest.MonkeyPatch.context() as env:
        env.setenv("PYTHONPATH", path)
        with nodes(2, num_cpus=2, num_gpus=1) as cluster:
            yield {"RAY_ADDRESS": cluster.address, "PYTHONPATH": path}


def test_a_model_of_a_script_reaches_the_workers_of_ray(variables: dict[str, str]) -> None:
    """One worker on each node, that share each layer. MMKIT_MODULES tells them of the model, and no entry point."""
    command = ("-m", "tests.engine.scripts_announce", str(CHECKPOINT), "2", '{"distributed_executor_backend": "ray"}')
    check_frames(run(*command, **variables, VLLM_PLUGINS="mmkit,cpu_on_ray"))


def test_copies_on_two_nodes_behind_one_port(variables: dict[str, str], tmp_path: Path) -> None:
    options = "--data-parallel-size 2 --data-parallel-backend ray --data-parallel-size-local 1 --enforce-eager"
    options += " --data-parallel-address 127.0.0.1 --skip-tokenizer-init --dtype float32 --max-num-seqs 8"
    environment: dict[str, Any] = {**variables, "MMKIT_MODULES": "", "VLLM_LOGGING_LEVEL": "INFO"}
    episodes = [make_episode(seed) for seed in range(8)]
    log = tmp_path / "log"
    with (
        Server(CHECKPOINT, *options.split(), environment=environment, log=log) as server,
        Client(server.url) as client,
    ):
        for episode in episodes:
            answer = client.generate(
                prompt_of(episode),
                {"actions": list(episode.actions[:3])},
                max_tokens=64,
                temperature=0,
                ignore_eos=True,
            )
            assert list(answer.choices[0].token_ids) == episode.frames[3].tolist()
    print(log.read_text())
