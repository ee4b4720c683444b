"""The model side: the base class of vLLM model classes, and what keeps requests apart on the
device."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sampling import sampling_params

__all__ = ["sampling_params"]


def __getattr__(name: str) -> Any:
    if name == "sampling_params":  # imports vLLM, so only when asked for
        from .sampling import sampling_params

        return sampling_params
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
