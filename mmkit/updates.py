"""Prompt updates: how layouts get into the prompt.

`replace` puts a layout in place of a target, `insert` puts it at an anchor, `in_place` says that the caller writes the
layouts. In all three a layout that already stands in the prompt is recognised and left as it is, so an expanded prompt
is not expanded again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TypeAlias

from .errors import InputError, SpecError
from .expr import Expr, Scope, Value
from .layout import Laid, Layout, layout, nothing


@dataclass(frozen=True)
class Anchor:
    """A place in the prompt: its start, its end, or right after a prefix."""

    kind: Literal["start", "end", "after"]
    prefix: Layout = nothing

    def __repr__(self) -> str:
        return f"{self.kind}({self.prefix!r})" if self.kind == "after" else f"{self.kind}()"


@dataclass(frozen=True)
class Update:
    """One way to bring an item's layout into the prompt; make it with `replace`, `insert` or `in_place`.

    Attributes:
        kind: `replace`, `in_place`, or that of the anchor.
        target: what is replaced, or the prefix of the anchor.
    """

    kind: Literal["replace", "in_place", "start", "end", "after"]
    target: Layout = nothing

    def bind(self, scope: Scope) -> Update:
        """This update with everything that depends on `cfg`, `proc` and `tok` alone evaluated."""
        return Update(self.kind, self.target.bind(scope))

    def leaves(self) -> frozenset[Expr]:
        """Everything that the target depends on."""
        return self.target.leaves()

    def resolve(self, scope: Scope) -> tuple[str, tuple[int, ...]]:
        """The kind and the ids of the target, in the scope of one item."""
        return self.kind, tuple(self.target.lay(scope).ids)

    def __repr__(self) -> str:
        match self.kind:
            case "replace":
                return f"replace({self.target!r})"
            case "in_place":
                return "in_place()"
        return f"insert({Anchor(self.kind, self.target)!r})"


def replace(target: Value) -> Update:
    """The layout takes the place of `target`: one occurrence per item, in their order.

    Args:
        target: one token (``tok["<image>"]``), a text (``tok("<image>")``), ids, or an expression over `item.index` for
            numbered targets (``tok[fmt("<|image_{}|>", item.index + 1)]``).

    Raises:
        SpecError: a bare string, which could mean one token or a text.
    """
    return Update("replace", layout(target))


def insert(anchor: Anchor) -> Update:
    """The layouts are inserted, in the order of the items; the caller writes nothing for them.

    Args:
        anchor: `start()`, `after(prefix)` or `end()`.

    Raises:
        SpecError: anything else.
    """
    if not isinstance(anchor, Anchor):
        raise SpecError("insert()", "start(), after(prefix) or end()", repr(anchor))
    return Update(anchor.kind, anchor.prefix)


def in_place() -> Update:
    """The caller writes the layouts into the prompt; they are found, counted and checked, never expanded."""
    return Update("in_place")


def start() -> Anchor:
    """Before the first token of the prompt."""
    return Anchor("start")


def end() -> Anchor:
    """After the last token of the prompt."""
    return Anchor("end")


def after(prefix: Value) -> Anchor:
    """Right after a prefix, with which the prompt must start.

    Args:
        prefix: one token (``tok["<s>"]``), a text (``tok("...")``) or ids.
    """
    return Anchor("after", layout(prefix))


@dataclass(frozen=True, slots=True)
class Resolved:
    """One way to place one item: the kind and ids of its target, and the layout that it brings."""

    kind: str
    target: tuple[int, ...]
    laid: Laid

    @property
    def spelled(self) -> Sequence[int]:
        """What a caller writes into the prompt for the item: nothing where it is inserted."""
        return {"replace": self.target, "in_place": self.laid.ids}.get(self.kind, ())


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


Target: TypeAlias = tuple[int, ...]
"""The ids that stand for an item in a prompt that is not expanded yet."""

EMPTY: Mapping[Any, Any] = MappingProxyType({})


class NotFound(InputError):
    """An item's target is not in the prompt."""


Items: TypeAlias = Mapping[str, Sequence[Sequence[Resolved]]]
"""Per modality and item, the alternatives, in order of preference."""

Reading: TypeAlias = Literal["layouts", "targets", "either"]
_READINGS: tuple[Reading, ...] = ("layouts", "targets", "either")
"""How a prompt may be read, in this order: it holds every layout already; every item has a target or an anchor; the
caller expanded some items and not others."""


def place(
    prompt: list[int], items: Items, where: str, surplus: Mapping[Target, str] = EMPTY
) -> tuple[list[int], list[Placement]]:
    """Bring the layouts of all items into a prompt, from left to right, under the first reading that fits.

    The items of a modality are placed in order. Where targets of several modalities match at the same place, the
    modality that comes first in `items` goes first, as in vLLM. `prompt` is not changed.

    Args:
        prompt: token ids.
        items: per modality and item, the alternatives, in order of preference.
        where: names the spec in errors.
        surplus: ids that stand for items and for nothing else, each with its modality: none of them may be left over.

    Returns:
        The new prompt and one placement per item, in prompt order.

    Raises:
        NotFound: an item's target is not in the prompt.
        InputError: a target or a placeholder id is left over, also one of `surplus`.
    """
    why: dict[Reading, Callable[[], NoReturn]] = {}
    for reading in _READINGS:
        if reading == "layouts" and not _holds_layouts(prompt, items):
            continue
        try:
            return _Pass(prompt, items, where, surplus, reading).run()
        except _Unfit as unfit:
            why[reading] = unfit.refuse
    why["targets"]()


def _holds_layouts(prompt: list[int], items: Items) -> bool:
    """Whether a layout of the first item of every modality stands in a prompt."""
    firsts = [alternatives[0] for alternatives in items.values() if alternatives]
    return all(any(find(prompt, way.laid.ids, 0) is not None for way in first) for first in firsts)


