"""The vLLM plugin of mmkit: registers models in every process that vLLM starts.

vLLM runs the entry points of the group ``vllm.general_plugins`` in the API server, in the
registry's inspection, in the engine core and in each worker. This one imports the modules that the
environment variable MMKIT_MODULES names; their `ModelSpec.register` decorators do the rest. A
package that ships a model declares an entry point of its own instead and needs no variable.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from typing import Any

from .errors import MmkitError, SpecError

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
    for name in _parse_names():
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
    names = _parse_names()
    if module in names or module in MAIN_MODULES:
        return
    names.append(module)
    os.environ[VARIABLE] = ",".join(names)


# -- architectures ---------------------------------------------------------------------------------

_claimed: dict[str, str] = {}
"""The modules of vLLM's classes of models of transformers, by architecture."""

_FOLDERS = "transformers_modules"
"""The package in which transformers puts the code of checkpoint folders."""

_REPLACEABLE = ("vllm.", f"{__name__.rpartition('.')[0]}.vllm_api.checkpoint_processors")
"""Where a class may be replaced: vLLM's, and those that stand in for a model in tests."""


def is_of_script(module: str) -> bool:
    """Return whether a module is a script, or is generated from a class of a script."""
    return not set(MAIN_MODULES).isdisjoint(module.split("."))


def is_of_folder(module: str) -> bool:
    """Return whether a module is code of a checkpoint folder, or is generated from such code."""
    return _FOLDERS in module.split(".")


def find_registered_module(registered: Any) -> str | None:
    """Return the module of the class that vLLM's registry has for an architecture."""
    model = getattr(registered, "model_cls", None)
    if model is not None:
        return str(model.__module__)
    module = getattr(registered, "module_name", None)
    return None if module is None else str(module)


def claim_architecture(name: str, module: str, registered: str | None) -> None:
    """Store that a model of transformers has an architecture.

    Args:
        name: the architecture.
        module: of vLLM's class.
        registered: of the class that vLLM has for the name so far. vLLM's own may be replaced.

    Raises:
        SpecError: another package has registered a class of the name.
    """
    if registered is not None and not registered.startswith(_REPLACEABLE):
        _refuse_second(name, registered, module)
    check_claim(name, module)
    _claimed[name] = module


def find_claim(names: Iterable[str]) -> str | None:
    """Return the module of the first of some architectures that a model of transformers has."""
    for name in names:
        if name in _claimed:
            return _claimed[name]
    return None


def check_claim(name: str, module: str) -> None:
    """Refuse a class with the architecture of a model of transformers of another package.

    vLLM would take the class that was registered last.

    Raises:
        SpecError: names both.
    """
    _refuse_second(name, _claimed.get(name, module), module)


def _refuse_second(name: str, module: str, other: str) -> None:
    # a script may define a class again, and each folder brings its own
    if module == other or is_of_script(module) or is_of_folder(module):
        return
    expected = "one class of this name"
    remedy = "Rename one of them, or leave the plugin of its package out of VLLM_PLUGINS."
    raise SpecError(f"architecture {name}", expected, f"{module} and {other}", remedy)


def _parse_names() -> list[str]:
    """Return the names of the modules that MMKIT_MODULES has."""
    return [name for name in os.environ.get(VARIABLE, "").split(",") if name]
