"""Placement: the layouts of a request's items in its prompt.

mmkit places items in their order, or refuses the request. It recognises a layout that already
stands in the prompt and leaves it as it is, so an expanded prompt is not expanded again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

from .errors import InputError
from .layout import Placeholder, as_text
from .runs import Runs
from .updates import AlreadyExpanded, Insert, Replace, Target, Update


@dataclass(frozen=True)
class Alternative:
    """One alternative of `update` for one item.

    Attributes:
        update: the declaration.
        target: the ids of its target.
        placeholder: the evaluated layout.
    """

    update: Update
    target: Target
    placeholder: Placeholder

    @property
    def written(self) -> Sequence[int]:
        """The ids that a caller writes into the prompt for the item: none where mmkit inserts the
        layout."""
        return self.update.written(self.target, self.placeholder)

    @cached_property
    def target_text(self) -> str:
        """The ids of the target as a string."""
        return as_text(self.target)

    @property
    def sought(self) -> tuple[int, ...]:
        """The ids that stand for the item in a prompt that is not expanded yet."""
        return self.target if isinstance(self.update, Replace) else tuple(self.placeholder.ids)


class Alternatives(tuple[Alternative, ...]):
    """The alternatives of one item, in order of preference. Items of one geometry share them, and
    what a search for them needs is computed once.

    Attributes:
        positions_checked: whether the declared positions of an item were compared with its layout.
    """

    positions_checked = False

    @cached_property
    def begins(self) -> frozenset[int]:
        """The ids of which none may be left over in a prompt: those with which targets begin, and
        placeholder ids."""
        targets = {one.target[0] for one in self if isinstance(one.update, Replace)}
        return frozenset(targets).union(*(one.placeholder.embed_ids for one in self))

    @cached_property
    def _known(self) -> dict[Any, list[Sought]]:
        return {}

    def sought(self, reading: Reading, runs: Runs) -> list[Sought]:
        """The ids that stand for the item under a reading of the prompt."""
        key = reading, runs
        if key not in self._known:
            self._known[key] = [one for one in self._sought(reading, runs) if one.text]
        return self._known[key]

    def _sought(self, reading: Reading, runs: Runs) -> Iterator[Sought]:
        for one in self:
            if reading != "targets" or isinstance(one.update, AlreadyExpanded):
                yield Sought(runs.core(one.placeholder), one, is_layout=True)
            if reading != "layouts" and isinstance(one.update, Replace):
                yield Sought(one.target_text, one, is_layout=False)


class Sought(NamedTuple):
    """Ids that are searched in a prompt.

    Attributes:
        text: the ids as a string.
        one: the alternative that they stand for.
        is_layout: whether they are its layout, and not its target.
    """

    text: str
    one: Alternative
    is_layout: bool


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of an item's layout in a prompt.

    Attributes:
        modality: name of the item's modality.
        index: the item's position among those of its modality.
        start: offset of the layout's first token in the new prompt.
        placeholder: the layout as it stands in the prompt, with the tokens that merged at its
            edges.
    """

    modality: str
    index: int
    start: int
    placeholder: Placeholder = field(repr=False)

    @property
    def end(self) -> int:
        """Offset after the layout's last token."""
        return self.start + len(self.placeholder)


_STEP = 256
"""The least part of a prompt that one step searches for several alternatives."""

_FEW = 32
"""The most ids that are sought one by one."""

EMPTY: Mapping[Any, Any] = MappingProxyType({})
NO_RUNS = Runs()


class NotFound(InputError):
    """An item's target is not in the prompt."""


Items: TypeAlias = Mapping[str, Sequence[Alternatives]]
"""The alternatives by modality and item."""

Reading: TypeAlias = Literal["layouts", "targets", "either"]
READINGS: tuple[Reading, ...] = ("layouts", "targets", "either")
"""The readings of a prompt, in the order in which they are tried: the prompt holds every layout
already; every item has a target or an anchor; the caller expanded some items and not others."""


