"""Registration reaches every process that vLLM starts, with and without an entry point."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from examples.terra import CHECKPOINT
from examples.terra.world import make_episode

ROOT = Path(__file__).parents[2]


def run(*command: str, **environment: str) -> str:
    """Standard output of a Python process."""
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    variables.pop("MMKIT_MODULES", None)
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=variables | environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_entry_points() -> None:
    """vLLM finds mmkit's plugin and that of the examples, and they can be called again."""
    found = {point.name: point for point in entry_points(group="vllm.general_plugins")}
    for name in ("mmkit", "terra"):
        found[name].load()()
        found[name].load()()


def test_announce_names_a_module_once() -> None:
    code = """
import os
from mmkit.plugin import announce, load
announce("json"); announce("json"); print(os.environ["MMKIT_MODULES"]); load()
announce("__main__"); print(os.environ["MMKIT_MODULES"])
"""
    assert run("-c", code).split() == ["json", "json"]


@pytest.mark.engine
@pytest.mark.parametrize("way", ["script", "module"])
def test_models_of_a_script_reach_every_process(way: str) -> None:
    """A model of the main script, or of a module that it imports, with the entry point of the examples blocked."""
    started = {
        "script": ("-m", "tests.engine.scripts_announce", str(CHECKPOINT)),
        "module": (
            "-c",
            f"import tests.engine.scripts_announce as s\nif __name__ == '__main__': s.main({str(CHECKPOINT)!r})",
        ),
    }[way]
    output = run(*started, VLLM_PLUGINS="mmkit", VLLM_WORKER_MULTIPROC_METHOD="spawn")
    assert f"FRAME {make_episode(0).frames[3].tolist()}" in output
