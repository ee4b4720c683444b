"""Prompt updates: how layouts get into the prompt.

`replace` puts a layout in place of a target, `insert` puts it at an end of the prompt or after a prefix,
`already_expanded` says that the caller writes the layouts. In all three a layout that already stands in the prompt is
recognised and left as it is, so an expanded prompt is not expanded again. Items are placed in their order, or not at
all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Literal, NoReturn, Self, TypeAlias

from .errors import InputError, SpecError
from .expr import Leaf, Scope, Structural
from .layout import Laid, Layout, LayoutLike, as_text, layout, nothing, source


@dataclass(frozen=True, eq=False)
class Update(Structural):
    """One way to bring an item's layout into the prompt: `Replace`, `Insert` or `AlreadyExpanded`."""

    target: Layout = nothing

    def bind(self, scope: Scope) -> Self:
        """This update with everything that depends on `cfg`, `proc` and `tok` alone evaluated."""
        return dataclasses.replace(self, target=self.target.bind(scope))

    def leaves(self) -> frozenset[Leaf]:
        """Everything that the target depends on."""
        return self.target.leaves()

    def resolve(self, scope: Scope) -> Target:
        """The ids of the target, in the scope of one item."""
        return tuple(self.target.lay(scope).ids)

    def written(self, target: Target, laid: Laid) -> Sequence[int]:
        """What a caller writes into the prompt for an item."""
        return ()

    def anchor(self, prompt: Sequence[int], target: Target) -> int | None:
        """Where in the prompt the layout is inserted; None where nothing is."""
        return None


class Replace(Update):
    """The layout takes the place of the target."""

    def written(self, target: Target, laid: Laid) -> Sequence[int]:
        return target

    def __repr__(self) -> str:
        return f"replace({source(self.target)})"


class AlreadyExpanded(Update):
    """The caller writes the layout."""

    def written(self, target: Target, laid: Laid) -> Sequence[int]:
        return laid.ids

    def __repr__(self) -> str:
        return "already_expanded()"


@dataclass(frozen=True, eq=False, repr=False)
class Insert(Update):
    """The layout is inserted at an end of the prompt, or after a prefix, which is the target."""

    at: Literal["start", "end", "after"] = "start"

    def anchor(self, prompt: Sequence[int], target: Target) -> int | None:
        if self.at == "end":
            return len(prompt)
        return len(target) if tuple(prompt[: len(target)]) == target else None

    def __repr__(self) -> str:
        return f"insert(after={source(self.target)})" if self.at == "after" else f"insert(at={self.at!r})"


def replace(target: LayoutLike) -> Update:
    """The layout takes the place of `target`: one occurrence per item, in their order.

    Args:
        target: one token (``tok["<image>"]``), a text (``tok.text("<image>")``), ids, or an expression over
            `item.index` for numbered targets (``tok["<|image_{}|>", item.index + 1]``).

    Raises:
        SpecError: a bare string, which could mean one token or a text.
    """
    return Replace(layout(target))


def insert(*, at: Literal["start", "end"] | None = None, after: LayoutLike | None = None) -> Update:
    """The layouts are inserted, in the order of the items; the caller writes nothing for them.

    Args:
        at: before the first token of the prompt, or after the last.
        after: a prefix, right after which they stand and with which the prompt must start: one token
            (``tok["<s>"]``), a text (``tok.text("...")``) or ids.

    Raises:
        SpecError: neither or both.
    """
    if (at is None) == (after is None) or at not in (None, "start", "end"):
        got = ", ".join(f"{name}={value!r}" for name, value in (("at", at), ("after", after)) if value is not None)
        raise SpecError("insert()", 'at="start", at="end" or after=a prefix', got or "nothing")
    return Insert(at=at) if at else Insert(layout(after), "after")  # type: ignore[arg-type]


def already_expanded() -> Update:
    """The caller writes the layouts into the prompt; they are found, counted and checked, never expanded."""
    return AlreadyExpanded()


Target: TypeAlias = tuple[int, ...]
"""The ids that stand for an item in a prompt that is not expanded yet."""


@dataclass(frozen=True, eq=False)
class EndingWith(Structural):
    """What every prompt ends with."""

    ids: Layout

    def bind(self, scope: Scope) -> EndingWith:
        """This end with everything that depends on `cfg`, `proc` and `tok` alone evaluated."""
        return EndingWith(self.ids.bind(scope))

    def leaves(self) -> frozenset[Leaf]:
        """Everything that the ids depend on."""
        return self.ids.leaves()

    def __repr__(self) -> str:
        return f"ending_with({source(self.ids)})"


