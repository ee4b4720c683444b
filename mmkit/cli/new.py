"""``mmkit new``: a package for a model with a modality of its own, which is trained, served, and
passes its own tests as it is."""

from __future__ import annotations

import keyword
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from ..errors import MmkitError
from ..generate import class_prefix

KINDS = ("series", "vectors", "image", "audio", "record")
"""The kinds of items; each has templates of its own beside the common ones."""

_SUFFIX = ".txt"
"""The suffix of template files. It keeps Python, pytest and linters from reading a template as
code."""


def new(name: str, modality: str, into: Path | str = ".", *, kind: str | None = None) -> Path:
    """Write a package: spec, data, encoder, the models for transformers and for vLLM, training,
    a script that asks a server, entry point, tests of laws and engine, CI file.

    Args:
        name: name of the package, in lower case, for example ``weather``.
        modality: name of the modality that its model reads, for example ``series``.
        into: the folder that receives the package's folder.
        kind: the kind of an item: ``series``, rows of numbers of which several share a position;
            ``vectors``, rows with a position each; ``image``; ``audio``; or ``record``, several
            arrays. None takes the kind of the modality's name, or a series.

    Returns:
        The folder.

    Raises:
        MmkitError: a name that is no identifier or is taken, an unknown kind, or a folder that
            exists already or cannot be written.
    """
    for what, value in (("name", name), ("modality", modality)):
        if not value.isidentifier() or keyword.iskeyword(value) or value != value.lower():
            raise MmkitError(what, "a Python identifier in lower case", repr(value))
    if name in (modality, "mmkit", "vllm", "tests"):
        raise MmkitError("name", "one that nothing else has", repr(name))
    if kind is None:
        kind = modality if modality in KINDS else KINDS[0]
    if kind not in KINDS:
        raise MmkitError("kind", f"one of {', '.join(KINDS)}", repr(kind))
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
    templates = files(__package__) / "templates"
    for path, template in _templates(templates / "common") + _templates(templates / kind):
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
    """The template files below a folder, each with the path of the file that it becomes."""
    templates = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        path = prefix + ("$package" if entry.name == "package" else entry.name)
        if entry.is_dir():
            templates += _templates(entry, f"{path}/")
        elif path.endswith(_SUFFIX):
            templates.append((path.removesuffix(_SUFFIX), entry))
    return templates
