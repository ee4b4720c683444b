"""Placement: the layouts of a request's items in its prompt.

mmkit places items in their order, or refuses the request. It recognises a layout that already
stands in the prompt and leaves it as it is, so an expanded prompt is not expanded again.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

from ..errors import InputError
from ..language.layout import Insert, Placeholder, Replace, Target, Update, as_text
from ..language.vocabulary import Vocabulary

Reading: TypeAlias = Literal["layouts", "targets", "either"]
READINGS: tuple[Reading, ...] = ("layouts", "targets", "either")
"""The readings of a prompt, in the order in which they are tried: the prompt holds every layout
already; every item has a target or an anchor; the caller expanded some items and not others."""

EMPTY: Mapping[Any, Any] = MappingProxyType({})


class ResolvedUpdate(NamedTuple):
    """One alternative of `update` for one item.

    Attributes:
        update: the declaration.
        target: the ids of its target.
    """

    update: Update
    target: Target


@dataclass(frozen=True, eq=False)
class ItemLayout:
    """The layout of one item, and the ways in which it may get into a prompt. Items of one geometry
    share them, and what a search for them needs is computed once.

    Attributes:
        tokens: the evaluated layout.
        updates: in order of preference.
    """

    tokens: Placeholder
    updates: Sequence[ResolvedUpdate]

    def for_index(self, index: int) -> ItemLayout:
        """Those of the item at another position among the items of its modality."""
        return self

    @cached_property
    def caller_ids(self) -> list[Target]:
        """The ids that a caller writes into the prompt for the item, for each way: none where mmkit
        inserts the layout."""
        return [tuple(update.written(target, self.tokens)) for update, target in self.updates]

    @property
    def unexpanded_ids(self) -> Target:
        """The ids that stand for the item in a prompt that is not expanded yet, by the first
        way."""
        return self.caller_ids[0] or tuple(self.tokens.ids)

    @cached_property
    def targets(self) -> list[str]:
        """The targets that the layout replaces, as texts.

        See `mmkit.language.layout.as_text`.
        """
        return [as_text(target) for update, target in self.updates if isinstance(update, Replace)]

    @cached_property
    def leftovers(self) -> frozenset[str]:
        """The texts of which none may be left over in a prompt: targets, and each placeholder
        id."""
        return frozenset([*self.targets, *map(chr, self.tokens.embed_ids)])

    @cached_property
    def sought(self) -> dict[Reading, list[str]]:
        """The texts that stand for the item, by the reading of the prompt."""
        layouts = [self.tokens.text] if self.tokens.ids else []
        written = [as_text(ids) for ids in self.caller_ids if ids]
        return {"layouts": layouts, "targets": written, "either": [*layouts, *self.targets]}


LayoutsByModality: TypeAlias = Mapping[str, Sequence[ItemLayout]]
"""The alternatives by modality and item."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of an item's layout in a prompt.

    Attributes:
        modality: name of the item's modality.
        index: the item's position among those of its modality.
        start: offset of the layout's first token in the new prompt.
        tokens: the layout as it stands in the prompt.
    """

    modality: str
    index: int
    start: int
    tokens: Placeholder = field(repr=False)

    @property
    def end(self) -> int:
        """Offset after the layout's last token."""
        return self.start + len(self.tokens)


class PlacedPrompt(NamedTuple):
    """A prompt with the layouts of its items in it.

    Attributes:
        token_ids: the prompt.
        placements: the place of each item's layout, in prompt order.
    """

    token_ids: list[int]
    placements: list[Placement]


class NotFound(InputError):
    """An item's target is not in the prompt."""


