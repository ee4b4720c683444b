"""Sizes, which `bind` evaluates, and numbers of a config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ...errors import SpecError
from ..expr import Count, Expr, Scope, as_expression
from ..node import Converted, Part, parameter
from ..scope import to_python


class Between(Part):
    """A size that varies, or a range of values; see `between`."""

    least: Converted[Count, Any] = parameter(as_expression)
    most: Converted[Count, Any] = parameter(as_expression)

    _word = "between"

    def __str__(self) -> str:
        return f"{to_python(self.least)!r}..{to_python(self.most)!r}"


Size: TypeAlias = "Expr | int | Between | Callable[[Scope], Any]"
"""One dimension: a whole number >= 0, or `between` two of them."""

Sizes: TypeAlias = "tuple[Any, ...] | list[tuple[Any, ...]] | Expr | Callable[[Scope], Any]"
"""The sizes of an item, one per dimension, or a list of such sizes."""


def between(
    least: Expr | int | Callable[[Scope], Any], most: Expr | int | Callable[[Scope], Any]
) -> Between:
    """Declare a size, or a value, that varies from `least` to `most`, both included.

    Each is a whole number, or an expression over `cfg`. A size is at least 0. The range of values
    may begin below: ``between(-1, 9)`` for indices of which -1 stands for none.

    Raises:
        SpecError: numbers that are not whole, or in another order.
    """
    interval = Between(least, most)
    if all(is_number(end) for end in (least, most)):
        check_range(interval, "between()")
    return interval


def is_number(value: Any) -> bool:
    """Return whether a value is an integer or a float; a bool is neither."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_positive(number: Any, where: str) -> None:
    """Refuse a value of a bound part that is neither None nor a number > 0."""
    if number is not None and not (is_number(number) and number > 0):
        raise SpecError(where, "a number > 0 from cfg", repr(number))


def check_size(size: Any, where: str) -> None:
    """Refuse a value of a bound part that is no size."""
    least, most = get_ends(size)
    if not _is_whole(least, 0) or not _is_whole(most, 0) or least > most:
        raise SpecError(where, "whole numbers >= 0, in order", str(size))


def check_range(interval: Between, where: str) -> None:
    """Refuse a value of a bound part that is no range of whole numbers."""
    ends = get_ends(interval)
    if not all(isinstance(end, int) and is_number(end) for end in ends) or ends[0] > ends[1]:
        raise SpecError(where, "whole numbers, in order", str(interval))


def convert_shapes(value: Any, width: int, where: str) -> tuple[tuple[int, ...], ...]:
    """Return one shape, or several, as a tuple of shapes.

    Args:
        value: a size, a sequence of sizes, or a sequence of such sequences.
        width: the number of sizes of each shape.
        where: names the argument in errors.

    Raises:
        SpecError: another number of sizes, or a size that is no whole number >= 1.
    """
    rows = value
    is_sequence = isinstance(value, (list, tuple))
    if not is_sequence or not value or not isinstance(value[0], (list, tuple)):
        rows = [value]
    shapes: list[tuple[int, ...]] = []
    for row in rows:
        shape = tuple(row) if isinstance(row, (list, tuple)) else (row,)
        if len(shape) != width or not all(_is_whole(size, 1) for size in shape):
            raise SpecError(where, f"{width} whole number(s) >= 1", repr(shape))
        shapes.append(shape)
    return tuple(shapes)


def _is_whole(value: Any, least: int) -> bool:
    """Return whether a value is an integer >= `least`; a bool is none."""
    return isinstance(value, int) and is_number(value) and value >= least


def write_shape(shape: Sequence[Any]) -> str:
    """Return a shape for messages: ``(6, 1..3)``."""
    sizes = ", ".join([str(to_python(size)) for size in shape])
    if len(shape) == 1:
        sizes += ","
    return f"({sizes})"


def get_ends(size: Any) -> tuple[Any, Any]:
    """Return the least and the most of a size."""
    if isinstance(size, Between):
        return size.least, size.most
    return size, size


def fits(shape: Sequence[int], sizes: Sequence[Any]) -> bool:
    """Return whether a shape has these sizes, some of which may be `between`."""
    if shape == sizes:  # most shapes; it spares the loop
        return True
    if len(shape) != len(sizes):
        return False
    for number, size in zip(shape, sizes, strict=True):
        least, most = get_ends(size)
        if not least <= number <= most:
            return False
    return True
