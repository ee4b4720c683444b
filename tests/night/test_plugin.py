"""Registration reaches every process that vLLM starts, without an entry point."""

import json

from examples.terra import CHECKPOINT
from tests.engine.processes import run
from tests.engine.terra.rollouts import expected, stacked


def run_script(workers: int) -> str:
    """Its output; the entry point of the examples is blocked."""
    variables = {"VLLM_PLUGINS": "mmkit", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    return run("-m", "tests.night.scripts_announce", str(CHECKPOINT), str(workers), **variables)


def check_frames(output: str) -> None:
    (line,) = [line for line in output.splitlines() if line.startswith("FRAMES ")]
    assert json.loads(line.removeprefix("FRAMES ")) == expected(*stacked(range(2)), 2).tolist()


def test_a_model_of_a_script_reaches_the_engine() -> None:
    """test_commands.py has two workers beside the engine core."""
    check_frames(run_script(1))
