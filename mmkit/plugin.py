"""The vLLM plugin of mmkit: registers models in every process that vLLM starts.

vLLM runs the entry points of the group ``vllm.general_plugins`` in the API server, in the
registry's inspection, in the engine core and in each worker. This one imports the modules that the
environment variable MMKIT_MODULES names; their `ModelSpec.register` decorators do the rest. A
package that ships a model declares an entry point of its own instead and needs no variable.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from .errors import MmkitError

VARIABLE = "MMKIT_MODULES"

MAIN_MODULES = ("__main__", "__mp_main__")
"""Names of a module that runs as a script: in this process, and in spawned processes, which run it
again by themselves."""


def load() -> None:
    """Import the modules that MMKIT_MODULES names, separated by commas. Can be called again.

    Raises:
        MmkitError: one of them cannot be found in this process.
    """
    for name in _names():
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise  # what the module itself imports
            expected = "a module that every process can import"
            remedy = "Install its package, or set PYTHONPATH."
            raise MmkitError(f"{VARIABLE}, {name}", expected, str(error), remedy) from error


def named(target: str, kind: type = object) -> Any:
    """What ``package.module:name`` names; modules of the working directory are found too.

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
        got = f"{type(error).__name__}: {error}".rstrip(".")
        raise MmkitError(target, "package.module:name that can be imported", got) from error
    if not isinstance(value, kind):
        raise MmkitError(target, f"a {kind.__name__}", f"a {type(value).__name__}")
    return value


def find_in_working_directory() -> None:
    """Import modules of the working directory too, as `python -m` does, and a console script does
    not."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def announce(module: str) -> None:
    """Let processes that start from now on import a module, which registers a model."""
    names = _names()
    if module not in (*names, *MAIN_MODULES):
        os.environ[VARIABLE] = ",".join([*names, module])


def _names() -> list[str]:
    return [name for name in os.environ.get(VARIABLE, "").split(",") if name]
