"""Registration reaches every process that vLLM starts, without an entry point: that of the examples is blocked."""

import json

from examples.terra import CHECKPOINT
from tests.engine.processes import run
from tests.engine.terra.rollouts import expected, stacked

SPAWNED = {"VLLM_PLUGINS": "mmkit", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


def check_frames(output: str) -> None:
    (line,) = [line for line in output.splitlines() if line.startswith("FRAMES ")]
    assert json.loads(line.removeprefix("FRAMES ")) == expected(*stacked(range(2)), 2).tolist()


def test_a_model_of_a_script_reaches_every_process() -> None:
    """The engine core, and two workers that share each layer. The ids are those of one worker: they are right."""
    check_frames(run("-m", "tests.night.scripts_announce", str(CHECKPOINT), "2", **SPAWNED))


def test_a_model_of_an_imported_module_reaches_the_engine() -> None:
    code = f"import tests.night.scripts_announce as s\nif __name__ == '__main__': s.main({str(CHECKPOINT)!r})"
    check_frames(run("-c", code, **SPAWNED))
