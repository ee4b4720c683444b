"""Targets that are texts of several tokens, found wherever they stand in a prompt.

What a tokenizer makes of a text depends on what stands before and after it: Llama 2's begins
``<graph>`` with a space where it stands by itself and not in ``a.<graph>``, and GPT-2's may have
``.<`` as one token. Before items are placed, such targets get the ids that the tokenizer makes of
them by themselves.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..language.layout import Replace, Target, make_id_string
from ..language.vocabulary import Vocabulary
from .placement import LayoutsByModality
from .spans import Span, Spans


class TextTarget(NamedTuple):
    """A target of several tokens, which a prompt may have as other tokens.

    Attributes:
        ids: its ids, as the tokenizer makes them of the text by itself.
        text: its text.
        id_string: its ids as a string; see `mmkit.language.layout.make_id_string`.
    """

    ids: Target
    text: str
    id_string: str


class TextTargets:
    """The targets of a spec that are texts of several tokens.

    Args:
        reserved: the targets that can only stand for items. A spec may have many, such as
            ``<|image_1|>`` to ``<|image_64|>``: they are decoded once.
        tok: the vocabulary.
    """

    def __init__(self, reserved: Iterable[Target], tok: Vocabulary) -> None:
        self._tok = tok
        self._reserved: dict[Target, TextTarget] = {}
        for target in reserved:
            if len(target) > 1:
                self._reserved[target] = self._decode(target)

    def find(self, layouts: LayoutsByModality) -> list[TextTarget]:
        """Return the targets of several tokens: reserved targets, and those of items."""
        targets = dict(self._reserved)
        for target in self.find_in_layouts(layouts):
            targets[target.ids] = target
        return list(targets.values())

    def find_in_layouts(self, layouts: LayoutsByModality) -> list[TextTarget]:
        """Return the targets of several tokens of the layouts of items."""
        targets: dict[Target, TextTarget] = {}
        for item_layouts in layouts.values():
            for layout in set(item_layouts):  # most items of a modality share one
                for update, target in layout.updates:
                    if len(target) > 1 and isinstance(update, Replace):
                        targets[target] = self._reserved.get(target) or self._decode(target)
        return list(targets.values())

    def restore(self, prompt: list[int], targets: Sequence[TextTarget]) -> list[int]:
        """Return a prompt in which every target has its own ids.

        No id outside a target changes, except for a token that reaches across its edge: the part
        outside is encoded again.

        Args:
            prompt: token ids; not changed.
            targets: what `find` or `find_in_layouts` returns.
        """
        if _has_only_whole_targets(prompt, targets, self._tok):  # nearly always
            return prompt
        pieces = _PromptPieces(prompt, self._tok)
        whole_targets = Spans(_find_whole_targets(prompt, targets))
        ids_of_text = {target.text: target.ids for target in targets}
        ids: list[int] = []
        end = 0  # in the text, of the target before
        for match in _find_texts(pieces.text, ids_of_text):
            tokens = pieces.find_tokens(match.start(), match.end())
            if whole_targets.find_overlapped(tokens) is not None:
                continue
            before = pieces.encode(end, match.start())
            if before is None:
                continue
            ids += before
            ids += ids_of_text[match[0]]
            end = match.end()
        if end == 0:
            return prompt
        after = pieces.encode(end, len(pieces.text))
        if after is None:
            return prompt
        return ids + after

    def _decode(self, target: Target) -> TextTarget:
        return TextTarget(target, self._tok.decode_target(target), make_id_string(target))


def spells_target(ids: Sequence[int], target: Target, tok: Vocabulary | None) -> bool:
    """Return whether a target stands among ids.

    A target of several tokens may stand there as other tokens, whose text contains its text.

    Args:
        ids: for example the ids of a layout.
        target: the ids of the target by itself.
        tok: the vocabulary; None for a model without a tokenizer.
    """
    if make_id_string(target) in make_id_string(ids):
        return True
    if tok is None or len(target) == 1:
        return False
    text = tok.decode_target(target).strip()
    return bool(text) and text in tok.decode(list(ids))


def _has_only_whole_targets(
    prompt: list[int], targets: Sequence[TextTarget], tok: Vocabulary
) -> bool:
    """Return whether each text stands in the prompt as often as its target's ids do."""
    text = tok.decode_simple(prompt)
    if text is None:
        return False
    id_string = make_id_string(prompt)
    for target in targets:
        if text.count(target.text) != id_string.count(target.id_string):
            return False
    return True


def _find_texts(text: str, target_texts: Iterable[str]) -> list[re.Match[str]]:
    """Return where the texts of targets stand in a text, without overlaps, the longest first."""
    patterns: list[str] = []
    for target_text in sorted(target_texts, key=len, reverse=True):
        if target_text.strip():
            patterns.append(re.escape(target_text))
    if not patterns:
        return []
    return list(re.finditer("|".join(patterns), text))


def _find_whole_targets(prompt: list[int], targets: Sequence[TextTarget]) -> list[Span]:
    """Return the positions of a prompt at which targets stand with their own ids."""
    prompt_string = make_id_string(prompt)
    spans: list[Span] = []
    for target in targets:
        start = prompt_string.find(target.id_string)
        while start >= 0:
            stop = start + len(target.ids)
            spans.append(Span(start, stop))
            start = prompt_string.find(target.id_string, stop)
    return spans


class _PromptPieces:
    """The text of a prompt, in pieces of one token or of the tokens of one character.

    Attributes:
        text: the text of the whole prompt.
    """

    def __init__(self, prompt: list[int], tok: Vocabulary) -> None:
        self._prompt = prompt
        self._tok = tok
        # where each piece begins in the text and in the prompt, and then both ends
        self._text_offsets = [0]
        self._id_offsets = [0]
        texts: list[str] = []
        for text, num_ids in tok.split_into_pieces(prompt):
            texts.append(text)
            self._text_offsets.append(self._text_offsets[-1] + len(text))
            self._id_offsets.append(self._id_offsets[-1] + num_ids)
        self.text = "".join(texts)

    def find_tokens(self, start: int, stop: int) -> Span:
        """Return the positions of the tokens that hold any of ``text[start:stop]``."""
        first_piece = bisect_right(self._text_offsets, start) - 1
        end_piece = bisect_left(self._text_offsets, stop)
        return Span(self._id_offsets[first_piece], self._id_offsets[end_piece])

    def encode(self, start: int, stop: int) -> list[int] | None:
        """Return the ids of ``text[start:stop]``: those of the prompt, as far as they lie inside.

        The text inside of a token that reaches across an edge is encoded again. None where no ids
        have that text inside another one.
        """
        first_piece = bisect_left(self._text_offsets, start)
        end_piece = bisect_right(self._text_offsets, stop) - 1
        if first_piece > end_piece:  # all inside one token
            return self._tok.encode_inside(self.text[start:stop])
        before = self._tok.encode_inside(self.text[start : self._text_offsets[first_piece]])
        after = self._tok.encode_inside(self.text[self._text_offsets[end_piece] : stop])
        if before is None or after is None:
            return None
        inner = self._prompt[self._id_offsets[first_piece] : self._id_offsets[end_piece]]
        return before + inner + after
