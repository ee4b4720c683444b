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
def test_a_package_has_its_files_with_all_names_filled_in(kind: str, tmp_path: Path) -> None:
    folder = new(f"new_{kind}", "thing", tmp_path, kind=kind)
    for name in ("pyproject.toml", f"new_{kind}/spec.py", "tests/test_laws.py", ".gitignore", "README.md"):
        assert (folder / name).is_file()
    for path in folder.rglob("*"):
        if path.is_file():
            text = path.read_text()
            assert not re.search(r"\$\{?\w", text), path
            if path.suffix == ".py":
                assert all(len(line) <= 120 for line in text.splitlines()), path


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_of_a_package_is_trained(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps; at night all of them, with a server."""
    monkeypatch.syspath_prepend(new(f"new_{kind}", "thing", tmp_path, kind=kind))
    package = importlib.import_module(f"new_{kind}.train")
    trained = package.train(tmp_path / "trained", steps=2)
    untrained = package.train(tmp_path / "untrained", steps=0)
    weights = load_file(trained / "model.safetensors")
    weights_before = load_file(untrained / "model.safetensors")
    for name in weights:
        assert not torch.equal(weights[name], weights_before[name]), name
    assert json.loads((trained / "config.json").read_text())["architectures"] == [f"New{kind.title()}ForCausalLM"]
    assert importlib.import_module(f"new_{kind}.score").score(untrained, count=1) == 0


@pytest.mark.parametrize(
    ("name", "modality", "kind", "into", "sentence"),
    [
        ("my-model", "x", None, "", "name: expected a Python identifier in lower case, got 'my-model'."),
        ("class", "x", None, "", "name: expected a Python identifier in lower case, got 'class'."),
        ("model", "My", None, "", "modality: expected a Python identifier in lower case, got 'My'."),
        ("mmkit", "x", None, "", "name: expected one that nothing else has, got 'mmkit', an installed module: /"),
        ("json", "x", None, "", "name: expected one that nothing else has, got 'json', a module of Python."),
        ("bert", "x", None, "", "name: expected one that nothing else has, got 'bert', a model of transformers."),
        ("model", "model", None, "", "name: expected one that nothing else has, got 'model', the modality."),
        ("model", "self", None, "", "modality: expected a name that nothing else has, got 'self', the first"),
        ("model", "answer", None, "", "got 'answer', a key of a sample of the trainer's collator."),
        ("model", "labels", None, "", "got 'labels', a key of the trainer's batch."),
        ("model", "get", None, "", "got 'get', a method of fields."),
        ("model", "pad", None, "", "got 'pad', which model/encoder.py imports."),
        ("model", "x", "picture", "", "kind: expected one of series, vectors, image, audio, record, got 'picture'."),
        ("model", "x", None, "file", "expected a folder that can be written, got not a directory."),
        ("there", "x", None, "", "there: expected no such folder yet, got one. Choose another place, or remove it."),
    ],
)
def test_a_name_that_something_else_has_is_refused(
    name: str, modality: str, kind: str | None, into: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "there").mkdir()
    with pytest.raises(MmkitError, match=re.escape(sentence)):
        new(name, modality, tmp_path / into, kind=kind)


@pytest.mark.parametrize("modality", ["torch", "one", "sample", "model", "fields", "item", "cfg", "text_", "args"])
def test_a_modality_named_as_something_in_the_code_is_refused_or_trained(
    modality: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"reads_{modality}"
    try:
        folder = new(name, modality, tmp_path, kind="series")
    except MmkitError:
        return
    monkeypatch.syspath_prepend(folder)
    importlib.import_module(f"{name}.train").train(tmp_path / "trained", steps=1)


def test_a_modality_named_as_a_kind_is_of_it(tmp_path: Path) -> None:
    folder = new("weather", "record", tmp_path)
    assert "Record(" in (folder / "weather" / "spec.py").read_text()
