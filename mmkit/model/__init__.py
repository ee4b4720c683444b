"""The model side: the base class of vLLM model classes, and what keeps requests apart on the
device."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .mixin import MultiModalModel
    from .sampling import sampling_params

__all__ = ["MultiModalModel", "sampling_params"]


def __getattr__(name: str) -> Any:
    if name == "MultiModalModel":  # imports vLLM, so only when asked for
        from .mixin import MultiModalModel

        return MultiModalModel
    if name == "sampling_params":  # likewise
        from .sampling import sampling_params

        return sampling_params
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
