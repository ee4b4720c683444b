"""Packages with a copy of mmkit inside, in vLLM's engine, where there is no mmkit."""

import json
from pathlib import Path

import pytest

from tests.ejected import ejected
from tests.engine.processes import run

pytestmark = pytest.mark.timeout(900)


def test_terra(tmp_path: Path) -> None:
    environment = ejected(tmp_path, "terra")
    options = ("--out", "out", "--streams", "2", "--frames", "2")
    run("-m", "examples.terra", *options, cwd=tmp_path, **environment)
    report = json.loads((tmp_path / "out" / "terra.json").read_text())
    assert report["identical_tokens"]
    assert report["vLLM"]["psnr_db"] > 25


def test_llava_like(tmp_path: Path) -> None:
    environment = ejected(tmp_path, "llava_like")
    options = ("--prompts", "12", "--report", "report.json")
    run("-m", "examples.llava_like", *options, cwd=tmp_path, **environment)
    answers = json.loads((tmp_path / "report.json").read_text())
    assert answers["ids"]
    assert answers["ids"] == answers["vllm"]
