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
    """Of a package in the package `robots`."""
    for path in ("robots/__init__.py", "robots/arms/__init__.py", "robots/arms/spec.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(SPEC if "spec" in path else "")
    monkeypatch.syspath_prepend(str(tmp_path))
    with mock.patch.dict(os.environ):  # the command sets variables for its own process
        yield tmp_path / "robots" / "arms" / "spec.py"
    for name in [name for name in sys.modules if name.partition(".")[0] == "robots"]:
        del sys.modules[name]


def test_a_copy(spec: Path) -> None:
    """All forms of imports are rewritten. A copy is not overwritten, which the command tells in one line; after it is
    removed, there is a new one, with what is imported then."""
    copy, root = spec.parents[1] / "_mmkit", Path(mmkit.__file__).parent
    assert eject("robots") == [spec, copy]
    assert "mmkit.ModelSpec is ModelSpec" in spec.read_text()
    own = import_module("robots.arms.spec").ROBOT.classes.processor
    assert own.__module__ == "robots._mmkit.generated.robots.arms.spec.ROBOT"
    files = {path.relative_to(copy).as_posix(): path.read_bytes() for path in copy.rglob("*.py")}
    assert {"model/mixin.py", "generate.py", "vllm_api/models.py"} <= {*files}
    assert not [name for name in files if name.startswith(("testing/", "cli/", "serve/"))]
    assert all(text.endswith((root / name).read_bytes()) for name, text in files.items())
    refused = CliRunner().invoke(app, ["eject", "robots"])
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert refused.stderr.startswith(f"{copy}: expected no copy yet, got one. Remove it, and run the command again")
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
def test_what_is_refused(spec: Path, text: str, name: str, sentence: str) -> None:
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
    checkpoint, examples = SYSTEMS["llava"].checkpoint, tmp_path / "examples"
    subject, requests, outcomes = of_spec(LLAVA_LIKE, checkpoint), [], []

    def collect(request: Request) -> None:
        requests.append((list(request.prompt), request.data(), dict(request.kwargs)))
        ours = vllm_path.run(subject.processor, *requests[-1])
        outcomes.append((ours.ids, ours.ranges, ours.hashes, ours.fields))

    for_each(subject.requests(most=2), collect, max_examples=scaled(15), database=None)
    (tmp_path / "requests").write_bytes(pickle.dumps(requests))
    shutil.copytree(ROOT / "examples" / "llava_like", examples / "llava_like")
    shutil.copy(ROOT / "examples" / "__init__.py", examples)
    (examples / "llava_like" / "laws.py").write_text("import mmkit.testing as testing\n")
    command = [sys.executable, "-m", "mmkit", "eject", "examples.llava_like"]
    subprocess.run(command, cwd=tmp_path, check=True)
    (tmp_path / "sitecustomize.py").write_text(NO_MMKIT)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "VLLM_PLUGINS": "llava_like"}
    subprocess.run([sys.executable, "-c", RUN, str(checkpoint)], cwd=tmp_path, env=environment, check=True)
    home, theirs = pickle.loads((tmp_path / "results").read_bytes())
    assert home == "examples.llava_like._mmkit.generated.examples.llava_like.spec.LLAVA_LIKE"
    assert find_difference(outcomes, theirs) is None
