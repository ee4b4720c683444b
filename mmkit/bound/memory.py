"""Memory that items share: a function of a spec may return views of a buffer of its own, into which
the next item is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds

Span: TypeAlias = tuple[int, int]
"""The addresses between which the elements of a tensor or an array lie."""


def spans(value: Any) -> Iterator[Span]:
    """Those of all tensors and arrays in a value."""
    if isinstance(value, torch.Tensor):
        last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
        if value.numel():
            yield value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size()
    elif isinstance(value, np.ndarray):
        if value.size:
            yield byte_bounds(value)
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(spans, value.values()))
    elif isinstance(value, (list, tuple)):
        yield from chain.from_iterable(map(spans, value))


def overlap(own: Iterable[Span]) -> bool:
    """Whether two of them have a byte in common."""
    return any(begin < end for (_, end), (begin, _) in pairwise(sorted(own)))


def share(raw: Mapping[str, Any], values: Sequence[Any]) -> bool:
    """Whether items share memory in the result of `process` that is not what was sent."""
    lists = [[*spans(value)] for value in raw.values() if isinstance(value, (list, tuple))]
    if not any(map(overlap, lists)):
        return False
    sent = [*spans(values)]
    new = [
        [one for one in own if not any(b <= one[0] and one[1] <= e for b, e in sent)]
        for own in lists
    ]
    return any(map(overlap, new))
