"""The model side: what a vLLM model class inherits, and what keeps requests apart on the device."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .mixin import MultiModalModel

__all__ = ["MultiModalModel"]


def __getattr__(name: str) -> Any:
    if name == "MultiModalModel":  # imports vLLM, so only when asked for
        from .mixin import MultiModalModel

        return MultiModalModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
