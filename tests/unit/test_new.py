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
    texts = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert {*texts} >= {"pyproject.toml", f"new_{kind}/spec.py", "tests/test_laws.py", ".gitignore", "README.md"}
    for path, text in texts.items():
        assert not re.search(r"\$\{?\w", text), path
        assert not path.endswith(".py") or max(map(len, text.splitlines()), default=0) <= 120, path
    monkeypatch.syspath_prepend(folder)
    package = importlib.import_module(f"new_{kind}.train")
    written = package.train(tmp_path / "trained", steps=2), package.train(tmp_path / "random", steps=0)
    trained, random = (load_file(checkpoint / "model.safetensors") for checkpoint in written)
    unmoved = [name for name in trained if torch.equal(trained[name], random[name])]
    assert unmoved == [], "every weight has a gradient, those of the encoder as well"
    assert json.loads((written[0] / "config.json").read_text())["architectures"] == [f"New{kind.title()}ForCausalLM"]


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
def test_what_is_refused(name: str, modality: str, kind: str | None, into: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "there").mkdir()
    with pytest.raises(MmkitError, match=re.escape(sentence)):
        new(name, modality, tmp_path / into, kind=kind)


@pytest.mark.parametrize("modality", ["torch", "one", "sample", "model", "fields", "item", "cfg", "text_", "args"])
def test_a_modality_is_refused_or_trained(modality: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the code of the package calls so."""
    name = f"reads_{modality}"
    try:
        monkeypatch.syspath_prepend(new(name, modality, tmp_path, kind="series"))
    except MmkitError:
        return
    importlib.import_module(f"{name}.train").train(tmp_path / "trained", steps=1)


def test_a_modality_named_as_a_kind_is_of_it(tmp_path: Path) -> None:
    assert "Record(" in (new("weather", "record", tmp_path) / "weather" / "spec.py").read_text()
