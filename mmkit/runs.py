"""Runs: tokens of nothing but one character, such as line breaks, that merge where they meet.

A tokenizer that sees a layout inside its prompt makes one token of the line breaks on either side
of where they meet, if it has such a token. Layouts are evaluated alone, so `ModelSpec(merges=...)`
says that theirs do the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from .errors import SpecError
from .layout import Placeholder
from .vocabulary import Vocabulary

_LONGEST = 64
"""Characters of the longest run that merges."""


class Runs:
    """The tokens of a vocabulary that are runs of one character.

    Attributes:
        tokens: their ids by the number of characters.
    """

    def __init__(self, tokens: Mapping[int, int] = MappingProxyType({})) -> None:
        self.tokens = tokens
        self._lengths = {token: length for length, token in tokens.items()}

    @classmethod
    def of(cls, character: str, tok: Vocabulary | None, where: str) -> Runs:
        """The runs of a character, up to the first length that is no token.

        Raises:
            SpecError: there is none.
        """
        tokens: dict[int, int] = {}
        if tok is not None:
            for length in range(1, _LONGEST + 1):
                ids = tok.text(character * length)
                if len(ids) != 1 or ids[0] in tokens.values():
                    break
                tokens[length] = ids[0]
        if not tokens:
            raise SpecError(where, "a character that the tokenizer has as a token", repr(character))
        return cls(tokens)

    def merged(self, first: int, second: int) -> int | None:
        """The one token of two, if there is one."""
        if first not in self._lengths or second not in self._lengths:
            return None
        return self.tokens.get(self._lengths[first] + self._lengths[second])

    def apart(self, ids: Sequence[int]) -> list[int]:
        """Ids with one token for each character of a run."""
        parts = (
            [self.tokens[1]] * self._lengths[one] if one in self._lengths else [one] for one in ids
        )
        return [token for part in parts for token in part]

    def core(self, placeholder: Placeholder) -> str:
        """The ids of a layout as a string, without those at its edges that may have merged."""
        if not self._lengths:
            return placeholder.text
        lead, tail = self._edges(placeholder)
        return placeholder.text[lead : len(placeholder) - tail]

    def _edges(self, placeholder: Placeholder) -> tuple[bool, bool]:
        ids = placeholder.ids
        lead, tail = (bool(ids) and ids[edge] in self._lengths for edge in (0, -1))
        return (lead, tail) if len(ids) > lead + tail else (False, False)

    def around(
        self, prompt: Sequence[int], at: int, cursor: int, placeholder: Placeholder
    ) -> tuple[int, Placeholder] | None:
        """A layout whose core stands in a prompt: where it begins, and its ids there. None where a
        run that belongs to it is missing.

        Args:
            prompt: token ids.
            at: where the core stands.
            cursor: where the prompt is free. The token before it belongs to another layout, which
                may share it.
            placeholder: the layout.
        """
        if not self._lengths:
            return at, placeholder
        lead, tail = self._edges(placeholder)
        if not lead and not tail:
            return at, placeholder
        begin, end = at - lead, at - lead + len(placeholder)
        ids, own = list(placeholder.ids), placeholder.ids
        if lead:
            if begin < 0 or not self._holds(prompt[begin], own[0]):
                return None
            ids[0] = prompt[begin]
            if begin < cursor:
                if prompt[begin] == own[0]:
                    return None
                begin, ids = at, ids[1:]
        if tail:
            if end > len(prompt) or not self._holds(prompt[end - 1], own[-1]):
                return None
            ids[-1] = prompt[end - 1]
        return begin, placeholder.standing(ids)

    def surplus(self, standing: Placeholder, placeholder: Placeholder) -> tuple[int, int]:
        """Characters that a layout as it stands in a prompt has more at its beginning and at its
        end than evaluated alone. They are fewer where it shares the first with another."""
        lead, tail = self._edges(placeholder)
        before = after = 0
        if lead:
            before = -self._lengths[placeholder.ids[0]]
            if len(standing) == len(placeholder):
                before += self._lengths[standing.ids[0]]
        if tail:
            after = self._lengths[standing.ids[-1]] - self._lengths[placeholder.ids[-1]]
        return before, after

    def run(self, length: int) -> list[int]:
        """The token of so many characters; no token of none."""
        return [self.tokens[length]] if length else []

    def _holds(self, token: int, own: int) -> bool:
        return self._lengths.get(token, 0) >= self._lengths[own]
