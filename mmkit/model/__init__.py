"""The model side: the base class of vLLM model classes, and what keeps requests apart on the
device."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .mixin import MultiModalModel
    from .sampling import sampling_params

__all__ = ["MultiModalModel", "sampling_params"]

_HOMES = {"MultiModalModel": ".mixin", "sampling_params": ".sampling"}
"""The modules of what is imported when it is asked for: they import vLLM."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
