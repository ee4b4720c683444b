"""``mmkit new``: its package is installed, and checks its spec and its model. At night it has an engine, too."""

import re
from pathlib import Path

from mmkit.cli.new import new
from tests.engine.processes import run


def test_it_passes_its_own_laws(tmp_path: Path) -> None:
    """But for the one that starts a process."""
    folder = new("clouds", "record", tmp_path)
    site = installed(folder, tmp_path / "site")
    output = run(
        "-m", "pytest", "-p", "no:cacheprovider", "tests/test_laws.py", "-k", "not L12", cwd=folder, PYTHONPATH=site
    )
    assert re.search(r"17 passed, 4 skipped, 1 deselected", output)


def installed(folder: Path, target: Path) -> str:
    """The package is installed beside this environment rather than into it."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    run("-m", "pip", "install", *options, "--target", str(target), str(folder), cwd=folder)
    return str(target)
