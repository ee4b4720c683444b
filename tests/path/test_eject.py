"""Packages with a copy of mmkit inside: their files; tests/night/test_eject.py runs one where there is no mmkit."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

import mmkit
from mmkit import MmkitError
from mmkit.cli.commands import app
from mmkit.cli.eject import eject

SPEC = '''\
"""A spec."""

import os, mmkit.language.field as field, mmkit  # all of it
from mmkit import (
    ModelSpec,  # of one model
    Modality,
)

if os.sep:
    from mmkit.language.items.tensor import Tensor
assert mmkit.ModelSpec is ModelSpec
ROBOT = ModelSpec("robot", Modality("actions", item=Tensor(shape=(2,)), layout=mmkit.embed(3),
    update=mmkit.already_expanded(), fields={"actions": field.batched()}))
'''


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a spec, in a package in the package `robots`."""
    arms = tmp_path / "robots" / "arms"
    arms.mkdir(parents=True)
    (arms.parent / "__init__.py").touch()
    (arms / "__init__.py").touch()
    (arms / "spec.py").write_text(SPEC)
    monkeypatch.syspath_prepend(str(tmp_path))
    with mock.patch.dict(os.environ):  # the command sets variables for its own process
        yield arms / "spec.py"
    for name in list(sys.modules):
        if name.partition(".")[0] == "robots":
            del sys.modules[name]


def test_imports_of_every_form_come_from_the_copy(spec: Path) -> None:
    assert eject("robots") == [spec, spec.parents[1] / "_mmkit"]
    assert "mmkit.ModelSpec is ModelSpec" in spec.read_text()
    processor = import_module("robots.arms.spec").ROBOT.classes.processor
    assert processor.__module__ == "robots._mmkit.generated.robots.arms.spec.ROBOT"


def test_a_copy_has_the_files_that_a_package_needs_unchanged(spec: Path) -> None:
    eject("robots")
    copy = spec.parents[1] / "_mmkit"
    root = Path(mmkit.__file__).parent
    names = [path.relative_to(copy).as_posix() for path in copy.rglob("*.py")]
    assert {"model/mixin.py", "generate.py", "vllm_api/models.py"} <= set(names)
    for name in names:
        assert not name.startswith(("testing/", "cli/", "serve/", "wire/"))
        # __init__.py begins with a header
        assert (copy / name).read_bytes().endswith((root / name).read_bytes())


def test_a_copy_is_not_overwritten(spec: Path) -> None:
    eject("robots")
    copy = spec.parents[1] / "_mmkit"
    result = CliRunner().invoke(app, ["eject", "robots"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"{copy}: expected no copy yet, got one. Remove it, and run the command again")


def test_a_new_copy_has_what_is_imported_by_then(spec: Path) -> None:
    eject("robots")
    copy = spec.parents[1] / "_mmkit"
    shutil.rmtree(copy)
    spec.write_text(SPEC + "from mmkit.testing.subject import of_spec\n")
    assert "1 module:" in CliRunner().invoke(app, ["eject", "robots"]).stdout
    assert (copy / "testing" / "subject.py").exists()


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        ("", "robots.arms.spec", "a package that can be imported, got a single module"),
        ("", "robotz", "robotz: expected a package that can be imported, got no such module"),
        ("", "robots", "robots: expected a package that imports mmkit, got one that does not"),
        ("import mmkit (", "robots", "spec.py: expected Python source, got invalid syntax"),
    ],
)
def test_a_package_that_cannot_be_rewritten_is_refused(spec: Path, text: str, name: str, sentence: str) -> None:
    spec.write_text(text)
    with pytest.raises(MmkitError, match=re.escape(sentence)):
        eject(name)
