"""The set-up of the environment, before it downloads anything."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests import ROOT


@pytest.mark.parametrize("own", [True, False])
def test_the_environment_of_another_checkout_is_not_cleared(own: bool, tmp_path: Path) -> None:
    """As of a worktree by another, with `make VENV=...`."""
    install = runpy.run_path(str(ROOT / "requirements" / "install.py"))
    link = tmp_path / "lib" / "python3.12" / "site-packages" / "_vllm_mmkit.pth"
    link.parent.mkdir(parents=True)
    link.write_text(str(ROOT if own else tmp_path))
    commands: list[tuple[object, ...]] = []
    install["create"].__globals__["run"] = lambda *command: commands.append(command)
    if own:
        install["create"](tmp_path)
        assert commands == [(sys.executable, "-m", "venv", "--clear", tmp_path)]
    else:
        with pytest.raises(SystemExit, match="expected the environment of this checkout, got that of"):
            install["create"](tmp_path)
        assert not commands
