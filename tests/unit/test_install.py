"""The set-up of the environment, before it downloads anything."""

import runpy
import sys
from pathlib import Path

import pytest

from tests import ROOT


def test_the_environment_of_another_checkout_is_not_cleared(tmp_path: Path) -> None:
    """As of a worktree by another, with `make VENV=...`."""
    create = runpy.run_path(str(ROOT / "requirements" / "install.py"))["create"]
    commands: list[tuple[object, ...]] = []

    def record(*command: object) -> None:
        commands.append(command)

    create.__globals__["run"] = record
    link = tmp_path / "lib" / "python3.12" / "site-packages" / "_vllm_mmkit.pth"
    link.parent.mkdir(parents=True)
    link.write_text(str(tmp_path))
    with pytest.raises(SystemExit, match="expected the environment of this checkout, got that of"):
        create(tmp_path)
    assert not commands
    link.write_text(str(ROOT))
    create(tmp_path)
    assert commands == [(sys.executable, "-m", "venv", "--clear", tmp_path)]
