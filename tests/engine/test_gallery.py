"""A spec of the gallery on one of vLLM's own models, in the engine."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_a_spec_on_a_model_of_vllm(tmp_path: Path) -> None:
    """Registered on vLLM's own BLIP-2, the spec takes the place of the hand-written classes, with the same answers."""
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.scripts_gallery", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**environment, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("IDS "))
    (theirs, expected), (ours, got) = json.loads(line.removeprefix("IDS "))
    assert (theirs, ours) == ("Blip2MultiModalProcessor", "Blip2Processor")
    assert got == expected
    assert len({tuple(answer) for answer in got}) > len(got) / 2  # else the images would not matter