def ending_with(ids: LayoutLike) -> EndingWith:
    """Every prompt ends with some ids, as ``tok["<sep>"]``: they are appended where they do not stand there already.

    Raises:
        SpecError: a bare string, which could mean one token or a text.
    """
    return EndingWith(layout(ids))


@dataclass(frozen=True, slots=True)
class Resolved:
    """One way to place one item: the update, the ids of its target, and the layout that it brings."""

    update: Update
    target: Target
    laid: Laid

    @property
    def spelled(self) -> Sequence[int]:
        """What a caller writes into the prompt for the item: nothing where it is inserted."""
        return self.update.written(self.target, self.laid)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an item's layout stands.

    Attributes:
        modality: its name.
        index: the item's position among those of its modality.
        start: offset of the layout's first token in the new prompt.
        way: index of the alternative of `update` that was used.
    """

    modality: str
    index: int
    start: int
    way: int


EMPTY: Mapping[Any, Any] = MappingProxyType({})


class NotFound(InputError):
    """An item's target is not in the prompt."""


Items: TypeAlias = Mapping[str, Sequence[Sequence[Resolved]]]
"""Per modality and item, the alternatives, in order of preference."""

Reading: TypeAlias = Literal["layouts", "targets", "either"]
READINGS: tuple[Reading, ...] = ("layouts", "targets", "either")
"""How a prompt may be read, in this order: it holds every layout already; every item has a target or an anchor; the
caller expanded some items and not others."""


def place(
    prompt: list[int],
    items: Items,
    where: str,
    surplus: Mapping[Target, str] = EMPTY,
    readings: tuple[Reading, ...] = READINGS,
) -> tuple[list[int], list[Placement]]:
    """Bring the layouts of all items into a prompt, from left to right, under the first reading that fits.

    The items of a modality are placed in order. Where targets of several modalities match at the same place, the
    modality that comes first in `items` goes first, as in vLLM. `prompt` is not changed. The time grows with the
    lengths of the prompt and of what is sought, and not with their product.

    Args:
        prompt: token ids.
        items: per modality and item, the alternatives, in order of preference.
        where: names the spec in errors.
        surplus: ids that stand for items and for nothing else, each with its modality: none of them may be left over.
        readings: those to try; errors are of the last but "either".

    Returns:
        The new prompt and one placement per item, in prompt order.

    Raises:
        NotFound: an item's target is not in the prompt.
        InputError: a target or a placeholder id is left over, also one of `surplus`.
    """
    text = as_text(prompt)
    refusals: list[Callable[[], NoReturn]] = []
    for reading in readings:
        try:
            return _Pass(prompt, text, items, where, surplus, reading).run()
        except _Unfit as unfit:
            if reading != "either":
                refusals.append(unfit.refuse)
    refusals[-1]()


def may_be_split(items: Items) -> bool:
    """Whether some target has several tokens, as texts have, which may be others inside a prompt."""
    ways = {id(way): way for alternatives in items.values() for item in alternatives for way in item}
    return any(isinstance(way.update, Replace) and len(way.target) > 1 for way in ways.values())


def place_in_text(
    prompt: list[int], items: Items, where: str, surplus: Mapping[Target, str], tok: Any
) -> tuple[list[int], list[Placement]]:
    """The same for targets that are texts, which the tokenizer may have split otherwise where they stand in a prompt:
    they are sought in its text, which is tokenized again with the layouts in it, as in vLLM.

    Args:
        prompt: as for `place`, as are `items`, `where` and `surplus`.
        tok: the `Vocabulary`.

    Raises:
        InputError: as for `place`; or a layout is no longer itself when it is tokenized inside the text.
    """
    spelled = cache(lambda ids: tuple(map(ord, tok.decode(list(ids)))))

    def in_text(way: Resolved) -> Resolved:
        characters = spelled(tuple(way.laid.ids))
        return Resolved(way.update, spelled(way.target), Laid(list(characters), bytes(len(characters))))

    known = {id(way): in_text(way) for ways in items.values() for alternatives in ways for way in alternatives}
    texts = {name: [[known[id(way)] for way in alternatives] for alternatives in ways] for name, ways in items.items()}
    left = {spelled(target): name for target, name in surplus.items()}
    written, _ = place(list(spelled(tuple(prompt))), texts, where, left, ("targets",))
    return place(tok.text(as_text(written)), items, where, surplus, ("layouts",))


