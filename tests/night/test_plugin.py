"""Registration reaches each process that vLLM starts, without an entry point: that of the examples is blocked."""

import json

from examples.terra import CHECKPOINT
from tests.engine.processes import run_python
from tests.engine.terra.rollouts import generate_by_reference, stack_episodes

VARIABLES = {"VLLM_PLUGINS": "mmkit", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


def check_frames(output: str) -> None:
    """Compare the frames that tests/night/scripts_announce.py prints with those of the reference."""
    (line,) = [line for line in output.splitlines() if line.startswith("FRAMES ")]
    frames, actions = stack_episodes(range(2))
    expected = generate_by_reference(frames, actions, 2)
    assert json.loads(line.removeprefix("FRAMES ")) == expected.tolist()


def test_a_model_of_a_script_reaches_every_process() -> None:
    """The processes are the engine core and two workers, which share each layer."""
    output = run_python("-m", "tests.night.scripts_announce", str(CHECKPOINT), "2", **VARIABLES)
    check_frames(output)


def test_a_model_of_an_imported_module_reaches_the_engine() -> None:
    code = f"import tests.night.scripts_announce as s\nif __name__ == '__main__': s.main({str(CHECKPOINT)!r})"
    output = run_python("-c", code, **VARIABLES)
    check_frames(output)