def place(
    prompt: list[int],
    items: Items,
    where: str,
    reserved: Mapping[Target, str] = EMPTY,
    readings: tuple[Reading, ...] = READINGS,
    runs: Runs = NO_RUNS,
) -> tuple[list[int], list[Placement]]:
    """Bring the layouts of all items into a prompt, from left to right, under the first reading
    that fits.

    The items of a modality are placed in order. Where targets of several modalities match at the
    same place, the modality that comes first in `items` goes first, as in vLLM. `prompt` is not
    changed. The time grows with the sum of the lengths of the prompt and of the ids that are
    sought, not with their product.

    Args:
        prompt: token ids.
        items: per modality and item, the alternatives, in order of preference.
        where: names the spec in errors.
        reserved: targets that stand for items and for nothing else, each with its modality: none
            may be left over.
        readings: the readings to try; the error is that of the last reading other than "either".
        runs: the tokens that merge where a layout meets the prompt.

    Returns:
        The new prompt and one placement per item, in prompt order.

    Raises:
        NotFound: an item's target is not in the prompt.
        InputError: a target or a placeholder id is left over, also one of `reserved`.
    """
    text = as_text(prompt)
    if readings == READINGS and not _may_be_expanded(text, items, runs):
        readings = readings[1:]
    refusals: list[Callable[[], NoReturn]] = []
    for reading in readings:
        try:
            return _Pass(prompt, text, items, where, reserved, reading, runs).run()
        except _Unfit as unfit:
            if reading != "either":
                refusals.append(unfit.refuse)
    refusals[-1]()


def _may_be_expanded(text: str, items: Items, runs: Runs) -> bool:
    """Whether a prompt holds a layout of the first item of each modality."""
    return all(
        any(runs.core(one.placeholder) in text for one in alternatives)
        for of_modality in items.values()
        for alternatives in of_modality[:1]
    )


def may_be_split(items: Items) -> bool:
    """Whether a target has several tokens, as texts have: inside a prompt the tokenizer may split
    the text otherwise."""
    known = (one for of_modality in items.values() for one in _distinct(of_modality))
    return any(isinstance(one.update, Replace) and len(one.target) > 1 for one in known)


def _distinct(items: Sequence[Alternatives]) -> list[Alternative]:
    """The alternatives of some items, each once: most items share them."""
    known = {id(alternatives): alternatives for alternatives in items}
    return [one for alternatives in known.values() for one in alternatives]


def place_in_text(
    prompt: list[int],
    items: Items,
    where: str,
    reserved: Mapping[Target, str],
    tok: Any,
    runs: Runs = NO_RUNS,
) -> tuple[list[int], list[Placement]]:
    """`place` for targets that are texts, which the tokenizer may have split otherwise inside the
    prompt. The targets are sought in the prompt's text, and the text is tokenized again with the
    layouts in it, as in vLLM.

    Args:
        prompt: as for `place`, as are `items`, `where`, `reserved` and `runs`.
        tok: the `Vocabulary`.

    Raises:
        InputError: as for `place`; or the tokenizer makes other ids of a layout inside the text.
    """
    characters = cache(lambda ids: tuple(map(ord, tok.decode(list(ids)))))

    def in_text(one: Alternative) -> Alternative:
        ids = characters(tuple(one.placeholder.ids))
        return Alternative(
            one.update, characters(one.target), Placeholder(list(ids), bytes(len(ids)))
        )

    known = {
        id(one): in_text(one) for of_modality in items.values() for one in _distinct(of_modality)
    }
    texts = {
        name: [Alternatives(known[id(one)] for one in own) for own in of_modality]
        for name, of_modality in items.items()
    }
    reserved_texts = {characters(target): name for target, name in reserved.items()}
    written, _ = place(list(characters(tuple(prompt))), texts, where, reserved_texts, ("targets",))
    return place(tok.text(as_text(written)), items, where, reserved, ("layouts",), runs)


class _Unfit(Exception):
    """A reading of a prompt that does not fit. Its message is built only where no reading fits."""

    def __init__(self, refuse: Callable[..., NoReturn], *args: Any) -> None:
        self.refuse = partial(refuse, *args)


