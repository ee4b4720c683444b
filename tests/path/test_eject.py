"""Packages with a copy of mmkit inside give, where there is no mmkit, what they gave with it."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings

import mmkit
from examples.terra import CHECKPOINT
from mmkit import MmkitError
from mmkit.cli.eject import eject
from mmkit.testing import Subject, of_spec
from mmkit.testing.strategies import Request
from mmkit.vllm_api import harness
from tests import oracles
from tests.ejected import ejected
from tests.engine.processes import run
from tests.profiles import scaled

SPECS = {
    "terra": ("examples.terra", "spec", "TERRA", CHECKPOINT),
    "llava": ("examples.llava_like", "spec", "LLAVA_LIKE", oracles.SYSTEMS["llava"].checkpoint),
    "internvl": ("examples.gallery", "internvl", "INTERNVL", oracles.SYSTEMS["internvl2"].checkpoint),
}
RUN = """
import inspect, pickle, sys
from importlib import import_module
from types import SimpleNamespace
from vllm.v1.engine.input_processor import InputProcessor

try:
    import mmkit
except ModuleNotFoundError:
    pass
else:
    sys.exit("mmkit is here")
specs, requests = pickle.load(open(sys.argv[1], "rb"))
processors, results = {}, {}
for name, (package, module, variable, checkpoint) in specs.items():
    spec = getattr(import_module(f"{package}.{module}"), variable)
    testing = import_module(f"{package}.laws").testing
    processors[name] = made = testing.of_spec(spec, checkpoint, trust_remote_code=True).processor
    outcomes = [testing.harness.run(made, *request) for request in requests[name]]
    outcomes = [(o.ids, o.ranges, o.hashes, o.fields) for o in outcomes]
    results[name] = outcomes, inspect.getsourcefile(type(made))
    import_module(f"{package}._mmkit.vllm_api.guard").install()
for made in processors.values():
    renderer = SimpleNamespace(mm_processor=made)
    prompt = {"type": "token", "prompt_token_ids": [2**31]}
    try:
        InputProcessor.process_inputs(SimpleNamespace(renderer=renderer), "id", prompt, None)
    except ValueError as error:
        assert type(error).__name__ == "Refused"
        assert type(error).__module__.split(".")[:2] == made.spec._module.split(".")[:2]
    else:
        sys.exit("not guarded")
pickle.dump(results, open(sys.argv[2], "wb"))
"""


def drawn(subject: Subject, count: int) -> list[tuple[Any, ...]]:
    requests: list[tuple[Any, ...]] = []

    @settings(max_examples=count, phases=[Phase.generate])
    @given(subject.requests(most=2))
    def collect(request: Request) -> None:
        requests.append((list(request.prompt), request.data(), dict(request.kwargs)))

    collect()
    return requests


def test_drawn_requests(tmp_path: Path) -> None:
    """Three copies in one process, each with its classes and its guard; a package's laws come along."""
    subjects = {}
    for name, (package, module, variable, checkpoint) in SPECS.items():
        spec = getattr(__import__(f"{package}.{module}", fromlist=[variable]), variable)
        subjects[name] = of_spec(spec, checkpoint, trust_remote_code=True)
    requests = {name: drawn(subject, scaled(15)) for name, subject in subjects.items()}
    given, results = tmp_path / "given", tmp_path / "results"
    given.write_bytes(pickle.dumps((SPECS, requests)))

    packages = [package.partition(".")[2] for package, *_ in SPECS.values()]
    environment = ejected(tmp_path, *packages, laws="import mmkit.testing as testing\n")
    run("-c", RUN, str(given), str(results), cwd=tmp_path, **environment)

    for name, (outcomes, source) in pickle.loads(results.read_bytes()).items():
        package, module, variable, _ = SPECS[name]
        home = package.replace(".", "/")
        assert source.endswith(f"_mmkit/generated/{home}/{module}/{variable}.py")
        for request, (ids, ranges, hashes, fields) in zip(requests[name], outcomes, strict=True):
            ours = harness.run(subjects[name].processor, *request)
            assert (ids, ranges, hashes) == (ours.ids, ours.ranges, ours.hashes)
            assert_same(fields, ours.fields)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        assert_same([one[key] for key in one], [other[key] for key in one])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other


# -- the files ---------------------------------------------------------------------------------------------------------

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


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package, and one in it which has the spec."""
    for path in ("robots/__init__.py", "robots/arms/__init__.py"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text("")
    (tmp_path / "robots/arms/spec.py").write_text(SPEC)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "robots"
    for name in [name for name in sys.modules if name.partition(".")[0] == "robots"]:
        del sys.modules[name]


def test_imports_change_and_nothing_else(package: str, tmp_path: Path) -> None:
    spec = tmp_path / "robots/arms/spec.py"
    assert eject(package) == [spec, tmp_path / "robots/_mmkit"]
    old = ["import os, mmkit.field as field, mmkit  #", "from mmkit import (", "from mmkit.items.tensor import"]
    new = [
        "import os; from .._mmkit import field as field; from .. import _mmkit as mmkit  #",
        "from .._mmkit import (",
        "from .._mmkit.items.tensor import",
    ]
    expected = SPEC
    for one, other in zip(old, new, strict=True):
        expected = expected.replace(one, other)
    assert spec.read_text() == expected
    assert sys.modules["robots.arms.spec"].ROBOT.modalities[0].name == "actions"

    copy, root = tmp_path / "robots/_mmkit", Path(mmkit.__file__).parent
    files = {str(path.relative_to(copy)): path for path in copy.rglob("*.py")}
    assert {"model/mixin.py", "generate.py", "vllm_api/guard.py", "vllm_api/generation_a.py"} <= {*files}
    outside = ("testing/", "cli/", "serve/", "eject", "vllm_api/kit")
    assert not [name for name in files if name.startswith(outside)]
    for name, path in files.items():
        if not name.startswith("generated/robots"):
            assert path.read_bytes().endswith((root / name).read_bytes())
    assert "class RobotProcessor(Processor):" in files["generated/robots/arms/spec/ROBOT.py"].read_text()


def test_again(package: str, tmp_path: Path) -> None:
    """It replaces a copy, and not one that was changed."""
    eject(package)
    copy = tmp_path / "robots/_mmkit"
    before = texts(copy)
    (copy / "plan.py").unlink()
    with pytest.raises(MmkitError) as refused:
        eject(package)
    sentence = "expected the copy as mmkit wrote it, got a changed one. Move your changes elsewhere"
    assert str(refused.value).startswith(f"{copy}: {sentence}, ")
    (copy / "plan.py").write_bytes(before[copy / "plan.py"])
    assert eject(package) == [copy]
    assert texts(copy) == before


def texts(folder: Path) -> dict[Path, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path: path.read_bytes() for path in paths}


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
def test_what_is_refused(package: str, tmp_path: Path, text: str, name: str, sentence: str) -> None:
    (tmp_path / "robots/arms/spec.py").write_text(text)
    with pytest.raises(MmkitError) as refused:
        eject(name)
    assert sentence in str(refused.value)


def test_the_command(package: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mmkit", "eject", package]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "1 module:" in done.stdout
    (tmp_path / "robots/_mmkit/plan.py").write_text("")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
