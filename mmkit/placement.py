"""Placement: the layouts of a request's items in its prompt.

mmkit places items in their order, or refuses the request. It recognises a layout that already
stands in the prompt and leaves it as it is, so an expanded prompt is not expanded again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

from .errors import InputError
from .layout import Placeholder, as_text
from .updates import AlreadyExpanded, Insert, Replace, Target, Update

Reading: TypeAlias = Literal["layouts", "targets", "either"]
READINGS: tuple[Reading, ...] = ("layouts", "targets", "either")
"""The readings of a prompt, in the order in which they are tried: the prompt holds every layout
already; every item has a target or an anchor; the caller expanded some items and not others."""

_STEP = 256
"""The least part of a prompt that one step searches for several alternatives."""

_FEW = 32
"""The most ids that are sought one by one."""

EMPTY: Mapping[Any, Any] = MappingProxyType({})


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

    @property
    def sought(self) -> tuple[int, ...]:
        """The ids that stand for the item in a prompt that is not expanded yet."""
        return self.target if isinstance(self.update, Replace) else tuple(self.placeholder.ids)


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
    def sought(self) -> dict[Reading, list[Sought]]:
        """The ids that stand for the item, by the reading of the prompt."""
        return {reading: [one for one in self._sought(reading) if one.text] for reading in READINGS}

    def _sought(self, reading: Reading) -> Iterator[Sought]:
        for one in self:
            if reading != "targets" or isinstance(one.update, AlreadyExpanded):
                yield Sought(one.placeholder.text, one, is_layout=True)
            if reading != "layouts" and isinstance(one.update, Replace):
                yield Sought(as_text(one.target), one, is_layout=False)


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


class NotFound(InputError):
    """An item's target is not in the prompt."""


def place(
    prompt: list[int],
    items: Items,
    where: str,
    reserved: Mapping[Target, str] = EMPTY,
    readings: tuple[Reading, ...] = READINGS,
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

    Returns:
        The new prompt and one placement per item, in prompt order.

    Raises:
        NotFound: an item's target is not in the prompt.
        InputError: a target or a placeholder id is left over, also one of `reserved`.
    """
    text = as_text(prompt)
    if readings == READINGS and not _may_be_expanded(text, items):
        readings = readings[1:]
    refusals: list[Callable[[], NoReturn]] = []
    for reading in readings:
        try:
            return _Pass(prompt, text, items, where, reserved, reading).run()
        except _Unfit as unfit:
            if reading != "either":
                refusals.append(unfit.refuse)
    refusals[-1]()


def _may_be_expanded(text: str, items: Items) -> bool:
    """Whether a prompt holds a layout of the first item of each modality."""
    return all(
        any(one.placeholder.text in text for one in alternatives)
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


def in_other_ids(items: Items, change: Callable[[Placeholder], Placeholder]) -> Items:
    """Items with their layouts and targets in other ids."""

    def changed(one: Alternative) -> Alternative:
        target = change(Placeholder(list(one.target), bytes(len(one.target))))
        return Alternative(one.update, tuple(target.ids), change(one.placeholder))

    known = {
        id(own): Alternatives(map(changed, own))
        for of_modality in items.values()
        for own in of_modality
    }
    return {name: [known[id(own)] for own in of_modality] for name, of_modality in items.items()}


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

    def in_text(placeholder: Placeholder) -> Placeholder:
        ids = characters(placeholder.ids)
        return Placeholder(ids, bytes(len(ids)))

    texts = in_other_ids(items, in_text)
    reserved_texts = {tuple(characters(target)): name for target, name in reserved.items()}
    written, _ = place(characters(prompt), texts, where, reserved_texts, ("targets",))
    ids: list[int] = tok.text(as_text(written))
    return ids


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
        stands: whether they are the layout itself.
    """

    begin: int
    end: int
    one: Alternative
    stands: bool = False


_Item: TypeAlias = tuple[_Match, str, int]
"""A match, and the modality and the index of its item."""


@dataclass
class _Pass:
    """One attempt to place all items, under one reading of the prompt."""

    prompt: list[int]
    text: str
    items: Items
    where: str
    reserved: Mapping[Target, str]
    reading: Reading

    def run(self) -> tuple[list[int], list[Placement]]:
        rest: list[slice] = []
        ids: list[int] = []
        placements: list[Placement] = []
        position = 0
        for match, modality, index in self._matches():
            if match.begin < position:  # an anchor inside a target that another layout replaces
                raise _Unfit(self._not_found, modality, index)
            rest.append(slice(position, match.begin))
            position = match.end
            ids += self.prompt[rest[-1]]
            placeholder = match.one.placeholder
            placements.append(Placement(modality, index, len(ids), placeholder))
            ids += placeholder.ids
        rest.append(slice(position, None))
        ids += self.prompt[position:]
        self._check_leftovers(rest)
        return ids, placements

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
            if match.stands:
                self._check_alone(modality, match, nearest)
            yield match, modality, searching[modality]
            cursor = match.end
            searching[modality] += 1
            if searching[modality] == len(self.items[modality]):
                del searching[modality]

    def _check_alone(self, modality: str, match: _Match, others: Mapping[str, _Match]) -> None:
        """Refuse a layout that may be that of an item of another modality."""
        for other, its in others.items():
            if its.begin == match.begin and its.stands:
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
        sought = alternatives.sought[self.reading]
        if len(sought) == 1:
            return self._first(sought[0], cursor, len(self.text))
        # in steps that grow: no item looks to the end of the prompt for what is not there
        begin, step = cursor, max((_STEP, *(len(one.text) for one in sought)))
        while sought and begin < len(self.text):
            end = begin + step
            matches = [self._first(one, begin, end) for one in sought]
            if known := [match for match in matches if match is not None]:
                return min(known, key=lambda match: match.begin)  # the first of equals
            begin, step = end, 2 * step
        return None

    def _first(self, sought: Sought, begin: int, end: int) -> _Match | None:
        """The first match of some ids that begins in a part of the prompt."""
        text, one, is_layout = sought
        at = self.text.find(text, begin, end + len(text) - 1)
        return None if at < 0 else _Match(at, at + len(text), one, is_layout)

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
