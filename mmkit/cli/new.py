"""``mmkit new``: a package for a model with a modality of its own, which passes its own tests as it
is."""

from __future__ import annotations

import keyword
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from ..errors import MmkitError
from ..generate import class_prefix

_SUFFIX = ".txt"
"""Of the templates, so that nothing takes them for what they become."""


def new(name: str, modality: str, into: Path | str = ".") -> Path:
    """Write a package: spec, configuration, model, a tiny checkpoint, entry point, laws and engine
    as tests, CI file.

    Args:
        name: of the package, in lower case, as ``weather``.
        modality: what its model reads, as ``series``.
        into: where the package's folder goes.

    Returns:
        The folder.

    Raises:
        MmkitError: a name that is none, a folder that is there already, or one that cannot be
            written.
    """
    for what, value in (("name", name), ("modality", modality)):
        if not value.isidentifier() or keyword.iskeyword(value) or value != value.lower():
            raise MmkitError(what, "a Python identifier in lower case", repr(value))
    if name in (modality, "mmkit", "vllm", "tests"):
        raise MmkitError("name", "one that nothing else has", repr(name))
    folder = Path(into) / name
    if folder.exists():
        remedy = "Choose another name, or remove it."
        raise MmkitError(str(folder), "no such folder yet", "one", remedy)
    values = {
        "package": name,
        "Prefix": class_prefix(name),
        "SPEC": name.upper(),
        "modality": modality,
    }
    for path, template in _templates(files(__package__) / "template"):
        target = folder / Template(path).substitute(values)
        text = Template(template.read_text(encoding="utf-8")).substitute(values)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            expected, got = "a folder that can be written", str(error.strerror or error).lower()
            raise MmkitError(str(folder), expected, got, "Choose another place.") from error
    return folder


def _templates(folder: Traversable, prefix: str = "") -> list[tuple[str, Traversable]]:
    """The files below a folder, by the path that each becomes."""
    templates = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        path = prefix + ("$package" if entry.name == "package" else entry.name)
        if entry.is_dir():
            templates += _templates(entry, f"{path}/")
        elif path.endswith(_SUFFIX):
            templates.append((path.removesuffix(_SUFFIX), entry))
    return templates
