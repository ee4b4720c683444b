"""Placement: the layouts of a request's items in its prompt.

mmkit places items in their order, or refuses the request. It recognises a layout that already
stands in the prompt and leaves it as it is, so an expanded prompt is not expanded again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, compress, groupby, repeat
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

from .errors import InputError, SpecError
from .layout import Insert, Placeholder, Replace, Target, Update, as_text
from .vocabulary import Vocabulary

Reading: TypeAlias = Literal["layouts", "targets", "either"]
READINGS: tuple[Reading, ...] = ("layouts", "targets", "either")
"""The readings of a prompt, in the order in which they are tried: the prompt holds every layout
already; every item has a target or an anchor; the caller expanded some items and not others."""

EMPTY: Mapping[Any, Any] = MappingProxyType({})


class Way(NamedTuple):
    """One alternative of `update` for one item.

    Attributes:
        update: the declaration.
        target: the ids of its target.
    """

    update: Update
    target: Target


@dataclass(frozen=True, eq=False)
class Alternatives:
    """The layout of one item, and the ways in which it may get into a prompt. Items of one geometry
    share them, and what a search for them needs is computed once.

    Attributes:
        placeholder: the evaluated layout.
        ways: in order of preference.
    """

    placeholder: Placeholder
    ways: Sequence[Way]

    def at(self, index: int) -> Alternatives:
        """Those of the item at another position among the items of its modality."""
        return self

    @cached_property
    def written(self) -> list[Target]:
        """The ids that a caller writes into the prompt for the item, for each way: none where mmkit
        inserts the layout."""
        return [tuple(update.written(target, self.placeholder)) for update, target in self.ways]

    @property
    def first_sought(self) -> Target:
        """The ids that stand for the item in a prompt that is not expanded yet, by the first
        way."""
        return self.written[0] or tuple(self.placeholder.ids)

    @cached_property
    def targets(self) -> list[str]:
        """The targets of which the layout takes the place, as texts; see `mmkit.layout.as_text`."""
        return [as_text(target) for update, target in self.ways if isinstance(update, Replace)]

    @cached_property
    def leftovers(self) -> frozenset[str]:
        """The texts of which none may be left over in a prompt: targets, and each placeholder
        id."""
        return frozenset([*self.targets, *map(chr, self.placeholder.embed_ids)])

    @cached_property
    def sought(self) -> dict[Reading, list[str]]:
        """The texts that stand for the item, by the reading of the prompt."""
        layouts = [self.placeholder.text] if self.placeholder.ids else []
        written = [as_text(ids) for ids in self.written if ids]
        return {"layouts": layouts, "targets": written, "either": [*layouts, *self.targets]}


Items: TypeAlias = Mapping[str, Sequence[Alternatives]]
"""The alternatives by modality and item."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of an item's layout in a prompt.

    Attributes:
        modality: name of the item's modality.
        index: the item's position among those of its modality.
        start: offset of the layout's first token in the new prompt.
        placeholder: the layout as it stands in the prompt.
    """

    modality: str
    index: int
    start: int
    placeholder: Placeholder = field(repr=False)

    @property
    def end(self) -> int:
        """Offset after the layout's last token."""
        return self.start + len(self.placeholder)


Placed: TypeAlias = tuple[list[int], list[Placement]]
"""A prompt with layouts in it, and one placement per item, in prompt order."""


class NotFound(InputError):
    """An item's target is not in the prompt."""


