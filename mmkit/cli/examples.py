"""``mmkit examples``: a copy of the examples, to run and to change."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree, ignore_patterns

from ..errors import MmkitError
from .common import shipped


def examples(into: Path | str = ".") -> Path:
    """Copy the examples, with their checkpoints, 9 MB.

    Args:
        into: where the folder ``examples`` goes.

    Returns:
        The folder.

    Raises:
        MmkitError: the folder is there already, or cannot be written.
    """
    folder = Path(into) / "examples"
    if folder.exists():
        remedy = "Choose another place, or remove it."
        raise MmkitError(str(folder), "no such folder yet", "one", remedy)
    try:
        copytree(shipped("examples"), folder, ignore=ignore_patterns("__pycache__"))
    except OSError as error:
        expected, got = "a folder that can be written", str(error.strerror or error).lower()
        raise MmkitError(str(folder), expected, got, "Choose another place.") from error
    return folder
