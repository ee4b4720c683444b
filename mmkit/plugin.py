"""The vLLM plugin of mmkit: registers models in every process that vLLM starts.

vLLM runs the entry points of the group ``vllm.general_plugins`` in the API server, in the registry's inspection, in the
engine core and in each worker. This one imports the modules that the environment variable MMKIT_MODULES names; their
`ModelSpec.register` decorators do the rest. A package that ships a model declares an entry point of its own instead and
needs no variable.
"""

from __future__ import annotations

import importlib
import os

__all__ = ["announce", "load"]

VARIABLE = "MMKIT_MODULES"


def load() -> None:
    """Import the modules that MMKIT_MODULES names, separated by commas. Can be called again."""
    for name in _names():
        importlib.import_module(name)


def announce(model: type) -> None:
    """Have processes that start from now on import the module of a model class."""
    names = _names()
    # a spawned process runs the main module again by itself, under the name __mp_main__
    if model.__module__ not in (*names, "__main__", "__mp_main__"):
        os.environ[VARIABLE] = ",".join([*names, model.__module__])


def _names() -> list[str]:
    return [name for name in os.environ.get(VARIABLE, "").split(",") if name]
