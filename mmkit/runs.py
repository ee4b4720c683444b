"""Runs: tokens of nothing but one character, such as line breaks.

A tokenizer that sees a layout inside its prompt makes one token of the line breaks on either side
of an edge, if it has such a token. Layouts are evaluated alone, so a prompt and its layouts are
taken apart into single characters, placed, and joined again as the tokenizer joins a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, groupby

from .errors import SpecError
from .layout import Placeholder
from .placement import Placed, Placement
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

    def apart(self, ids: Sequence[int]) -> list[int]:
        """Ids with one token for each character of a run."""
        return self.placeholder(Placeholder(list(ids), bytes(len(ids)))).ids

    def placeholder(self, placeholder: Placeholder) -> Placeholder:
        """A layout, with one token for each character of a run."""
        ids: list[int] = []
        mask = bytearray()
        for token, embeds in zip(placeholder.ids, placeholder.mask, strict=True):
            length = self._lengths.get(token)
            ids += [token] if length is None else [self.tokens[1]] * length
            mask += bytes([embeds]) * (length or 1)
        return Placeholder(ids, bytes(mask))

    def joined(self, apart: list[int], placements: list[Placement]) -> Placed:
        """Ids with the tokens of runs in them, and where layouts stand there. A token that two
        layouts share belongs to the first."""
        if not self.tokens:
            return apart, placements
        ids: list[int] = []
        token_at: list[int] = []
        for one, characters in groupby(apart):
            count = len([*characters])
            tokens = self._encoded(count) if one == self.tokens[1] else []
            if sum(self._lengths.get(token, 0) for token in tokens) != count:
                tokens = [one] * count  # also where the tokenizer makes others of a run
            for token in tokens:
                token_at += [len(ids)] * self._lengths.get(token, 1)
                ids.append(token)
        placed: list[Placement] = []
        end = 0
        for at in placements:
            start, end = max(token_at[at.start], end), token_at[at.end - 1] + 1
            chosen = {*compress(token_at[at.start : at.end], at.placeholder.mask)}
            own = Placeholder(ids[start:end], bytes(i in chosen for i in range(start, end)))
            placed.append(Placement(at.modality, at.index, start, own))
        return ids, placed
