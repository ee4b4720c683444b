"""Texts that are items themselves, apart from the prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Self

from ..errors import InputError
from ..expr import Count, Scope, expression
from ..node import Stated, stated
from .base import Between, ItemType, check_size
from .values import described


class Text(ItemType):
    """A text that a function or a processor encodes: SMILES, DNA, a query.

    Callers send a string or a list of strings. The canonical form is a `str` that UTF-8 can encode.

    Attributes:
        most: the most characters.
        least: the fewest.

    Facts: `length` in characters, `index`.
    """

    most: Stated[Count, Any] = stated(expression)
    least: Stated[Count, Any] = stated(expression, default=1)

    rank = 1
    media = ""
    sent = (str, list, tuple)
    form = "a number of characters"

    def bind(self, scope: Scope) -> Self:
        bound = super().bind(scope)
        check_size(bound.bounds()[0], "Text.least, Text.most")
        return bound

    @property
    def largest(self) -> tuple[tuple[int, ...], ...]:
        return ((self.most,),)

    def bounds(self) -> list[Between]:
        return [Between(self.least, self.most)]

    @property
    def expected(self) -> str:
        return f"a text of {Between(self.least, self.most)} characters"

    def canonical(self, value: object, where: str) -> str:
        if not isinstance(value, str):
            raise InputError(where, self.expected, described(value))
        if not self.least <= len(value) <= self.most:
            raise InputError(where, self.expected, f"{len(value)} of them")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            got = f"half of a surrogate pair at {error.start}"
            raise InputError(where, "a text that UTF-8 can encode", got) from None
        return str(value)

    def facts(self, value: str, index: int) -> SimpleNamespace:
        return SimpleNamespace(index=index, length=len(value))

    def blank(self, *sizes: int) -> str:
        return "a" * sizes[0]

    def schema(self) -> dict[str, Any]:
        return {"shape": [[self.least, self.most]], "dtype": "text"}