class _Unfit(Exception):
    """A reading of a prompt that does not fit. What is wrong takes time to say, and the next reading may fit."""

    def __init__(self, refuse: Callable[..., NoReturn], *args: Any) -> None:
        self.refuse = partial(refuse, *args)


_Match: TypeAlias = tuple[int, int, str, int, int]
"""Begin and end of what a layout takes the place of, modality, item, and alternative."""


class _Pass:
    """One attempt to place all items, under one reading of the prompt."""

    def __init__(
        self, prompt: list[int], text: str, items: Items, where: str, surplus: Mapping[Target, str], reading: Reading
    ) -> None:
        self.prompt, self.text, self.items = prompt, text, items
        self.where, self.surplus, self.reading = where, surplus, reading

    def run(self) -> tuple[list[int], list[Placement]]:
        ids: list[int] = []
        placements: list[Placement] = []
        rest: list[list[int]] = []
        position = 0
        for begin, stop, modality, index, way in self._matches():
            if begin < position:  # an anchor inside a target that another layout replaces
                raise _Unfit(self._not_found, modality, index)
            rest.append(self.prompt[position:begin])
            ids += rest[-1]
            placements.append(Placement(modality, index, len(ids), way))
            ids += self.items[modality][index][way].laid.ids
            position = stop
        rest.append(self.prompt[position:])
        self._check_leftovers(rest)
        return ids + rest[-1], placements

    def _matches(self) -> list[_Match]:
        """What the layouts take the place of, from left to right."""
        anchored: list[_Match] = []
        searching: dict[str, int] = {}
        for modality, ways in self.items.items():
            for index, alternatives in enumerate(ways):
                anchor = self._anchored(alternatives)
                if anchor is None:
                    searching[modality] = index
                    break
                anchored.append((anchor[0], anchor[0], modality, index, anchor[1]))
        found = [*self._searched(searching)] if searching else []
        return sorted(anchored + found, key=self._order) if anchored else found

    def _order(self, match: _Match) -> tuple[int, bool]:
        """What is inserted at the end stays there in an empty prompt too."""
        begin, _, modality, index, way = match
        update = self.items[modality][index][way].update
        return begin, isinstance(update, Insert) and update.at == "end"

    def _searched(self, searching: dict[str, int]) -> Iterator[_Match]:
        """The matches of the items of some modalities, each from the one that `searching` says, from left to right."""
        cursor = 0
        found: dict[str, tuple[int, int, int]] = {}
        while searching:
            for modality, index in searching.items():
                if modality not in found or found[modality][0] < cursor:
                    match = self._search(self.items[modality][index], cursor)
                    if match is None:
                        raise _Unfit(self._not_found, modality, index)
                    found[modality] = match
            modality = min(searching, key=lambda m: found[m][0])  # min keeps the first of equals
            begin, cursor, way = found.pop(modality)
            yield begin, cursor, modality, searching[modality], way
            searching[modality] += 1
            if searching[modality] == len(self.items[modality]):
                del searching[modality]

    def _anchored(self, ways: Sequence[Resolved]) -> tuple[int, int] | None:
        if self.reading != "targets":
            return None
        for number, way in enumerate(ways):
            if (anchor := way.update.anchor(self.prompt, way.target)) is not None:
                return anchor, number
        return None

    def _search(self, ways: Sequence[Resolved], cursor: int) -> tuple[int, int, int] | None:
        """The first match at or after the cursor: begin, end, alternative."""
        sought: list[tuple[str, int]] = []
        for number, way in enumerate(ways):
            if self.reading != "targets" or isinstance(way.update, AlreadyExpanded):
                sought.append((way.laid.text, number))
            if self.reading != "layouts" and isinstance(way.update, Replace):
                sought.append((as_text(way.target), number))
        sought = [(text, number) for text, number in sought if text]
        # in steps that grow, so that no item looks to the end of the prompt for the alternative that is not there
        begin, step = cursor, max((len(text) for text, _ in sought), default=0)
        while sought and begin < len(self.text):
            end = begin + step
            places = [self.text.find(text, begin, end + len(text) - 1) for text, _ in sought]
            if matches := [(at, n) for n, at in enumerate(places) if at >= 0]:
                at, n = min(matches)
                text, number = sought[n]
                return at, at + len(text), number
            begin, step = end, 2 * step
        return None

    def _check_leftovers(self, rest: list[list[int]]) -> None:
        embeds: dict[str, frozenset[int]] = {}
        targets: dict[str, set[Target]] = {}
        for modality, items in self.items.items():
            ways = {id(way): way for alternatives in items for way in alternatives}.values()  # few differ
            embeds[modality] = own = frozenset().union(*{way.laid.embed_ids for way in ways})
            targets[modality] = {
                way.target for way in ways if isinstance(way.update, Replace) and own.isdisjoint(way.target)
            }
        begins = {target[0] for found in (*targets.values(), self.surplus) for target in found}
        if all(map(begins.union(*embeds.values()).isdisjoint, rest)):
            return
        for modality in self.items:
            if not all(map(embeds[modality].isdisjoint, rest)) or _standing(targets[modality], rest):
                raise _Unfit(self._wrong_count, modality, InputError)
        if target := _standing(self.surplus, rest):
            raise _Unfit(_surplus, target, self.surplus, self.where)

    def _not_found(self, modality: str, index: int) -> NoReturn:
        ways, where = self.items[modality], f"{self.where}.{modality}"
        way = ways[index][0]
        if isinstance(way.update, Insert):  # only a prefix may be missing
            got = f"one that starts with {_brief(self.prompt[: len(way.target)])}"
            raise NotFound(where, f"a prompt that starts with {_brief(way.target)}", got)
        # item-numbered targets, or layouts of several lengths in place
        if len({_sought(first) for first, *_ in ways}) > 1:
            expected = f"the placeholder {_brief(_sought(way))} in the prompt, after those of the items before it"
            raise NotFound(f"{where}[{index}]", expected, "none", "Write one placeholder per item, in order.")
        self._wrong_count(modality, NotFound)

    def _wrong_count(self, modality: str, error: type[InputError]) -> NoReturn:
        ways, where = self.items[modality], f"{self.where}.{modality}"
        way, n = ways[0][0], len(ways)
        stray = sum(token in way.laid.embed_ids for token in self.prompt)
        if isinstance(way.update, Insert):
            remedy = "Leave them out: the items' placeholders are inserted."
            raise error(where, "a prompt without placeholder ids", f"{stray} of them", remedy)
        target = _sought(way)
        count = self.text.count(as_text(target))
        expected = f"{n} placeholder(s) {_brief(target)} in the prompt for {n} item{'s' if n != 1 else ''}"
        stray -= count * sum(token in way.laid.embed_ids for token in target)
        got = f"{count}" + (f", and {stray} placeholder id(s) beside" if stray else "")
        raise error(where, expected, got, "Write one placeholder per item, and nothing else with its id.")


