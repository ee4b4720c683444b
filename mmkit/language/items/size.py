"""Sizes, which `bind` evaluates, and numbers of a config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ...errors import SpecError
from ..expr import Count, Expr, Scope, as_expression, to_python
from ..node import Converted, Part, parameter


class Between(Part):
    """A size that varies; see `between`."""

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
    """A size that varies from `least` to `most`, both included: whole numbers >= 0, or expressions
    over `cfg`.

    Raises:
        SpecError: numbers that are no sizes, or in another order.
    """
    size = Between(least, most)
    if all(is_number(end) for end in (least, most)):
        check_size(size, "between()")
    return size


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_positive(number: Any, where: str) -> None:
    """Refuse what is no number > 0, once bound; None states no number."""
    if number is not None and not (is_number(number) and number > 0):
        raise SpecError(where, "a number > 0 from cfg", repr(number))


def check_size(size: Any, where: str) -> None:
    """Refuse what is no size, once bound."""
    if not _are_whole(*ends(size), least=0) or ends(size) != tuple(sorted(ends(size))):
        raise SpecError(where, "whole numbers >= 0, in order", str(size))


def sizes_of(value: Any, width: int, where: str) -> tuple[tuple[int, ...], ...]:
    """One shape, or several, of `width` sizes each."""
    rows = value
    if not isinstance(rows, (list, tuple)) or not isinstance(next(iter(rows), None), (list, tuple)):
        rows = [rows]
    sizes = [tuple(row) if isinstance(row, (list, tuple)) else (row,) for row in rows]
    for row in sizes:
        if len(row) != width or not _are_whole(*row, least=1):
            raise SpecError(where, f"{width} whole number(s) >= 1", repr(row))
    return tuple(sizes)


def _are_whole(*values: Any, least: int) -> bool:
    return all(isinstance(one, int) and is_number(one) and one >= least for one in values)


def shape_text(shape: Sequence[Any]) -> str:
    """A shape for messages: ``(6, 1..3)``."""
    return f"({', '.join(map(str, map(to_python, shape)))}{',' if len(shape) == 1 else ''})"


def ends(size: Any) -> tuple[Any, Any]:
    """The least and the most of a size."""
    return (size.least, size.most) if isinstance(size, Between) else (size, size)


def fits(shape: Sequence[int], sizes: Sequence[Any]) -> bool:
    """Whether a shape has these sizes, of which some may be `between`."""
    if shape == sizes or len(shape) != len(sizes):
        return bool(shape == sizes)
    return all(least <= n <= most for n, (least, most) in zip(shape, map(ends, sizes), strict=True))