def place(
    prompt: list[int],
    items: LayoutsByModality,
    where: str,
    reserved: Mapping[Target, str] = EMPTY,
    readings: Sequence[Reading] = READINGS,
    tok: Vocabulary | None = None,
) -> PlacedPrompt:
    """Bring the layouts of all items into a prompt, from left to right, under the first reading
    that fits.

    The items of a modality are placed in order. Where targets of several modalities match at the
    same place, the modality that comes first in `items` goes first, as in vLLM. `prompt` is not
    changed. Under one reading, the prompt is searched once for all items that share their ids.

    Args:
        prompt: token ids.
        items: per modality and item, the alternatives, in order of preference.
        where: names the spec in errors.
        reserved: targets that stand for items and for nothing else, each with its modality: none
            may be left over.
        readings: the readings to try; the error is that of the last reading other than "either",
            unless there is no other.
        tok: the vocabulary, in whose words errors name tokens; None names their ids.

    Raises:
        NotFound: an item's target is not in the prompt.
        InputError: a target or a placeholder id is left over, also one of `reserved`; a layout may
            be that of an item of either of two modalities; or a target stands inside a layout of
            another modality.
    """
    search = _Search(prompt, as_text(prompt), items, where, reserved, tok)
    firsts = (own[0].tokens.text for own in items.values() if own)
    if not all(first in search.text for first in firsts):  # nearly always, and told at once
        readings = readings[1:] or readings
    refusal: _Misfit | None = None
    for reading in readings:
        try:
            return search.run(reading)
        except _Misfit as misfit:
            if reading != "either" or refusal is None:
                refusal = misfit
    assert refusal is not None
    make_error, *parts = refusal.args
    raise make_error(*parts)


def find_text_targets(
    items: LayoutsByModality, reserved: Mapping[Target, str] = EMPTY
) -> set[Target]:
    """The targets of several tokens, as texts have: inside a prompt the tokenizer may split the
    text otherwise."""
    targets = {target for target in reserved if len(target) > 1}
    for alternatives in {*chain(*items.values())}:
        for update, target in alternatives.updates:
            if isinstance(update, Replace) and len(target) > 1:
                targets.add(target)
    return targets


def restore_text_targets(
    prompt: list[int], targets: Collection[Target], tok: Vocabulary
) -> list[int]:
    """A prompt in which targets that are texts have their own ids, also where the tokenizer has
    split them otherwise.

    What a tokenizer makes of a text depends on what stands before and after it: Llama 2's begins
    ``<graph>`` with a space where it stands alone and not in ``a.<graph>``, and GPT-2's may have
    ``.<`` as one token. No id outside a target changes, but for a token across its edge: the part
    outside is encoded again.

    Args:
        prompt: token ids; not changed.
        targets: their ids, as the tokenizer makes them of the texts alone.
        tok: the vocabulary.
    """
    target_of = {tok.text_of_target(target): target for target in targets}
    simple, in_ids = tok.simple_text(prompt), as_text(prompt)
    if simple is not None and all(
        simple.count(text) == in_ids.count(as_text(target)) for text, target in target_of.items()
    ):  # nearly always, and told at once
        return prompt
    sought = sorted(filter(str.strip, target_of), key=len, reverse=True)  # the longest of equals
    pieces = tok.pieces(prompt)
    text = "".join(piece for piece, _ in pieces)
    found = [*re.finditer("|".join(map(re.escape, sought)), text)] if sought else []
    if not found:
        return prompt
    # of each piece, where it begins in the text and in the ids
    begins = [0, *accumulate(len(piece) for piece, _ in pieces)]
    offsets = [0, *accumulate(count for _, count in pieces)]
    exact = _occurrences(prompt, targets)
    ids: list[int] = []
    end = 0  # in the text, of the target before
    for match in found:
        first = bisect_right(begins, match.start()) - 1
        last = bisect_left(begins, match.end())
        if any(a < offsets[last] and offsets[first] < b for a, b in exact):
            continue
        outside = _between(end, match.start(), text, prompt, begins, offsets, tok)
        if outside is not None:
            ids += [*outside, *target_of[match[0]]]
            end = match.end()
    rest = _between(end, len(text), text, prompt, begins, offsets, tok)
    return prompt if rest is None else [*ids, *rest]


