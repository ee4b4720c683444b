"""Registration reaches every process that vLLM starts, with and without an entry point."""

import json

from examples.terra import CHECKPOINT
from examples.terra.world import make_episode
from tests.engine.processes import run


def test_announce_names_a_module_once() -> None:
    code = """
import os
from mmkit.plugin import announce, load
announce("json"); announce("json"); print(os.environ["MMKIT_MODULES"]); load()
announce("__main__"); print(os.environ["MMKIT_MODULES"])
"""
    assert run("-c", code).split() == ["json", "json"]


def test_a_model_of_a_script_reaches_the_engine() -> None:
    """With the entry point of the examples blocked. At night there are two workers beside the engine core."""
    check_frames(run_script(1))


def run_script(workers: int) -> str:
    variables = {"VLLM_PLUGINS": "mmkit", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    return run("-m", "tests.night.scripts_announce", str(CHECKPOINT), str(workers), **variables)


def check_frames(output: str) -> None:
    (line,) = [line for line in output.splitlines() if line.startswith("FRAMES ")]
    assert json.loads(line.removeprefix("FRAMES ")) == [make_episode(seed).frames[3:5].tolist() for seed in range(2)]
