"""``mmkit new``: the files that it writes, and the names that it takes."""

import importlib
import itertools
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
    folder = new(f"new_{kind}", ["thing"], tmp_path, kinds=[kind])
    for name in ("pyproject.toml", f"new_{kind}/spec.py", "tests/test_laws.py", ".gitignore", "README.md"):
        assert (folder / name).is_file()
    check_files(folder)


def check_files(folder: Path) -> None:
    """Check that all names in the files of a package are filled in, and that no line of code is too long."""
    for path in folder.rglob("*"):
        if path.is_file():
            text = path.read_text()
            assert not re.search(r"\$\{?\w", text), path
            if path.suffix == ".py":
                assert all(len(line) <= 120 for line in text.splitlines()), path


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_of_a_package_is_trained(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps; at night all of them, with a server."""
    monkeypatch.syspath_prepend(new(f"new_{kind}", ["thing"], tmp_path, kinds=[kind]))
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
        new(name, [modality], tmp_path / into, kinds=[kind] if kind else [])


@pytest.mark.parametrize("modality", ["torch", "one", "sample", "model", "fields", "item", "cfg", "text_", "args"])
def test_a_modality_named_as_something_in_the_code_is_refused_or_trained(
    modality: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"reads_{modality}"
    try:
        folder = new(name, [modality], tmp_path, kinds=["series"])
    except MmkitError:
        return
    monkeypatch.syspath_prepend(folder)
    importlib.import_module(f"{name}.train").train(tmp_path / "trained", steps=1)


def test_a_modality_named_as_a_kind_is_of_it(tmp_path: Path) -> None:
    folder = new("weather", ["record"], tmp_path)
    assert "Record(" in (folder / "weather" / "spec.py").read_text()


# -- several modalities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", list(itertools.pairwise([*KINDS, KINDS[0]])), ids="_".join)
def test_a_package_of_two_kinds_has_the_files_of_both(kinds: tuple[str, str], tmp_path: Path) -> None:
    package = "two_kinds"
    folder = new(package, ["left", "right"], tmp_path, kinds=kinds)
    check_files(folder)
    texts = {path.name: path.read_text() for path in (folder / package).iterdir()}
    for name, kind in zip(("left", "right"), kinds, strict=True):
        alone = new(f"alone_{kind}", [name], tmp_path, kinds=[kind]) / f"alone_{kind}"
        # the lines of the spec of one modality but for its imports and its name, and all sizes
        (_, spec) = (alone / "spec.py").read_text().split('        "' + name + '",\n')
        assert spec.rstrip(")\n") in texts["spec.py"]
        (_, sizes) = (alone / "configuration.py").read_text().split("    model_type = ")
        assert sizes.partition("\n")[2] in texts["configuration.py"]
        assert f"data_{name}.py" in texts
        assert f"encoder_{name}.py" in texts


def test_every_weight_of_a_package_with_two_modalities_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(new("duet", ["motion", "image"], tmp_path))
    package = importlib.import_module("duet.train")
    trained = package.train(tmp_path / "trained", steps=1)
    untrained = package.train(tmp_path / "untrained", steps=0)
    weights = load_file(trained / "model.safetensors")
    weights_before = load_file(untrained / "model.safetensors")
    assert any(name.startswith("encoder_image.") for name in weights)
    for name in weights:
        assert not torch.equal(weights[name], weights_before[name]), name


def test_the_items_of_a_question_tell_nothing_about_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each modality draws other numbers from a seed."""
    monkeypatch.syspath_prepend(new("chords", ["series", "vectors"], tmp_path))
    data = importlib.import_module("chords.data")
    answers = set()
    for seed in range(300):
        questions = data.sample(seed)
        assert [(question.modality, list(question.items)) for question in questions] == [
            ("series", ["series"]),
            ("series", ["series", "vectors"]),
            ("vectors", ["vectors"]),
            ("vectors", ["series", "vectors"]),
        ]
        assert data.sample(seed)[1].answer == questions[0].answer
        answers.add((questions[0].answer, questions[2].answer))
    assert len(answers) > 50, "of 64 pairs"


@pytest.mark.parametrize(
    ("modalities", "kinds", "sentence"),
    [
        (["x", "y"], [], "kind: expected another one for each modality, got series, series. Write the package for one"),
        (["x", "y"], ["image"], "kind: expected one for each of x, y, or none, got image."),
        (
            ["x", "x_part"],
            ["image", "series"],
            "modality: expected names that make different tokens, got <x>, <x_part>",
        ),
        (["points", "x"], ["series", "record"], "expected one field named 'points', got several."),
        (["x", "duo"], ["image", "series"], "name: expected one that nothing else has, got 'duo', the modality."),
        (["image", "pad"], [], "got 'pad', which duo/encoder_pad.py imports."),
    ],
)
def test_modalities_that_do_not_go_together_are_refused(
    modalities: list[str], kinds: list[str], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(MmkitError, match=re.escape(sentence)):
        new("duo", modalities, tmp_path, kinds=kinds)
    assert list(tmp_path.iterdir()) == []