def _occurrences(prompt: list[int], targets: Collection[Target]) -> list[tuple[int, int]]:
    """Where targets stand with their own ids: offsets of the first id, and after the last one."""
    text = as_text(prompt)
    found: list[tuple[int, int]] = []
    for target in targets:
        sought = as_text(target)
        begin = text.find(sought)
        while begin >= 0:
            found.append((begin, begin + len(target)))
            begin = text.find(sought, begin + len(target))
    return found


def _between(
    start: int,
    stop: int,
    text: str,
    prompt: list[int],
    begins: list[int],
    offsets: list[int],
    tok: Vocabulary,
) -> list[int] | None:
    """The ids of a part of a prompt's text: those of the prompt, and where a token reaches across
    an edge, those of its text inside. None where no ids have that text inside another one.

    Args:
        start: where the part begins in the text.
        stop: where it ends.
        text: that of the prompt.
        prompt: the ids of the whole prompt.
        begins: of each piece of the prompt, where it begins in `text`, and the end of the text.
        offsets: of each piece, where it begins in `prompt`, and the end of the prompt.
        tok: the vocabulary.
    """
    first = bisect_left(begins, start)
    last = bisect_right(begins, stop) - 1
    if first > last:  # inside one token
        return tok.inside(text[start:stop])
    before = tok.inside(text[start : begins[first]])
    after = tok.inside(text[begins[last] : stop])
    if before is None or after is None:
        return None
    return [*before, *prompt[offsets[first] : offsets[last]], *after]


class _Misfit(Exception):
    """A reading of a prompt that does not fit, with what makes the refusal where none does, and its
    arguments."""


_TAKEN = chr(sys.maxunicode)
"""What stands for an item in the rest of a prompt: the one character that is no id."""


class _Taken(NamedTuple):
    """What stands for an item in a prompt: its modality, its number, and positions."""

    modality: str
    number: int
    start: int
    stop: int


