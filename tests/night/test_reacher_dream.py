"""The robot of the examples acts in the dream of a world model, each in a server of its own."""

import json
from pathlib import Path

import pytest

from tests.engine.processes import run_python

pytestmark = pytest.mark.timeout(1200)


def test_the_robot_acts_in_the_dream_and_both_servers_answer_as_transformers_does(tmp_path: Path) -> None:
    run_python("-m", "examples.reacher.dream", "--out", str(tmp_path))

    report = json.loads((tmp_path / "dream.json").read_text())
    assert report["dreams"] == 100
    assert report["chunks"] >= 100
    assert report["equal_chunks"] >= 0.99 * report["chunks"]
    assert report["equal_frames"] >= 0.99 * report["chunks"]
    assert report["touched"] >= 0.9 * report["dreams"]
    assert report["touched_in_both"] >= 0.9 * report["touched"]