def place(
    prompt: list[int],
    items: Items,
    where: str,
    reserved: Mapping[Target, str] = EMPTY,
    readings: Sequence[Reading] = READINGS,
) -> Placed:
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
        readings: the readings to try; the error is that of the last reading other than "either".

    Raises:
        NotFound: an item's target is not in the prompt.
        InputError: a target or a placeholder id is left over, also one of `reserved`.
    """
    search = _Search(prompt, as_text(prompt), items, where, reserved)
    firsts = (own[0].placeholder.text for own in items.values() if own)
    if not all(first in search.text for first in firsts):  # nearly always, and told at once
        readings = readings[1:] or readings
    for reading in readings:
        try:
            return search.run(reading)
        except _Misfit as misfit:
            if reading != "either":
                refuse, *told = misfit.args
    raise refuse(*told)


def may_be_split(items: Items) -> bool:
    """Whether a target has several tokens, as texts have: inside a prompt the tokenizer may split
    the text otherwise."""
    return any(len(text) > 1 for own in chain(*items.values()) for text in own.targets)


def in_other_ids(items: Items, change: Callable[[Sequence[int], bytes], Placeholder]) -> Items:
    """Items with their layouts and targets in other ids. `change` takes ids and their mask, which a
    target lacks."""

    def changed(own: Alternatives) -> Alternatives:
        ways = [Way(update, tuple(change(target, b"").ids)) for update, target in own.ways]
        return Alternatives(change(own.placeholder.ids, own.placeholder.mask), ways)

    known = {own: changed(own) for own in {*chain(*items.values())}}  # most items share theirs
    return {name: [known[own] for own in of_modality] for name, of_modality in items.items()}


def expanded_as_text(
    prompt: list[int], items: Items, where: str, reserved: Mapping[Target, str], tok: Any
) -> list[int]:
    """A prompt with the layouts in place of targets that are texts, which the tokenizer may have
    split otherwise inside the prompt. The targets are sought in the prompt's text, and the text is
    tokenized again with the layouts in it, as in vLLM.

    Args:
        prompt: as for `place`, as are `items`, `where` and `reserved`.
        tok: the `Vocabulary`.

    Raises:
        InputError: as for `place`.
    """

    def characters(ids: Sequence[int]) -> list[int]:
        return list(map(ord, tok.decode(list(ids))))

    texts = in_other_ids(items, lambda ids, _: Placeholder(characters(ids), b""))
    reserved_texts = {tuple(characters(target)): name for target, name in reserved.items()}
    written, _ = place(characters(prompt), texts, where, reserved_texts, ("targets",))
    # not by `text`, which keeps what it encodes
    return list(tok.tokenizer.encode(as_text(written), add_special_tokens=False))


class _Misfit(Exception):
    """A reading of a prompt that does not fit, with what makes the refusal where none does, and its
    arguments."""


_TAKEN = chr(sys.maxunicode)
"""What stands for an item in the rest of a prompt: the one character that is no id."""


@dataclass
class _Search:
    """A search for all items in a prompt."""

    prompt: list[int]
    text: str
    items: Items
    where: str
    reserved: Mapping[Target, str]

    def run(self, reading: Reading) -> Placed:
        """The items placed from left to right, under one reading of the prompt."""
        ids: list[int] = []
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
            placeholder = self.items[modality][index].placeholder
            rest.append(self.text[cursor : span.start])
            ids += self.prompt[cursor : span.start]
            placements.append(Placement(modality, index, len(ids), placeholder))
            ids += placeholder.ids
            cursor = span.stop
            waiting[modality] += 1
            if waiting[modality] == len(self.items[modality]):
                del waiting[modality]
        rest.append(self.text[cursor:])
        ids += self.prompt[cursor:]
        self._check_leftovers(_TAKEN.join(rest))
        return ids, placements

    def _span(
        self, modality: str, index: int, reading: Reading, cursor: int, known: dict[str, int]
    ) -> range:
        """The positions that stand for an item, the first at or after the cursor: those of a
        target, or of the layout itself, or none at an anchor. Of equals, the preferred ones.
        `known` has where the texts that were sought stand next; after the prompt for none."""
        own = self.items[modality][index]
        if reading == "targets":
            for update, target in own.ways:
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
                layout = self.items[name][waiting[name]].placeholder.text
                if self.text[span.start : span.stop] == layout:
                    standing.append(name)
        if first in standing and len(standing) > 1:
            where = ", ".join(f"{self.where}.{name}" for name in standing[:2])
            got = "placeholder ids that are those of an item of either"
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

    def _without_item(self, target: Target) -> InputError:
        got = f"the placeholder {_brief(target)} without its item"
        remedy = "Send the item, or leave the placeholder out."
        where = f"{self.where}.{self.reserved[target]}"
        return InputError(where, "one item per placeholder", got, remedy)

    def _not_found(self, modality: str, index: int) -> InputError:
        items, where = self.items[modality], f"{self.where}.{modality}"
        update, target = items[index].ways[0]
        if isinstance(update, Insert):  # only a prefix may be missing
            got = f"one that starts with {_brief(self.prompt[: len(target)])}"
            return NotFound(where, f"a prompt that starts with {_brief(target)}", got)
        # item-numbered targets, or layouts of several lengths that the caller writes
        if len({own.first_sought for own in items}) > 1:
            sought = _brief(items[index].first_sought)
            expected = f"the placeholder {sought} in the prompt, after those of the items before it"
            remedy = "Write one placeholder per item, in order."
            return NotFound(f"{where}[{index}]", expected, "none", remedy)
        return self._wrong_count(modality, NotFound)

    def _wrong_count(self, modality: str, error: type[InputError]) -> InputError:
        items, where = self.items[modality], f"{self.where}.{modality}"
        n, sought, embeds = len(items), items[0].first_sought, items[0].placeholder.embed_ids
        stray = sum(token in embeds for token in self.prompt)
        if isinstance(items[0].ways[0].update, Insert):
            remedy = "Leave them out: the items' placeholders are inserted."
            return error(where, "a prompt without placeholder ids", f"{stray} of them", remedy)
        count = self.text.count(as_text(sought))
        items_sent = f"{n} item{'s' if n != 1 else ''}"
        expected = f"{n} placeholder(s) {_brief(sought)} in the prompt for {items_sent}"
        stray -= count * sum(token in embeds for token in sought)
        got = f"{count}" + (f", and {stray} placeholder id(s) beside" if stray else "")
        remedy = "Write one placeholder per item, and nothing else with its id."
        return error(where, expected, got, remedy)


def _brief(ids: Sequence[Any]) -> str:
    ids = list(ids)
    if len(ids) > 1 and len(set(ids)) == 1:
        return f"[{ids[0]}] * {len(ids)}"
    return str(ids) if len(ids) <= 8 else f"[{', '.join(map(str, ids[:4]))}, ... {len(ids)} ids]"


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
        length_of = self._lengths.get
        runs = ([self.tokens[1]] * n if (n := length_of(token)) else [token] for token in ids)
        return [*chain.from_iterable(runs)]

    def placeholder(self, ids: Sequence[int], mask: bytes) -> Placeholder:
        """A layout, with one token for each character of a run."""
        lengths = [self._lengths.get(token, 1) for token in ids]
        return Placeholder(self.apart(ids), bytes(chain.from_iterable(map(repeat, mask, lengths))))

    def _run(self, length: int) -> list[int]:
        """The tokens of a run."""
        tokens = self._encoded(length)
        # the tokenizer may make others of a long one
        is_known = sum(self._lengths.get(token, 0) for token in tokens) == length
        return tokens if is_known else [self.tokens[1]] * length

    def joined(self, apart: list[int], placements: list[Placement]) -> Placed:
        """Ids with the tokens of runs in them, and where layouts stand there. A token that two
        layouts share belongs to the first."""
        if not self.tokens:
            return apart, placements
        ids: list[int] = []
        token_at: list[int] = []
        for one, same in groupby(apart):
            count = len([*same])
            for token in self._run(count) if one == self.tokens[1] else [one] * count:
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
