"""Tokens that merge where a layout meets its prompt.

Some vocabularies have tokens for runs of one character, for example one token for two line breaks.
A layout that ends with a line break then merges with a line break that follows it in the prompt, as
in a text that is tokenized as a whole. Items are placed in a prompt whose runs are split, one token
for each character; afterwards the runs are merged again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from ..errors import SpecError
from ..language.layout import ItemTokens, make_id_string
from ..language.vocabulary import Vocabulary
from .placement import ItemLayout, LayoutsByModality, PlacedPrompt, Placement, ResolvedUpdate

MAX_RUN_LENGTH = 64
"""The most characters of a run that is looked up as one token."""

MAX_SPLIT_LAYOUTS = 64
"""The layouts that are kept with their runs split."""


class MergedRuns:
    """The tokens of a vocabulary that are runs of one character; none without a character.

    Attributes:
        tokens_by_length: the token of each run by its number of characters, from 1 to the first
            number that is no token.

    Raises:
        SpecError: the character itself is no token.
    """

    def __init__(self, character: str | None, tok: Vocabulary | None, where: str) -> None:
        self.tokens_by_length: dict[int, int] = {}
        self._length_of_token: dict[int, int] = {}
        self._character = character
        self._tok = tok
        # items of one geometry share a layout, which is split once for many requests
        self._split_layout = lru_cache(MAX_SPLIT_LAYOUTS)(self._split_layout_uncached)
        for length in range(1, MAX_RUN_LENGTH + 1):
            ids = self._encode_run(length)
            if len(ids) != 1 or ids[0] in self._length_of_token:
                break
            self.tokens_by_length[length] = ids[0]
            self._length_of_token[ids[0]] = length
        if character is not None and not self.tokens_by_length:
            expected = "a character that the tokenizer has as a token"
            raise SpecError(where, expected, repr(character))

    def split(self, ids: Sequence[int]) -> list[int]:
        """Return ids in which every run is split into one token for each character."""
        split_ids: list[int] = []
        for token in ids:
            length = self._length_of_token.get(token)
            if length is None:
                split_ids.append(token)
            else:
                split_ids += [self.tokens_by_length[1]] * length
        return split_ids

    def split_layouts(self, layouts: LayoutsByModality) -> LayoutsByModality:
        """Return layouts and targets in which every run is split."""
        split_layouts: dict[str, list[ItemLayout]] = {}
        for modality, item_layouts in layouts.items():
            split_layouts[modality] = [self._split_layout(layout) for layout in item_layouts]
        return split_layouts

    def merge(self, placed: PlacedPrompt) -> PlacedPrompt:
        """Return a prompt whose runs are merged, and the places of its layouts there.

        Args:
            placed: a prompt whose runs are split. It is returned as it is where no run is a token.
        """
        if not self.tokens_by_length:
            return placed
        ids: list[int] = []
        # for each position of the split prompt, the position of the token that covers it
        merged_position: list[int] = []
        cursor = 0
        for run in self._find_runs(placed.token_ids):
            merged_position += range(len(ids), len(ids) + run.start - cursor)
            ids += placed.token_ids[cursor : run.start]
            for token in self._merge_run(placed.token_ids[run.start : run.stop]):
                merged_position += [len(ids)] * self._length_of_token.get(token, 1)
                ids.append(token)
            cursor = run.stop
        merged_position += range(len(ids), len(ids) + len(placed.token_ids) - cursor)
        ids += placed.token_ids[cursor:]
        placements: list[Placement] = []
        end = 0
        for placement in placed.placements:
            positions = merged_position[placement.start : placement.end]
            # a token that two layouts share belongs to the first
            start = max(positions[0], end)
            end = positions[-1] + 1
            mask = bytearray(end - start)
            for position, is_embed in zip(positions, placement.tokens.mask, strict=True):
                if is_embed and position >= start:
                    mask[position - start] = 1
            tokens = ItemTokens(ids[start:end], bytes(mask))
            placements.append(Placement(placement.modality, placement.index, start, tokens))
        return PlacedPrompt(ids, placements)

    def _split_layout_uncached(self, layout: ItemLayout) -> ItemLayout:
        """Return the layout of an item, its runs split in its tokens and in its targets."""
        mask = bytearray()
        for token, is_embed in zip(layout.tokens.ids, layout.tokens.mask, strict=True):
            mask += bytes([is_embed]) * self._length_of_token.get(token, 1)
        updates: list[ResolvedUpdate] = []
        for update, target in layout.updates:
            updates.append(ResolvedUpdate(update, tuple(self.split(target))))
        return ItemLayout(ItemTokens(self.split(layout.tokens.ids), bytes(mask)), updates)

    def _find_runs(self, ids: Sequence[int]) -> list[range]:
        """Return the positions of each run of single characters."""
        single = make_id_string([self.tokens_by_length[1]])
        matches = re.finditer(f"{re.escape(single)}+", make_id_string(ids))
        return [range(*match.span()) for match in matches]

    def _merge_run(self, run: list[int]) -> list[int]:
        """Return the tokens that the tokenizer makes of a run of single characters."""
        tokens = self._encode_run(len(run))
        num_characters = 0
        for token in tokens:
            num_characters += self._length_of_token.get(token, 0)
        # the tokenizer may make other tokens of a long run: that run stays split
        return tokens if num_characters == len(run) else run

    def _encode_run(self, length: int) -> list[int]:
        """Return the tokens of a run; none without a character or a vocabulary."""
        if self._character is None or self._tok is None:
            return []
        return self._tok.text(self._character * length)