class _Match(NamedTuple):
    """The ids of a prompt that stand for an item: a target, an anchor, or the layout itself.

    Attributes:
        begin: offset of the first id.
        end: offset after the last id.
        one: the alternative.
        standing: the layout as it stands in the prompt; None where it does not.
    """

    begin: int
    end: int
    one: Alternative
    standing: Placeholder | None = None


_Item: TypeAlias = tuple[_Match, str, int]
"""A match, and the modality and the index of its item."""


@dataclass
class _Writing:
    """The new prompt, as far as it is written.

    A token that merged at the edge of a layout belongs to the layout; a token that merged between
    two layouts belongs to the first.
    """

    runs: Runs
    ids: list[int] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    new: bool = False

    def text(self, ids: list[int]) -> None:
        """Write a part of the caller's prompt."""
        if not ids:
            return
        merged = self.runs.merged(self.ids[-1], ids[0]) if self.new else None
        if merged is not None:
            self._end(merged)
        self.ids += ids if merged is None else ids[1:]
        self.new = False

    def layout(self, match: _Match, modality: str, index: int) -> None:
        """Write the layout of an item."""
        placeholder = match.standing or match.one.placeholder
        self.new = match.standing is None and bool(placeholder.ids)
        merged = None
        if self.new and self.ids:
            merged = self.runs.merged(self.ids[-1], placeholder.ids[0])
        if merged is not None:
            placeholder = self._begin(merged, placeholder)
        self.placements.append(Placement(modality, index, len(self.ids), placeholder))
        self.ids += placeholder.ids

    def _begin(self, merged: int, placeholder: Placeholder) -> Placeholder:
        """The layout without its first token, where that token merged with another layout's; or
        with the token that the first one merged to."""
        rest = placeholder.ids[1:]
        if self.placements and self.placements[-1].end == len(self.ids):
            self._end(merged)
            return placeholder.standing(rest)
        self.ids.pop()
        return placeholder.standing([merged, *rest])

    def _end(self, merged: int) -> None:
        """Replace the last token of the layout that was written last by the token that it merged
        to."""
        self.ids[-1] = merged
        last = self.placements.pop()
        placeholder = last.placeholder.standing([*last.placeholder.ids[:-1], merged])
        self.placements.append(replace(last, placeholder=placeholder))