class _Unfit(Exception):
    """A reading of a prompt that does not fit. What is wrong takes time to say, and the next reading may fit."""

    def __init__(self, refuse: Callable[..., NoReturn], *args: Any) -> None:
        self.refuse = partial(refuse, *args)


_Match: TypeAlias = tuple[int, int, str, int, int]
"""Begin and end of what a layout takes the place of, modality, item, and alternative."""


class _Pass:
    """One attempt to place all items, under one reading of the prompt."""

    def __init__(
        self, prompt: list[int], items: Items, where: str, surplus: Mapping[Target, str], reading: Reading
    ) -> None:
        self.prompt, self.items, self.where, self.surplus, self.reading = prompt, items, where, surplus, reading

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
        return begin, self.items[modality][index][way].kind == "end"

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
            if way.kind in ("replace", "in_place"):
                continue
            if way.kind == "end":
                return len(self.prompt), number
            prefix = list(way.target)
            if self.prompt[: len(prefix)] == prefix:
                return len(prefix), number
        return None

    def _search(self, ways: Sequence[Resolved], cursor: int) -> tuple[int, int, int] | None:
        """The first match at or after the cursor: begin, end, alternative."""
        best: tuple[int, int, int] | None = None
        for number, way in enumerate(ways):
            targets: list[Sequence[int]] = []
            if self.reading != "targets" or way.kind == "in_place":
                targets.append(way.laid.ids)
            if self.reading != "layouts" and way.kind == "replace":
                targets.append(way.target)
            for target in targets:
                begin = find(self.prompt, target, cursor)
                if begin is not None and (best is None or begin < best[0]):
                    best = begin, begin + len(target), number
        return best

    def _check_leftovers(self, rest: list[list[int]]) -> None:
        embeds: dict[str, frozenset[int]] = {}
        targets: dict[str, set[Target]] = {}
        for modality, items in self.items.items():
            ways = {id(way): way for alternatives in items for way in alternatives}.values()  # few differ
            embeds[modality] = own = frozenset().union(*{way.laid.embed_ids for way in ways})
            targets[modality] = {way.target for way in ways if way.kind == "replace" and own.isdisjoint(way.target)}
        begins = {target[0] for found in (*targets.values(), self.surplus) for target in found}
        if all(map(begins.union(*embeds.values()).isdisjoint, rest)):
            return
        for modality in self.items:
            if not all(map(embeds[modality].isdisjoint, rest)) or _found(targets[modality], rest):
                raise _Unfit(self._wrong_count, modality, InputError)
        if found := _found(self.surplus, rest):
            raise _Unfit(_surplus, found, self.surplus, self.where)

    def _not_found(self, modality: str, index: int) -> NoReturn:
        ways, where = self.items[modality], f"{self.where}.{modality}"
        way = ways[index][0]
        if way.kind == "after":
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
        stray = sum(map(self.prompt.count, way.laid.embed_ids))
        if way.kind not in ("replace", "in_place"):
            remedy = "Leave them out: the items' placeholders are inserted."
            raise error(where, "a prompt without placeholder ids", f"{stray} of them", remedy)
        target, count, cursor = _sought(way), 0, 0
        while (begin := find(self.prompt, target, cursor)) is not None:
            count, cursor = count + 1, begin + len(target)
        expected = f"{n} placeholder(s) {_brief(target)} in the prompt for {n} item{'s' if n != 1 else ''}"
        got = f"{count}, and {stray} placeholder id(s) in all"
        raise error(where, expected, got, "Write one placeholder per item, and nothing else with its id.")


def refuse_surplus(prompt: Sequence[int], surplus: Mapping[Target, str], where: str) -> None:
    """Refuse a prompt in which something stands for an item that the request does not have; see `place`.

    Raises:
        InputError: names the modality.
    """
    if surplus and (found := _found(surplus, [list(prompt)])):
        _surplus(found, surplus, where)


def _found(targets: Collection[Target], rest: list[list[int]]) -> Target | None:
    """One of some targets that stands in what is left of a prompt."""
    first = {target[0] for target in targets}
    left = set().union(*map(first.intersection, rest)) if first else first
    begun = [target for target in targets if target[0] in left]
    return next((target for target in begun for ids in rest if find(ids, target, 0) is not None), None)


def _surplus(target: Target, surplus: Mapping[Target, str], where: str) -> NoReturn:
    got = f"the placeholder {_brief(target)} without its item"
    remedy = "Send the item, or leave the placeholder out."
    raise InputError(f"{where}.{surplus[target]}", "one item per placeholder", got, remedy)


def _sought(way: Resolved) -> tuple[int, ...]:
    """The ids that stand for an item in a prompt that is not expanded yet."""
    return way.target if way.kind == "replace" else tuple(way.laid.ids)


def find(prompt: list[int], target: Sequence[int], begin: int) -> int | None:
    """Where `target` first stands in `prompt`, at or after `begin`; None if it does not. An empty target stands
    nowhere.
    """
    if not target:
        return None
    wanted, first, last = list(target), target[0], len(prompt) - len(target) + 1
    while begin < last:
        try:
            begin = prompt.index(first, begin, last)
        except ValueError:
            return None
        if prompt[begin : begin + len(wanted)] == wanted:
            return begin
        begin += 1
    return None


def _brief(ids: Sequence[Any]) -> str:
    ids = list(ids)
    if len(ids) > 1 and len(set(ids)) == 1:
        return f"[{ids[0]}] * {len(ids)}"
    return str(ids) if len(ids) <= 8 else f"[{', '.join(map(str, ids[:4]))}, ... {len(ids)} ids]"
