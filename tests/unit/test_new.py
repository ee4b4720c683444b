"""``mmkit new``: the files that it writes, and the names that it takes."""

import importlib
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmkit import MmkitError
from mmkit.cli.new import KINDS, new


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_writes_is_trained(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps; at night the whole, with a server."""
    folder = new(f"new_{kind}", "thing", tmp_path, kind=kind)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files >= {"pyproject.toml", f"new_{kind}/spec.py", "tests/test_laws.py", ".gitignore", "README.md"}
    for path in files:
        text = (folder / path).read_text()
        assert not re.search(r"\$\{?\w", text), path
        if path.endswith(".py"):
            compile(text, path, "exec")
            assert max(map(len, text.splitlines()), default=0) <= 120, path
    monkeypatch.syspath_prepend(folder)
    package = importlib.import_module(f"new_{kind}.train")
    written = package.train(tmp_path / "trained", steps=2), package.train(tmp_path / "random", steps=0)
    trained, random = (load_file(checkpoint / "model.safetensors") for checkpoint in written)
    unmoved = [name for name in trained if torch.equal(trained[name], random[name])]
    assert unmoved == [], "every weight has a gradient, those of the encoder as well"
    assert json.loads((written[0] / "config.json").read_text())["architectures"] == [f"New{kind.title()}ForCausalLM"]


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


def test_kinds(tmp_path: Path) -> None:
    with pytest.raises(MmkitError, match="kind: expected one of series, vectors, image, audio, record, got 'picture'"):
        new("weather", "scan", tmp_path, kind="picture")
    assert "Record(" in (new("weather", "record", tmp_path) / "weather" / "spec.py").read_text()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MmkitError, match="expected a folder that can be written, got not a directory"):
        new("weather", "series", tmp_path / "file")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "weather").mkdir()
    with pytest.raises(MmkitError, match="expected no such folder yet, got one"):
        new("weather", "series", tmp_path)
