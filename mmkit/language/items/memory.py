"""Memory: which arrays share it, and copies of those that must not."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds

from .values import ARRAYS, SCALARS

_CONTAINERS = (list, tuple)


def share_memory(one: Any, other: Any) -> bool:
    """Whether the tensors or arrays of two values have a byte in common."""
    return any(_overlap(*pair) for pair in product([*_arrays(one)], [*_arrays(other)]))


def _arrays(value: Any) -> Iterator[Any]:
    """The tensors and arrays in a value."""
    if isinstance(value, ARRAYS):
        yield value
    elif isinstance(value, (Mapping, *_CONTAINERS)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _arrays(part)


def _overlap(one: Any, other: Any) -> bool:
    """Whether two tensors or arrays have a byte in common."""
    begin, end = _span(one)
    other_begin, other_end = _span(other)
    return begin < other_end and other_begin < end


def _span(value: Any) -> tuple[int, int]:
    """The addresses between which the elements of a tensor or an array lie."""
    if isinstance(value, np.ndarray):
        return byte_bounds(value) if value.size else (0, 0)
    if not value.numel():
        return 0, 0
    begin: int = value.data_ptr()
    if value.is_contiguous():
        return begin, begin + value.nbytes
    last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    return begin, begin + (last + 1) * value.element_size()


def copy_if_shared(source: Any, value: Any) -> Any:
    """A value that shares no memory with what it was made of: as it is where it shares none, else a
    copy.

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
    # what vLLM wraps has all attributes of the picture in it
    if value is source and hasattr(value, "getbands") and not hasattr(value, "original_bytes"):
        return value.copy()
    return value


def _may_share_memory(source: Any, value: Any) -> bool:
    """Whether an array or a tensor may lie in the memory of what a caller has sent."""
    if isinstance(source, ARRAYS):
        return source is value or _overlap(source, value)
    if isinstance(source, _CONTAINERS):
        if source and isinstance(source[0], SCALARS):
            # a list of numbers, which is no array; of an array and its rate, the array comes first
            return False
        return any(_may_share_memory(part, value) for part in source)
    if hasattr(source, "original_bytes"):
        return False  # loaded by vLLM
    # a number, facts, or a picture among frames, whose pixels become an array only as a copy; of
    # anything else nobody knows
    is_known = source is None or isinstance(source, (*SCALARS, str, Mapping))
    return not is_known and not hasattr(source, "getbands")
