"""How two values differ: outcomes of requests, fields, tensors."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from .vllm_path import Outcome


def equal(one: Any, other: Any) -> bool:
    """Whether tensors or arrays of one form have the same values, NaN where NaN is."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def near(one: Any, other: Any) -> bool:
    """Whether tensors or arrays are equal: integers exactly, others up to 64 units in the last
    place of the largest value, as where sums are taken in another order."""
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    if not one.is_floating_point() or one.shape != other.shape or not one.numel():
        return torch.equal(one, other)
    bound = 64 * torch.finfo(one.dtype).eps * float(one.nan_to_num().abs().amax())
    return torch.allclose(one, other, rtol=0, atol=bound, equal_nan=True)


def differences(
    one: Any, other: Any, where: str = "", alike: Callable[[Any, Any], bool] = equal
) -> str | None:
    """The first difference of two outcomes, or of parts of outcomes; None if they are equal, or, if
    they are tensors or arrays of one form, `alike`."""
    pairs: list[tuple[str, Any, Any]]
    match one, other:
        case Outcome(), Outcome():
            names = ("ids", "ranges", "hashes", "fields")
            pairs = [(name, getattr(one, name), getattr(other, name)) for name in names]
        case (torch.Tensor(), torch.Tensor()) | (np.ndarray(), np.ndarray()):
            forms = [_form(value) for value in (one, other)]
            if forms[0] != forms[1]:
                return f"{where}: {forms[0]} and {forms[1]}"
            return None if alike(one, other) else f"{where}: values differ"
        case dict(), dict():
            if set(one) != set(other):
                return f"{where}: {sorted(map(str, one))} and {sorted(map(str, other))}"
            pairs = [(f"{where}[{key!r}]", one[key], other[key]) for key in one]
        case ((list() | tuple()), (list() | tuple())):
            if len(one) != len(other):
                return f"{where}: {len(one)} and {len(other)} long"
            if all(isinstance(value, int) for value in (*one, *other)):
                return _unless(list(one) == list(other), one, other, where)
            both = enumerate(zip(one, other, strict=True))
            pairs = [(f"{where}[{i}]", *values) for i, values in both]
        case (Iterator(), _) | (_, Iterator()):
            return f"{where}: a one-shot iterator, which caches and batches read more than once"
        case _:
            return _unless(type(one) is type(other) and _alike(one, other), one, other, where)
    found = (differences(a, b, place, alike) for place, a, b in pairs)
    return next(filter(None, found), None)


def brief(value: Any) -> str:
    """The `repr` of a value, cut to 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _form(value: Any) -> str:
    library = "numpy " if isinstance(value, np.ndarray) else ""
    return f"{library}{value.dtype} {tuple(value.shape)}"


def _alike(one: Any, other: Any) -> bool:
    """Whether values of one class are equal; where `==` is not true, whether their pickles are."""
    with suppress(Exception):
        if one == other:
            return True
    with suppress(Exception):
        return pickle.dumps(one) == pickle.dumps(other)
    return False


def _unless(equal: bool, one: Any, other: Any, where: str) -> str | None:
    return None if equal else f"{where}: {brief(one)} and {brief(other)}"
