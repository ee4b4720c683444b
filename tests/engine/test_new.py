"""``mmkit new``: the package that it writes, used as a newcomer would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mmkit import MmkitError
from mmkit.cli.new import new
from mmkit.serve import Client
from mmkit.serve.process import Server

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new("weather", "series", tmp_path_factory.mktemp("new"))


@pytest.fixture(scope="module")
def environment(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The package is installed beside this environment rather than into it."""
    target = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    run([sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(folder)], folder)
    # what other tests of this process have registered is not there
    return {"PYTHONPATH": str(target), "MMKIT_MODULES": ""}


def run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **(environment or {})}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_what_it_writes(folder: Path) -> None:
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files >= {"pyproject.toml", "weather/spec.py", "weather/model.py", "tests/test_laws.py", ".gitignore"}
    for path in files:
        text = (folder / path).read_text()
        assert not re.search(r"\$\{?\w", text), path
        if path.endswith(".py"):
            compile(text, path, "exec")
            assert max(map(len, text.splitlines()), default=0) <= 120, path


@pytest.mark.engine
def test_it_passes_its_own_tests_as_it_is(folder: Path, environment: dict[str, str]) -> None:
    told = run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider"], folder, environment)
    assert re.search(r"\d+ passed", told)
    assert "failed" not in told


@pytest.mark.engine
def test_it_is_served(folder: Path, environment: dict[str, str]) -> None:
    checkpoint = folder / "served"
    run([sys.executable, "-m", "weather.checkpoint", str(checkpoint)], folder, environment)
    log = folder / "log"
    with Server(checkpoint, environment=environment, log=log) as server, Client(server.url) as client:
        (series,) = client.modalities().modalities
        assert (series.name, series.shape, series.in_place) == ("series", [[1, 64], 4], False)
        answer = client.generate("look: <series>", {"series": [series.example]}, max_tokens=4, ignore_eos=True)
        assert len(answer.choices[0].token_ids) == 4
        assert answer.choices[0].text


@pytest.mark.parametrize(
    ("name", "modality", "message"),
    [
        ("my-model", "x", "name: expected a Python identifier in lower case, got 'my-model'."),
        ("class", "x", "name: expected a Python identifier in lower case, got 'class'."),
        ("model", "My", "modality: expected a Python identifier in lower case, got 'My'."),
        ("mmkit", "x", "name: expected one that nothing else has, got 'mmkit'."),
    ],
)
def test_names(name: str, modality: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(MmkitError) as caught:
        new(name, modality, tmp_path)
    assert str(caught.value) == message


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "weather").mkdir()
    with pytest.raises(MmkitError, match="expected no such folder yet, got one"):
        new("weather", "series", tmp_path)
