"""Independent, deliberately naive references: layouts token by token, and placement by scanning the prompt once.

Both are written from the documentation of mmkit, not from its code, and use plain lists and tuples only.

A layout is a tree: ``("token", v)``, ``("embed", v)``, ``("repeat", tree, v)``, ``("sequence", trees)``,
``("where", v, limit, tree, other)``, the tree for values above the limit, or ``("each", over, body, sep, last)``, where
`sep` and `last` may be None. A value `v` is a number, ``("cfg", name)``, ``("item", name)`` or ``("loop", depth)``;
`over` is a value or a list of numbers.

A way to place an item is ``(kind, target, layout, embed ids)`` with a kind of replace, in_place, start, end or after.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any


def value(v: Any, env: dict[str, dict[str, Any]], loops: Sequence[int]) -> Any:
    if not isinstance(v, tuple):
        return v
    root, name = v
    return loops[name] if root == "loop" else env[root][name]


def lay(tree: tuple[Any, ...], env: dict[str, dict[str, Any]], loops: Sequence[int] = ()) -> list[tuple[int, bool]]:
    """The tokens of a layout, each with whether it receives an encoder row."""
    parts: list[tuple[tuple[Any, ...], Sequence[int]]] = []
    match tree:
        case ("token" | "embed" as kind, token):
            return [(value(token, env, loops), kind == "embed")]
        case ("repeat", part, count):
            parts += [(part, loops)] * value(count, env, loops)
        case ("sequence", every):
            parts += [(part, loops) for part in every]
        case ("where", fact, limit, part, other):
            parts.append((part if value(fact, env, loops) > limit else other, loops))
        case (_, over, body, sep, last):
            over = value(over, env, loops)
            for position, element in enumerate(range(over) if isinstance(over, int) else over):
                parts += [(sep, loops)] if position and sep else []
                parts.append((body, (*loops, element)))
            parts += [(last, loops)] if parts and last else []
    return [token for part, own in parts for token in lay(part, env, own)]


Way = tuple[str, list[int], list[int], set[int]]
Items = dict[str, list[list[Way]]]
Placed = tuple[list[int], list[tuple[str, int, int, list[int]]]]


def place(prompt: list[int], items: Items, surplus: list[list[int]] | None = None) -> Placed | None:
    """The new prompt and (modality, index, start, layout) per item; None where the request is refused.

    A prompt that holds every layout is expanded already. Else every item has a target or anchor, or, if that does not
    fit either, the caller has expanded some items and not others. A prompt with a target inside a layout of another
    modality, of which some tokens would be left, is refused. `surplus` is what would stand for items that the request
    does not have.
    """
    with suppress(Ambiguous):
        # where no item of a modality stands expanded, nobody sent the expanded prompt
        firsts = [of[0][0][2] for of in items.values() if of]
        is_expanded = all(_contains(prompt, layout) for layout in firsts)
        for reading in ("layouts", "targets", "either") if is_expanded else ("targets", "either"):
            if placed := _scan(prompt, items, reading, surplus or []):
                return placed
    return None


class Ambiguous(Exception):
    """A layout in a prompt may be that of an item of either of two modalities, or a target stands inside a layout of
    another modality."""


def _scan(prompt: list[int], items: Items, reading: str, surplus: list[list[int]]) -> Placed | None:
    anchored: list[tuple[int, int, str, int]] = []
    waiting: dict[str, list[int]] = {}
    for modality, of in items.items():
        for index, ways in enumerate(of):
            anchor = _anchor(prompt, ways) if reading == "targets" and modality not in waiting else None
            if anchor is None:
                waiting.setdefault(modality, []).append(index)
            else:
                anchored.append((*anchor, modality, index))

    result: list[int] = []
    placed: list[tuple[str, int, int, list[int]]] = []
    untouched: list[list[int]] = [[]]
    taken: list[tuple[str, int, int, bool]] = []

    def put(number: int, modality: str, index: int) -> None:
        layout = items[modality][index][number][2]
        placed.append((modality, index, len(result), layout))
        result.extend(layout)
        untouched.append([])

    position = 0
    while position <= len(prompt):
        here = [at for own, *at in anchored if own == position]
        for number, modality, index in here:
            put(number, modality, index)
        match = _at(prompt, position, items, waiting, reading) if position < len(prompt) else None
        if match is None:
            result += prompt[position : position + 1]
            untouched[-1] += prompt[position : position + 1]
            position += 1
        else:
            modality, number, length = match
            ways, stands = items[modality][waiting[modality][0]], prompt[position : position + length]
            is_target = any(kind == "replace" and stands == target for kind, target, *_ in ways)
            taken.append((modality, position, position + length, is_target))
            put(number, modality, waiting[modality].pop(0))
            position += length
    every = [way for of in items.values() for ways in of for way in ways]
    targets = surplus + [target for kind, target, *_ in every if kind == "replace"]
    embeds = {token for *_, own in every for token in own}
    is_text = not any(embeds.intersection(part) or any(_contains(part, one) for one in targets) for part in untouched)
    if not is_text or len(placed) != sum(map(len, items.values())):
        return None
    if _is_inside(prompt, items, taken):
        raise Ambiguous
    return result, placed


def _is_inside(prompt: list[int], items: Items, taken: list[tuple[str, int, int, bool]]) -> bool:
    """Whether a target stands inside a layout of another modality, some of whose tokens stand for no item."""
    for modality, of in items.items():
        for ways in of:
            layout = ways[0][2]
            for begin in range(len(prompt) - len(layout) + 1):
                end = begin + len(layout)
                if prompt[begin:end] != layout:
                    continue
                inside = [
                    one
                    for one, start, stop, is_target in taken
                    if is_target and begin <= start and stop <= end
                    if one != modality
                ]
                covered = {at for _, start, stop, _ in taken for at in range(start, stop)}
                if inside and not covered.issuperset(range(begin, end)):
                    return True
    return False


def _anchor(prompt: list[int], ways: list[Way]) -> tuple[int, int] | None:
    for number, (kind, prefix, *_) in enumerate(ways):
        if kind == "start" or (kind == "after" and prompt[: len(prefix)] == prefix):
            return len(prefix), number
    return None


def _at(prompt: list[int], position: int, items: Items, waiting: dict[str, list[int]], reading: str) -> Any:
    """The first modality whose next item is here, the number of its way, and the length of what stands for it."""
    next_of = {modality: items[modality][own[0]] for modality in items if (own := waiting.get(modality))}
    matches = {modality: _match(prompt[position:], ways, reading) for modality, ways in next_of.items()}
    known = [(modality, *match) for modality, match in matches.items() if match]
    if known and known[0][-1] and sum(standing for *_, standing in known) > 1:
        raise Ambiguous
    return known[0][:3] if known else None


def _match(rest: list[int], ways: list[Way], reading: str) -> tuple[int, int, bool] | None:
    """The number of the way, how many ids stand for it, and whether they are its layout."""
    for number, (kind, target, layout, _) in enumerate(ways):
        if (reading != "targets" or kind == "in_place") and rest[: len(layout)] == layout:
            return number, len(layout), True
        if reading != "layouts" and kind == "replace" and rest[: len(target)] == target:
            return number, len(target), target == layout
    return None


def _contains(segment: list[int], target: list[int]) -> bool:
    return any(segment[i : i + len(target)] == target for i in range(len(segment) - len(target) + 1))
