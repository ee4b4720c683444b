"""``mmkit new``: the files that it writes, and the names that it takes."""

import re
from pathlib import Path

import pytest

from mmkit import MmkitError
from mmkit.cli.new import new


def test_what_it_writes(tmp_path: Path) -> None:
    folder = new("weather", "series", tmp_path)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files >= {"pyproject.toml", "weather/spec.py", "weather/model.py", "tests/test_laws.py", ".gitignore"}
    for path in files:
        text = (folder / path).read_text()
        assert not re.search(r"\$\{?\w", text), path
        if path.endswith(".py"):
            compile(text, path, "exec")
            assert max(map(len, text.splitlines()), default=0) <= 120, path


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


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MmkitError, match="expected a folder that can be written, got not a directory"):
        new("weather", "series", tmp_path / "file")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "weather").mkdir()
    with pytest.raises(MmkitError, match="expected no such folder yet, got one"):
        new("weather", "series", tmp_path)