@dataclass
class _Pass:
    """One attempt to place all items, under one reading of the prompt."""

    prompt: list[int]
    text: str
    items: Items
    where: str
    reserved: Mapping[Target, str]
    reading: Reading
    runs: Runs

    def run(self) -> tuple[list[int], list[Placement]]:
        matches = self._matches()
        rest: list[slice] = []
        position = 0
        for match, modality, index in matches:
            if match.begin < position:  # an anchor inside a target that another layout replaces
                raise _Unfit(self._not_found, modality, index)
            rest.append(slice(position, match.begin))
            position = match.end
        rest.append(slice(position, len(self.prompt)))
        self._check_leftovers(rest)
        if all(match.standing is not None for match, *_ in matches):
            at = [
                Placement(modality, index, match.begin, match.standing)
                for match, modality, index in matches
                if match.standing is not None
            ]
            return self.prompt.copy(), at
        written = _Writing(self.runs)
        for part, (match, modality, index) in zip(rest, matches, strict=False):
            written.text(self.prompt[part])
            written.layout(match, modality, index)
        written.text(self.prompt[rest[-1]])
        return written.ids, written.placements

    def _matches(self) -> list[_Item]:
        """The matches of all items, from left to right."""
        anchored: list[_Item] = []
        searching: dict[str, int] = {}
        for modality, items in self.items.items():
            for index, alternatives in enumerate(items):
                anchor = self._anchored(alternatives)
                if anchor is None:
                    searching[modality] = index
                    break
                anchored.append((anchor, modality, index))
        searched = [*self._searched(searching)] if searching else []
        return sorted(anchored + searched, key=self._order) if anchored else searched

    def _order(self, item: _Item) -> tuple[int, bool]:
        """By offset; a layout that is inserted at the end comes last in an empty prompt, too."""
        match, *_ = item
        update = match.one.update
        return match.begin, isinstance(update, Insert) and update.at == "end"

    def _searched(self, searching: dict[str, int]) -> Iterator[_Item]:
        """The matches of the items of some modalities, from left to right. `searching` has the
        index of the first item of each."""
        cursor = 0
        nearest: dict[str, _Match] = {}
        while searching:
            for modality, index in searching.items():
                if modality not in nearest or nearest[modality].begin < cursor:
                    match = self._search(self.items[modality][index], cursor)
                    if match is None:
                        raise _Unfit(self._not_found, modality, index)
                    nearest[modality] = match
            modality = next(iter(nearest))
            if len(nearest) > 1:  # the first of equals
                modality = min(searching, key=lambda m: nearest[m].begin)
            match = nearest.pop(modality)
            if match.standing is not None:
                self._check_alone(modality, match, nearest)
            yield match, modality, searching[modality]
            cursor = match.end
            searching[modality] += 1
            if searching[modality] == len(self.items[modality]):
                del searching[modality]

    def _check_alone(self, modality: str, match: _Match, others: Mapping[str, _Match]) -> None:
        """Refuse a layout that may be that of an item of another modality."""
        for other, its in others.items():
            if its.begin == match.begin and its.standing is not None:
                where = f"{self.where}.{modality}, {self.where}.{other}"
                got = "placeholder ids that are those of an item of either"
                remedy = "Send the prompt before it is expanded, or no item of the other."
                raise InputError(where, "a prompt that tells their items apart", got, remedy)

    def _anchored(self, alternatives: Alternatives) -> _Match | None:
        if self.reading != "targets":
            return None
        for one in alternatives:
            if (anchor := one.update.anchor(self.prompt, one.target)) is not None:
                return _Match(anchor, anchor, one)
        return None

    def _search(self, alternatives: Alternatives, cursor: int) -> _Match | None:
        """The first match at or after the cursor."""
        sought = alternatives.sought(self.reading, self.runs)
        if len(sought) == 1:
            return self._first(*sought[0], cursor, cursor, len(self.text))
        # in steps that grow: no item looks to the end of the prompt for what is not there
        begin, step = cursor, max((_STEP, *(len(text) for text, *_ in sought)))
        while sought and begin < len(self.text):
            end = begin + step
            matches = [self._first(*part, cursor, begin, end) for part in sought]
            if known := [match for match in matches if match is not None]:
                return min(known, key=lambda match: match.begin)  # the first of equals
            begin, step = end, 2 * step
        return None

    def _first(
        self, text: str, one: Alternative, layout: bool, cursor: int, begin: int, end: int
    ) -> _Match | None:
        """The first match of some ids that begins in a part of the prompt."""
        last = end + len(text) - 1
        while (at := self.text.find(text, begin, last)) >= 0:
            if not layout:
                return _Match(at, at + len(text), one)
            standing = self.runs.around(self.prompt, at, cursor, one.placeholder)
            if standing is not None:
                start, placeholder = standing
                return _Match(start, start + len(placeholder), one, placeholder)
            begin = at + 1
        return None

    def _check_leftovers(self, parts: list[slice]) -> None:
        begins = {target[0] for target in self.reserved}
        for items in self.items.values():
            begins.update(*{id(own): own.begins for own in items}.values())
        if _holds("".join([self.text[part] for part in parts]), begins):
            self._refuse_leftovers([self.prompt[part] for part in parts])

    def _refuse_leftovers(self, rest: list[list[int]]) -> None:
        embeds: dict[str, frozenset[int]] = {}
        targets: dict[str, set[Target]] = {}
        for modality, items in self.items.items():
            distinct = _distinct(items)
            own = frozenset().union(*{one.placeholder.embed_ids for one in distinct})
            replaced = {one.target for one in distinct if isinstance(one.update, Replace)}
            embeds[modality] = own
            targets[modality] = {target for target in replaced if own.isdisjoint(target)}
        for modality in self.items:
            stray = not all(map(embeds[modality].isdisjoint, rest))
            if stray or _first_of(targets[modality], rest):
                raise _Unfit(self._wrong_count, modality, InputError)
        if target := _first_of(self.reserved, rest):
            raise _Unfit(_refuse, target, self.reserved, self.where)

    def _not_found(self, modality: str, index: int) -> NoReturn:
        items, where = self.items[modality], f"{self.where}.{modality}"
        one = items[index][0]
        if isinstance(one.update, Insert):  # only a prefix may be missing
            got = f"one that starts with {_brief(self.prompt[: len(one.target)])}"
            raise NotFound(where, f"a prompt that starts with {_brief(one.target)}", got)
        # item-numbered targets, or layouts of several lengths that the caller writes
        if len({first.sought for first, *_ in items}) > 1:
            sought = _brief(one.sought)
            expected = f"the placeholder {sought} in the prompt, after those of the items before it"
            remedy = "Write one placeholder per item, in order."
            raise NotFound(f"{where}[{index}]", expected, "none", remedy)
        self._wrong_count(modality, NotFound)

    def _wrong_count(self, modality: str, error: type[InputError]) -> NoReturn:
        items, where = self.items[modality], f"{self.where}.{modality}"
        one, n = items[0][0], len(items)
        stray = sum(token in one.placeholder.embed_ids for token in self.prompt)
        if isinstance(one.update, Insert):
            remedy = "Leave them out: the items' placeholders are inserted."
            raise error(where, "a prompt without placeholder ids", f"{stray} of them", remedy)
        count = self.text.count(as_text(one.sought))
        items_sent = f"{n} item{'s' if n != 1 else ''}"
        expected = f"{n} placeholder(s) {_brief(one.sought)} in the prompt for {items_sent}"
        stray -= count * sum(token in one.placeholder.embed_ids for token in one.sought)
        got = f"{count}" + (f", and {stray} placeholder id(s) beside" if stray else "")
        remedy = "Write one placeholder per item, and nothing else with its id."
        raise error(where, expected, got, remedy)


