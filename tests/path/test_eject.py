"""Packages with a copy of mmkit inside: their files, and requests where there is no mmkit."""

import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

import mmkit
from examples.llava_like.spec import LLAVA_LIKE
from mmkit import MmkitError
from mmkit.cli.commands import app
from mmkit.cli.eject import eject
from mmkit.testing import Request, of_spec, vllm_path
from mmkit.testing.differences import find_difference
from mmkit.testing.strategies import for_each
from tests import ROOT
from tests.oracles import SYSTEMS
from tests.profiles import scaled

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
        assert not name.startswith(("testing/", "cli/", "serve/"))
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


NO_MMKIT = "import sys; sys.modules['mmkit'] = sys.modules['tests'] = None  # whatever imports them fails"
RUN = """
import pickle, sys
from examples.llava_like.laws import testing
from examples.llava_like.spec import LLAVA_LIKE

processor = testing.of_spec(LLAVA_LIKE, sys.argv[1]).processor
outcomes = [testing.vllm_path.run(processor, *request) for request in pickle.load(open("requests", "rb"))]
assert sys.modules["mmkit"] is None
results = []
for outcome in outcomes:
    ranges = {name: [tuple(place) for place in places] for name, places in outcome.ranges.items()}
    results.append((outcome.ids, ranges, outcome.hashes, outcome.fields))
pickle.dump((type(processor).__module__, results), open("results", "wb"))
"""


def test_the_copy_makes_the_same_of_drawn_requests(tmp_path: Path) -> None:
    """Ids, ranges, hashes and fields; a package's laws come along."""
    checkpoint = SYSTEMS["llava"].checkpoint
    subject = of_spec(LLAVA_LIKE, checkpoint)
    requests: list[tuple[Any, ...]] = []
    outcomes: list[tuple[Any, ...]] = []

    def collect(request: Request) -> None:
        arguments = (list(request.prompt), request.data(), dict(request.kwargs))
        outcome = vllm_path.run(subject.processor, *arguments)
        requests.append(arguments)
        outcomes.append((outcome.ids, outcome.ranges, outcome.hashes, outcome.fields))

    for_each(subject.requests(most=2), collect, max_examples=scaled(15), database=None)
    (tmp_path / "requests").write_bytes(pickle.dumps(requests))
    package = tmp_path / "examples" / "llava_like"
    shutil.copytree(ROOT / "examples" / "llava_like", package)
    shutil.copy(ROOT / "examples" / "__init__.py", package.parent)
    (package / "laws.py").write_text("import mmkit.testing as testing\n")
    command = [sys.executable, "-m", "mmkit", "eject", "examples.llava_like"]
    subprocess.run(command, cwd=tmp_path, check=True)
    (tmp_path / "sitecustomize.py").write_text(NO_MMKIT)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "VLLM_PLUGINS": "llava_like"}
    subprocess.run([sys.executable, "-c", RUN, str(checkpoint)], cwd=tmp_path, env=environment, check=True)
    module, outcomes_of_copy = pickle.loads((tmp_path / "results").read_bytes())
    assert module == "examples.llava_like._mmkit.generated.examples.llava_like.spec.LLAVA_LIKE"
    assert find_difference(outcomes, outcomes_of_copy) is None
