"""``mmkit eject``: the vLLM classes of a spec as one file of plain Python."""

from __future__ import annotations

import sys
from pathlib import Path

from ..eject import eject
from ..expr import Scope
from .common import load_spec, open_checkpoint, write


def command(target: str, output: Path | None = None, config: Path | None = None) -> str:
    """Write the file that replaces a spec, or print it.

    Args:
        target: ``package.module:SPEC``.
        output: the file; None for standard output.
        config: the folder of a checkpoint, for specs that read entries of mappings in it as attributes.

    Returns:
        The text of the file.

    Raises:
        UsageError: there is no such spec or checkpoint, or the file cannot be written.
        SpecError: the spec uses something that cannot be copied.
    """
    spec = load_spec(target)
    sample: Scope | None = None if config is None else open_checkpoint(spec, config).scope
    text = eject(spec, sample)
    if output is None:
        sys.stdout.write(text)
    else:
        write(output, text, "--output")
    return text
