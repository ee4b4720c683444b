"""Texts that are items themselves, apart from the prompt."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..errors import InputError, SpecError
from ..expr import Count, Expr, Scope, evaluate
from .base import Between, ItemType, between, bound_size
from .values import described


class Text(ItemType):
    """A text that a function or a processor encodes: SMILES, DNA, a query.

    Callers send a string or a list of strings. The canonical form is a `str` that UTF-8 can encode.

    Attributes:
        most: the most characters.
        least: the fewest.
        alphabet: a string of the characters that a text may have; the largest item repeats the
            first of them. None for any.

    Facts: `length` in characters, `index`.
    """

    most: Any
    least: Any = 1
    alphabet: Any = None

    if TYPE_CHECKING:

        def __init__(
            self, most: Count, least: Count = 1, alphabet: Expr | str | None = None
        ) -> None: ...

    rank = 1
    media = ""
    form = "a number of characters"

    def bind(self, scope: Scope) -> Text:
        size = bound_size(between(self.least, self.most), scope, "Text.least, Text.most")
        alphabet = evaluate(self.alphabet, scope)
        if alphabet is not None and not (isinstance(alphabet, str) and alphabet):
            raise SpecError("Text.alphabet", "a string of characters", repr(alphabet))
        return replace(self, most=size.most, least=size.least, alphabet=alphabet)

    @property
    def expected(self) -> str:
        return f"a text of {Between(self.least, self.most)} characters"

    def split(self, data: object, where: str) -> list[Any]:
        if not isinstance(data, (str, list, tuple)):
            raise InputError(where, f"{self.expected} or a list of them", described(data))
        return [data] if isinstance(data, str) else list(data)

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
        odd = None if self.alphabet is None else next(filter(self._is_odd, value), None)
        if odd is not None:
            got = f"{odd!r} at {value.index(odd)}"
            raise InputError(where, f"characters among {self.alphabet!r}", got)
        return str(value)

    def _is_odd(self, character: str) -> bool:
        return character not in self.alphabet

    def facts(self, value: str, index: int) -> SimpleNamespace:
        return SimpleNamespace(index=index, length=len(value))

    def blank(self, *sizes: int) -> str:
        (length,) = sizes
        return (self.alphabet or "a")[0] * length

    def candidates(self, fraction: float = 1.0) -> list[str]:
        return [self.blank(max(self.least, int(self.most * fraction)))]

    def small(self) -> list[str]:
        return [self.blank(self.least)]

    def smallest(self) -> list[str]:
        return self.small()

    def schema(self) -> dict[str, Any]:
        return {"shape": [[self.least, self.most]], "dtype": "text"}
