"""The files of a package with a copy of mmkit inside; tests/night/test_eject.py runs such packages."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

import mmkit
from mmkit import MmkitError
from mmkit.cli import app
from mmkit.cli.eject import eject

SPEC = '''\
"""A spec."""

import os, mmkit.field as field, mmkit  # all of it
from mmkit import (
    ModelSpec,  # of one model
    Modality,
)

if os.sep:
    from mmkit.items.tensor import Tensor
assert mmkit.ModelSpec is ModelSpec
ROBOT = ModelSpec("robot", Modality("actions", item=Tensor(shape=(2,)), layout=mmkit.embed(3),
    update=mmkit.already_expanded(), fields={"actions": field.batched()}))
'''
REWRITTEN = {
    "import os, mmkit.field as field, mmkit  #": "import os; from .._mmkit import field as field; "
    "from .. import _mmkit as mmkit  #",
    "from mmkit import (": "from .._mmkit import (",
    "from mmkit.items.tensor import": "from .._mmkit.items.tensor import",
}


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a package in the package `robots`."""
    for path in ("robots/__init__.py", "robots/arms/__init__.py", "robots/arms/spec.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(SPEC if "spec" in path else "")
    monkeypatch.syspath_prepend(str(tmp_path))
    with mock.patch.dict(os.environ):  # the command sets variables for its own process
        yield tmp_path / "robots" / "arms" / "spec.py"
    for name in [name for name in sys.modules if name.partition(".")[0] == "robots"]:
        del sys.modules[name]


def test_imports_change_and_nothing_else(spec: Path) -> None:
    copy, root = spec.parents[1] / "_mmkit", Path(mmkit.__file__).parent
    assert eject("robots") == [spec, copy]
    expected = SPEC
    for one, other in REWRITTEN.items():
        expected = expected.replace(one, other)
    assert spec.read_text() == expected
    assert sys.modules["robots.arms.spec"].ROBOT.modalities[0].name == "actions"
    files = {path.relative_to(copy).as_posix(): path.read_bytes() for path in copy.rglob("*.py")}
    assert {"model/mixin.py", "generate.py", "vllm_api/admission.py", "vllm_api/tok_params.py"} <= {*files}
    assert not [name for name in files if name.startswith(("testing/", "cli/", "serve/", "eject", "vllm_api/kit"))]
    assert b"class RobotProcessor(Processor):" in files["generated/robots/arms/spec/ROBOT.py"]
    for name, text in files.items():
        assert name.startswith("generated/robots") or text.endswith((root / name).read_bytes())


def test_again(spec: Path) -> None:
    """A copy is replaced, and not one that was changed, which the command tells in one line."""

    def texts() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in copy.rglob("*") if path.is_file() and path.suffix != ".pyc"}

    copy = spec.parents[1] / "_mmkit"
    assert "1 module:" in CliRunner().invoke(app(), ["eject", "robots"]).stdout
    before = texts()
    (copy / "plan.py").unlink()
    refused = CliRunner().invoke(app(), ["eject", "robots"])
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    sentence = "expected the copy as mmkit wrote it, got a changed one. Move your changes elsewhere"
    assert refused.stderr.startswith(f"{copy}: {sentence}, ")
    (copy / "plan.py").write_bytes(before[copy / "plan.py"])
    assert eject("robots") == [copy]
    assert texts() == before


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        ("", "robots.arms.spec", "a package that can be imported, got a single module"),
        ("", "robotz", "robotz: expected a package that can be imported, got no such module"),
        ("", "robots", "robots: expected a package that imports mmkit, got one that does not"),
        ("import mmkit (", "robots", "spec.py: expected Python source, got invalid syntax"),
        ("from mmkit import ModelSpec\n1 / 0", "robots", "spec: expected a module that can be imported"),
    ],
)
def test_what_is_refused(spec: Path, text: str, name: str, sentence: str) -> None:
    spec.write_text(text)
    with pytest.raises(MmkitError) as refused:
        eject(name)
    assert sentence in str(refused.value)