def refuse_reserved(prompt: Sequence[int], reserved: Mapping[Target, str], where: str) -> None:
    """Refuse a prompt with a reserved target whose item the request lacks; see `place`.

    Raises:
        InputError: names the modality.
    """
    if reserved and (target := _first_of(reserved, [list(prompt)])):
        _refuse(target, reserved, where)


def _holds(text: str, ids: Collection[int]) -> bool:
    """Whether ids as a string contain one of some ids."""
    if len(ids) > _FEW:
        return not {*map(chr, ids)}.isdisjoint(text)
    return any(chr(token) in text for token in ids)  # each a search in C


def _first_of(targets: Collection[Target], rest: list[list[int]]) -> Target | None:
    """The first of some targets in the rest of a prompt."""
    known, lengths = set(targets), {*map(len, targets)}
    first = {target[0] for target in targets}
    for ids in rest:
        if first.isdisjoint(ids):
            continue
        for begin in [place for place, token in enumerate(ids) if token in first]:
            for length in lengths:
                if (target := tuple(ids[begin : begin + length])) in known:
                    return target
    return None


def _refuse(target: Target, reserved: Mapping[Target, str], where: str) -> NoReturn:
    got = f"the placeholder {_brief(target)} without its item"
    remedy = "Send the item, or leave the placeholder out."
    raise InputError(f"{where}.{reserved[target]}", "one item per placeholder", got, remedy)


def _brief(ids: Sequence[Any]) -> str:
    ids = list(ids)
    if len(ids) > 1 and len(set(ids)) == 1:
        return f"[{ids[0]}] * {len(ids)}"
    return str(ids) if len(ids) <= 8 else f"[{', '.join(map(str, ids[:4]))}, ... {len(ids)} ids]"
