"""Errors that name the part of a spec that they are about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import InputError, MmkitError, SpecError


class Refusals(list[SpecError]):
    """Collects why a spec cannot be bound: every reason, not only the first."""

    @contextmanager
    def collected(self) -> Iterator[None]:
        """A context after whose errors the next part is looked at."""
        try:
            yield
        except SpecError as error:
            self += [error, *error.others]

    def refuse(self) -> None:
        """Raise the first error, with the others as its `others`; nothing where there is none."""
        if self:
            first, *others = self
            first.others = tuple(others)
            raise first


@contextmanager
def of_spec() -> Iterator[None]:
    """A context in which the refusal of an item is a mistake of the spec, which stated it."""
    try:
        yield
    except InputError as error:
        raise SpecError(f"the largest item: {error}") from error


class At:
    """A context in which errors name a part of a spec: ``with At("robot.actions, layout"):``.

    Args:
        where: the part.
        expected: of a function of the spec, whose own errors of mmkit stay as they are.
        kind: what becomes of every other exception of a function.
    """

    __slots__ = ("expected", "kind", "where")

    def __init__(self, where: str, expected: str = "", kind: type[MmkitError] = SpecError) -> None:
        self.where, self.expected, self.kind = where, expected, kind

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, SpecError) and not self.expected:
            raise SpecError(f"{self.where}: {error}") from error
        if isinstance(error, Exception) and not isinstance(error, MmkitError):
            got = f"{type(error).__name__}: {error}".rstrip(": .")
            raise self.kind(self.where, self.expected or "a value", got) from error