@dataclass
class _Search:
    """A search for all items in a prompt."""

    prompt: list[int]
    text: str
    items: LayoutsByModality
    where: str
    reserved: Mapping[Target, str]
    tok: Vocabulary | None

    def run(self, reading: Reading) -> PlacedPrompt:
        """The items placed from left to right, under one reading of the prompt."""
        ids: list[int] = []
        taken: list[_Taken] = []
        placements: list[Placement] = []
        rest: list[str] = []
        cursor = 0
        known: dict[str, int] = {}
        waiting = {name: 0 for name, own in self.items.items() if own}
        while waiting:
            spans = {
                name: self._span(name, index, reading, cursor, known)
                for name, index in waiting.items()
            }
            modality, *others = spans
            if others:
                modality = self._first(spans, waiting)
            index, span = waiting[modality], spans[modality]
            placeholder = self.items[modality][index].tokens
            rest.append(self.text[cursor : span.start])
            ids += self.prompt[cursor : span.start]
            placements.append(Placement(modality, index, len(ids), placeholder))
            taken.append(_Taken(modality, index, span.start, span.stop))
            ids += placeholder.ids
            cursor = span.stop
            waiting[modality] += 1
            if waiting[modality] == len(self.items[modality]):
                del waiting[modality]
        rest.append(self.text[cursor:])
        ids += self.prompt[cursor:]
        self._check_leftovers(_TAKEN.join(rest))
        self._check_layouts(taken)
        return PlacedPrompt(ids, placements)

    def _span(
        self, modality: str, index: int, reading: Reading, cursor: int, known: dict[str, int]
    ) -> range:
        """The positions that stand for an item, the first at or after the cursor: those of a
        target, or of the layout itself, or none at an anchor. Of equals, the preferred ones.
        `known` has where the texts that were sought stand next; after the prompt for none."""
        own = self.items[modality][index]
        if reading == "targets":
            for update, target in own.updates:
                if (at := update.anchor(self.prompt, target)) is not None:
                    if at < cursor:  # inside a target that another layout replaces
                        raise _Misfit(self._not_found, modality, index)
                    return range(at, at)
        nearest, begin = "", len(self.text)
        for text in own.sought[reading]:
            place = known.get(text, -1)
            if place < cursor:
                place = self.text.find(text, cursor)
                known[text] = place = len(self.text) if place < 0 else place
            if place < begin:
                nearest, begin = text, place
        if not nearest:
            raise _Misfit(self._not_found, modality, index)
        return range(begin, begin + len(nearest))

    def _first(self, spans: Mapping[str, range], waiting: Mapping[str, int]) -> str:
        """The modality whose item is next. Refuses a layout that may be that of an item of
        another."""
        # the first of equals, but an anchor before the ids that begin there
        first = min(spans, key=lambda name: (spans[name].start, bool(spans[name])))
        standing = []
        for name, span in spans.items():
            if span and span.start == spans[first].start:
                layout = self.items[name][waiting[name]].tokens.text
                if self.text[span.start : span.stop] == layout:
                    standing.append(name)
        if first in standing and len(standing) > 1:
            where = ", ".join(f"{self.where}.{name}" for name in standing[:2])
            shared = self.items[standing[0]][waiting[standing[0]]].tokens
            got = f"the layout {self._brief(shared.ids)}, which either has"
            remedy = "Send the prompt before it is expanded, or no item of the other."
            raise InputError(where, "a prompt that tells their items apart", got, remedy)
        return first

    def _check_leftovers(self, rest: str) -> None:
        """Refuse what stands for an item in the part of the prompt that no item took."""
        begins = {text[0] for own in {*chain(*self.items.values())} for text in own.leftovers}
        begins.update(chr(target[0]) for target in self.reserved)
        if not any(begin in rest for begin in begins):  # each a search in C
            return
        for modality, items in self.items.items():
            if any(text in rest for own in {*items} for text in own.leftovers):
                raise _Misfit(self._wrong_count, modality, InputError)
        for target in self.reserved:
            if as_text(target) in rest:
                raise _Misfit(self._without_item, target)

    def _check_layouts(self, taken: Sequence[_Taken]) -> None:
        """Refuse a target inside a layout of another modality that stands in the prompt, whose
        other ids would be left as text: the caller has written that item twice, or this one in no
        place of its own."""
        if len({one.modality for one in taken}) < 2:
            return
        covered: list[int] | None = None
        for name, items in self.items.items():
            targets = [one for one in taken if one.modality != name and self._is_target(one)]
            texts = {self.text[one.start : one.stop] for one in targets}
            for layout in {alternatives.tokens.text for alternatives in {*items}}:
                if not any(text in layout for text in texts):  # nearly always
                    continue
                covered = covered or self._covered(taken)
                self._check_layout(name, layout, targets, covered)

    def _is_target(self, one: _Taken) -> bool:
        """Whether a target stands for the item, and no layout."""
        text = self.text[one.start : one.stop]
        return bool(text) and text in self.items[one.modality][one.number].targets

    def _check_layout(
        self, modality: str, layout: str, targets: Sequence[_Taken], covered: Sequence[int]
    ) -> None:
        """Refuse those targets that stand inside a layout of a modality."""
        starts = [one.start for one in targets]
        begin = self.text.find(layout)
        while begin >= 0:
            end = begin + len(layout)
            number = bisect_left(starts, begin)
            is_inside = number < len(targets) and targets[number].stop <= end
            if is_inside and covered[end] - covered[begin] < len(layout):
                raise self._inside(targets[number], modality, layout)
            begin = self.text.find(layout, begin + 1)

    def _covered(self, taken: Sequence[_Taken]) -> list[int]:
        """For each position of the prompt, and its end, how many before it stand for items."""
        stand = bytearray(len(self.text))
        for one in taken:
            stand[one.start : one.stop] = b"\1" * (one.stop - one.start)
        return [*accumulate(stand, initial=0)]

    def _inside(self, one: _Taken, modality: str, layout: str) -> InputError:
        target = self._brief(self.prompt[one.start : one.stop])
        where, expected = f"{self.where}.{one.modality}[{one.number}]", "a target outside layouts"
        got = f"{target} inside {self._brief([*map(ord, layout)])}, a layout of {modality}"
        remedy = "Write one target per item, or send the prompt in which every layout stands."
        return InputError(where, expected, got, remedy)

    def _without_item(self, target: Target) -> InputError:
        got = f"the target {self._brief(target)} without its item"
        remedy = "Send the item, or leave the target out."
        where = f"{self.where}.{self.reserved[target]}"
        return InputError(where, "one item per target", got, remedy)

    def _not_found(self, modality: str, index: int) -> InputError:
        items, where = self.items[modality], f"{self.where}.{modality}"
        update, target = items[index].updates[0]
        if isinstance(update, Insert):  # only a prefix may be missing
            got = f"one that starts with {self._brief(self.prompt[: len(target)])}"
            expected = f"a prompt that starts with {self._brief(target)}"
            return NotFound(where, expected, got)
        # item-numbered targets, or layouts of several lengths that the caller writes
        if len({own.unexpanded_ids for own in items}) > 1:
            sought, word = self._brief(items[index].unexpanded_ids), _word(update)
            expected = f"the {word} {sought} in the prompt, after those of the items before it"
            remedy = f"Write one {word} per item, in order."
            return NotFound(f"{where}[{index}]", expected, "none", remedy)
        return self._wrong_count(modality, NotFound)

    def _wrong_count(self, modality: str, error: type[InputError]) -> InputError:
        items, where = self.items[modality], f"{self.where}.{modality}"
        layout, update = items[0].tokens, items[0].updates[0].update
        sought, embeds = items[0].unexpanded_ids, layout.embed_ids
        stray = sum(token in embeds for token in self.prompt)
        if isinstance(update, Insert):
            remedy = "Leave them out: mmkit inserts the layouts of the items."
            got = self._placeholders(stray, embeds)
            return error(where, "a prompt without placeholders", got, remedy)
        count, word = self.text.count(as_text(sought)), _word(update)
        written, sent = _counted(len(items), word), _counted(len(items), "item")
        expected = f"{written} {self._brief(sought)} in the prompt for {sent}"
        stray -= count * sum(token in embeds for token in sought)
        got = f"{count}" + (f", and {self._placeholders(stray, embeds)} beside" if stray else "")
        remedy = f"Write one {word} per item, and nothing else with its tokens."
        if stray and word == "target":
            whole = self._brief(layout.ids)
            remedy = f"Write one target per item, or its whole layout, {whole}."
        return error(where, expected, got, remedy)

    def _placeholders(self, count: int, embeds: Collection[int]) -> str:
        """A number of placeholders, with the first that stands in the prompt."""
        token = next((token for token in self.prompt if token in embeds), None)
        spelled = "" if token is None else f" {self._brief([token])}"
        return f"{_counted(count, 'placeholder')}{spelled}"

    def _brief(self, ids: Sequence[int]) -> str:
        return brief(ids, self.tok)


def _word(update: Update) -> str:
    """What a caller writes for an item."""
    return "target" if isinstance(update, Replace) else "layout"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def brief(ids: Sequence[int], tok: Vocabulary | None = None) -> str:
    """Ids for a message, as their text where there is a vocabulary that has one for them."""
    ids = list(ids)
    if len(ids) > 1 and len(set(ids)) == 1:
        return f"{brief(ids[:1], tok)} * {len(ids)}"
    shown = ids if len(ids) <= 8 else ids[:4]
    text = tok.text_of_target(shown).strip(" ") if tok is not None else ""
    if text.strip():
        return repr(text) if shown is ids else f"{text!r}... of {len(ids)} tokens"
    return str(ids) if shown is ids else f"[{', '.join(map(str, shown))}, ... {len(ids)} ids]"
