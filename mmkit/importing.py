"""Things that a command line names as ``package.module:name``."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from .errors import MmkitError, describe_error


def import_named(target: str, kind: type = object) -> Any:
    """Return what ``package.module:name`` names, also in a module of the working directory.

    Raises:
        MmkitError: there is no such thing, or it is of another kind.
    """
    find_in_working_directory()
    module, _, name = target.partition(":")
    try:
        value = getattr(importlib.import_module(module), name)
    except MmkitError as error:  # a declaration that is refused has a sentence of its own
        raise MmkitError(f"{target}: {error}") from error
    except Exception as error:
        expected = "package.module:name that can be imported"
        raise MmkitError(target, expected, describe_error(error)) from error
    if not isinstance(value, kind):
        raise MmkitError(target, f"a {kind.__name__}", f"a {type(value).__name__}")
    return value


def find_in_working_directory() -> None:
    """Find modules of the working directory too, as ``python -m`` does, and a script does not."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