def refuse_surplus(prompt: Sequence[int], surplus: Mapping[Target, str], where: str) -> None:
    """Refuse a prompt in which something stands for an item that the request does not have; see `place`.

    Raises:
        InputError: names the modality.
    """
    if surplus and (target := _standing(surplus, [list(prompt)])):
        _surplus(target, surplus, where)


def _standing(targets: Collection[Target], rest: list[list[int]]) -> Target | None:
    """One of some targets that stands in what is left of a prompt."""
    known, first, lengths = set(targets), {target[0] for target in targets}, {*map(len, targets)}
    for ids in rest:
        if first.isdisjoint(ids):
            continue
        for begin in [place for place, token in enumerate(ids) if token in first]:
            for length in lengths:
                if (target := tuple(ids[begin : begin + length])) in known:
                    return target
    return None


def _surplus(target: Target, surplus: Mapping[Target, str], where: str) -> NoReturn:
    got = f"the placeholder {_brief(target)} without its item"
    remedy = "Send the item, or leave the placeholder out."
    raise InputError(f"{where}.{surplus[target]}", "one item per placeholder", got, remedy)


def _sought(way: Resolved) -> tuple[int, ...]:
    """The ids that stand for an item in a prompt that is not expanded yet."""
    return way.target if isinstance(way.update, Replace) else tuple(way.laid.ids)


def _brief(ids: Sequence[Any]) -> str:
    ids = list(ids)
    if len(ids) > 1 and len(set(ids)) == 1:
        return f"[{ids[0]}] * {len(ids)}"
    return str(ids) if len(ids) <= 8 else f"[{', '.join(map(str, ids[:4]))}, ... {len(ids)} ids]"
