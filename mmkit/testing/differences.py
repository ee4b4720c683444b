"""How two values differ: outcomes of requests, fields, tensors."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from .vllm_path import Outcome

MAX_REPR_LENGTH = 200  # characters of a value in a message

# Rounding where sums are taken in another order, in units in the last place of the largest value.
_MAX_ULPS = 64

AreAlike = Callable[[Any, Any], bool]


def find_difference(
    first: Any, second: Any, where: str = "", alike: AreAlike | None = None
) -> str | None:
    """Return the first difference of two outcomes, or of parts of outcomes, as a sentence.

    Args:
        first: an outcome, or a part of one.
        second: what is compared with it.
        where: the path of both, for the sentence.
        alike: whether two tensors, or arrays, of one dtype and shape may stand for one another;
            None for `equal`.

    Returns:
        None if they do not differ.
    """
    alike = alike or equal
    match first, second:
        case Outcome(), Outcome():
            return _compare_outcomes(first, second, alike)
        case (torch.Tensor(), torch.Tensor()) | (np.ndarray(), np.ndarray()):
            return _compare_arrays(first, second, where, alike)
        case dict(), dict():
            return _compare_mappings(first, second, where, alike)
        case ((list() | tuple()), (list() | tuple())):
            return _compare_sequences(first, second, where, alike)
        case (Iterator(), _) | (_, Iterator()):
            return f"{where}: a one-shot iterator, which caches and batches read more than once"
    if type(first) is type(second) and _are_equal_objects(first, second):
        return None
    return _describe_values(first, second, where)


def equal(first: Any, second: Any) -> bool:
    """Return whether tensors or arrays of one form have the same values, NaN where NaN is."""
    are_nan = (first != first) & (second != second)
    return bool(((first == second) | are_nan).all())


def near(first: Any, second: Any) -> bool:
    """Return whether tensors or arrays are equal up to rounding.

    Integers are compared exactly, others up to 64 units in the last place of the largest value.
    """
    first = torch.as_tensor(first)
    second = torch.as_tensor(second)
    if not first.is_floating_point() or first.shape != second.shape or not first.numel():
        return torch.equal(first, second)
    largest = float(first.nan_to_num().abs().amax())
    bound = _MAX_ULPS * torch.finfo(first.dtype).eps * largest
    return torch.allclose(first, second, rtol=0, atol=bound, equal_nan=True)


def brief(value: Any) -> str:
    """Return the `repr` of a value, cut to `MAX_REPR_LENGTH` characters."""
    text = repr(value)
    if len(text) <= MAX_REPR_LENGTH:
        return text
    return f"{text[: MAX_REPR_LENGTH - 3]}..."


# -- by kind of value ------------------------------------------------------------------------------


def _compare_outcomes(first: Outcome, second: Outcome, alike: AreAlike) -> str | None:
    for name in ("ids", "ranges", "hashes", "fields"):
        difference = find_difference(getattr(first, name), getattr(second, name), name, alike)
        if difference:
            return difference
    return None


def _compare_arrays(first: Any, second: Any, where: str, alike: AreAlike) -> str | None:
    first_form = _describe_form(first)
    second_form = _describe_form(second)
    if first_form != second_form:
        return f"{where}: {first_form} and {second_form}"
    if not alike(first, second):
        return f"{where}: values differ"
    return None


def _compare_mappings(
    first: Mapping[Any, Any], second: Mapping[Any, Any], where: str, alike: AreAlike
) -> str | None:
    if set(first) != set(second):
        return f"{where}: {_sort_names(first)} and {_sort_names(second)}"
    for key in first:
        difference = find_difference(first[key], second[key], f"{where}[{key!r}]", alike)
        if difference:
            return difference
    return None


def _compare_sequences(
    first: Sequence[Any], second: Sequence[Any], where: str, alike: AreAlike
) -> str | None:
    if len(first) != len(second):
        return f"{where}: {len(first)} and {len(second)} long"
    if _are_integers(first) and _are_integers(second):
        # one sentence with both is better than the first number that differs
        if list(first) == list(second):
            return None
        return _describe_values(first, second, where)
    for index, first_value in enumerate(first):
        difference = find_difference(first_value, second[index], f"{where}[{index}]", alike)
        if difference:
            return difference
    return None


def _sort_names(keys: Mapping[Any, Any]) -> list[str]:
    return sorted(str(key) for key in keys)


def _are_integers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int) for value in values)


def _are_equal_objects(first: Any, second: Any) -> bool:
    """Return whether objects of one class are equal, or their pickles are.

    Classes without `==`, or whose `==` is no truth value, are compared by their pickles.
    """
    with suppress(Exception):
        if first == second:
            return True
    with suppress(Exception):
        return pickle.dumps(first) == pickle.dumps(second)
    return False


def _describe_form(value: Any) -> str:
    library = "numpy " if isinstance(value, np.ndarray) else ""
    return f"{library}{value.dtype} {tuple(value.shape)}"


def _describe_values(first: Any, second: Any, where: str) -> str:
    return f"{where}: {brief(first)} and {brief(second)}"
