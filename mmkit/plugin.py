"""The vLLM plugin of mmkit: registers models in every process that vLLM starts.

vLLM runs the entry points of the group ``vllm.general_plugins`` in the API server, in the
registry's inspection, in the engine core and in each worker. This one imports the modules that the
environment variable MMKIT_MODULES names; their `ModelSpec.register` decorators do the rest. A
package that ships a model declares an entry point of its own instead and needs no variable.
"""

from __future__ import annotations

import importlib
import os

from .errors import MmkitError

VARIABLE = "MMKIT_MODULES"

MAIN_MODULES = ("__main__", "__mp_main__")
"""Names of a module that runs as a script: in this process, and in spawned processes, which run it
again by themselves."""


def load() -> None:
    """Import the modules that MMKIT_MODULES names, separated by commas.

    It can be called again.

    Raises:
        MmkitError: one of them cannot be found in this process.
    """
    for name in _read_names():
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            is_module_or_parent = f"{name}.".startswith(f"{error.name}.")
            if not is_module_or_parent:
                raise  # the module was found, and imports what is missing
            expected = "a module that every process can import"
            remedy = "Install its package, or set PYTHONPATH."
            raise MmkitError(f"{VARIABLE}, {name}", expected, str(error), remedy) from error


def announce(module: str) -> None:
    """Let processes that start from now on import a module, which registers a model."""
    names = _read_names()
    if module in names or module in MAIN_MODULES:
        return
    names.append(module)
    os.environ[VARIABLE] = ",".join(names)


def _read_names() -> list[str]:
    """Return the names of the modules that MMKIT_MODULES has."""
    return [name for name in os.environ.get(VARIABLE, "").split(",") if name]
