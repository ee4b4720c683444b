"""Memory: whether arrays share it, and copies of arrays that must not."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds

from .values import ARRAYS, SCALARS

_CONTAINERS = (list, tuple)


def copy_if_shared(source: Any, value: Any) -> Any:
    """Return a value that shares no memory with what it was made of: itself, or a copy.

    Args:
        source: what a caller has sent.
        value: an array, a tensor, a picture, a text, or a pair of these and a dict of facts. What
            vLLM has loaded from a file and wraps together with its bytes stays as it is: it belongs
            to nobody else.
    """
    if isinstance(value, tuple):
        array, facts = value
        return copy_if_shared(source, array), copy.deepcopy(facts)
    if isinstance(value, ARRAYS):
        if not _may_share_memory(source, value):
            return value
        if isinstance(value, np.ndarray):
            return value.copy()
        return value.clone(memory_format=torch.contiguous_format)
    # vLLM's wrapper has all attributes of the picture that it wraps, so `getbands` tells no picture
    is_picture = hasattr(value, "getbands") and not hasattr(value, "original_bytes")
    if value is source and is_picture:
        return value.copy()
    return value


def share_memory(first: Any, second: Any) -> bool:
    """Return whether the tensors or arrays in two values have a byte in common."""
    arrays = list(_arrays_in(second))
    for array in _arrays_in(first):
        for other in arrays:
            if _overlap(array, other):
                return True
    return False


def _may_share_memory(source: Any, value: Any) -> bool:
    """Return whether an array or a tensor may lie in the memory of what a caller has sent."""
    if isinstance(source, ARRAYS):
        return source is value or _overlap(source, value)
    if isinstance(source, _CONTAINERS):
        if source and isinstance(source[0], SCALARS):
            # Numbers of a list are no array. An array and its rate are no list of numbers: the
            # array comes first.
            return False
        return any(_may_share_memory(part, value) for part in source)
    if hasattr(source, "original_bytes"):
        return False  # loaded by vLLM
    if source is None or isinstance(source, (*SCALARS, str, Mapping)):
        return False
    if hasattr(source, "getbands"):
        return False  # a picture among frames, whose pixels become an array only as a copy
    return True  # somebody's class: nobody knows


def _arrays_in(value: Any) -> Iterator[Any]:
    """Yield the tensors and arrays in nested containers."""
    if isinstance(value, ARRAYS):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _arrays_in(part)
    elif isinstance(value, _CONTAINERS):
        for part in value:
            yield from _arrays_in(part)


def _overlap(first: Any, second: Any) -> bool:
    """Return whether two tensors or arrays have a byte in common."""
    begin, end = _address_range(first)
    other_begin, other_end = _address_range(second)
    return begin < other_end and other_begin < end


def _address_range(value: Any) -> tuple[int, int]:
    """Return the addresses between which the elements of a tensor or an array lie."""
    if isinstance(value, np.ndarray):
        if not value.size:
            return 0, 0
        return byte_bounds(value)
    if not value.numel():
        return 0, 0
    begin: int = value.data_ptr()
    if value.is_contiguous():
        return begin, begin + value.nbytes
    last = 0
    for size, stride in zip(value.shape, value.stride(), strict=True):
        last += (size - 1) * stride
    return begin, begin + (last + 1) * value.element_size()
