"""Runs: tokens of nothing but one character, such as line breaks.

A tokenizer that sees a layout inside its prompt makes one token of the line breaks on either side
of an edge, if it has such a token. Layouts are evaluated alone, so a prompt and its layouts are
taken apart into single characters, placed, and joined again as the tokenizer joins a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from .errors import SpecError
from .layout import Placeholder
from .placement import Placement
from .vocabulary import Vocabulary

_LONGEST = 64
"""Characters of the longest run that is one token."""


class Runs:
    """The tokens of a vocabulary that are runs of one character; none without a character.

    Attributes:
        tokens: their ids by the number of characters, up to the first number that is no token.

    Raises:
        SpecError: the character itself is no token.
    """

    def __init__(self, character: str | None, tok: Vocabulary | None, where: str) -> None:
        self.tokens: dict[int, int] = {}
        self._character, self._tok = character, tok
        for length in range(1, _LONGEST + 1):
            ids = self._encoded(length)
            if len(ids) != 1 or ids[0] in self.tokens.values():
                break
            self.tokens[length] = ids[0]
        if character is not None and not self.tokens:
            raise SpecError(where, "a character that the tokenizer has as a token", repr(character))
        self._lengths = {token: length for length, token in self.tokens.items()}

    def _encoded(self, length: int) -> list[int]:
        if self._character is None or self._tok is None:
            return []
        return self._tok.text(self._character * length)

    def _of_run(self, length: int) -> list[int]:
        """The tokens of a run; one per character where the tokenizer makes others of it."""
        tokens = self._encoded(length)
        known = sum(self._lengths.get(token, 0) for token in tokens)
        return tokens if known == length else [self.tokens[1]] * length

    def apart(self, ids: Sequence[int]) -> list[int]:
        """Ids with one token for each character of a run."""
        return [one for token in ids for one in self._apart(token)]

    def _apart(self, token: int) -> list[int]:
        return [self.tokens[1]] * self._lengths[token] if token in self._lengths else [token]

    def placeholder(self, placeholder: Placeholder) -> Placeholder:
        """A layout, taken apart."""
        sizes = zip(placeholder.ids, placeholder.mask, strict=True)
        mask = b"".join(bytes([embeds]) * len(self._apart(token)) for token, embeds in sizes)
        return Placeholder(self.apart(placeholder.ids), mask)

    def joined(
        self, apart: list[int], placements: list[Placement]
    ) -> tuple[list[int], list[Placement]]:
        """Ids with the tokens of runs in them, and where layouts stand there. A token that two
        layouts share belongs to the first."""
        if not self.tokens:
            return apart, placements
        ids: list[int] = []
        token_at: list[int] = []
        for one, characters in groupby(apart):
            count = len([*characters])
            tokens = self._of_run(count) if one == self.tokens[1] else [one] * count
            for token in tokens:
                token_at += [len(ids)] * self._lengths.get(token, 1)
                ids.append(token)
        placed: list[Placement] = []
        end = 0
        for at in placements:
            start, end = max(token_at[at.start], end), token_at[at.end - 1] + 1
            embeds = bytearray(end - start)
            for place, flag in zip(token_at[at.start : at.end], at.placeholder.mask, strict=True):
                if flag:
                    embeds[place - start] = 1
            own = Placeholder(ids[start:end], bytes(embeds))
            placed.append(Placement(at.modality, at.index, start, own))
        return ids, placed
