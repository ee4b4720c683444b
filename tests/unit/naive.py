"""Independent, deliberately naive references: layouts token by token, and placement by scanning the prompt once.

Both are written from the documentation of mmkit, not from its code, and use plain lists and tuples only.

A layout is a tree: ``("token", v)``, ``("embed", v)``, ``("repeat", tree, v)``, ``("sequence", trees)``,
``("where", v, limit, tree, other)``, the tree for values above the limit, or ``("each", over, body, sep, last)``, where
`sep` and `last` may be None. A value `v` is a number, ``("cfg", name)``, ``("item", name)`` or ``("loop", depth)``;
`over` is a value or a list of numbers.

A way to place an item is ``(kind, target, layout, embed ids)`` with a kind of replace, in_place, start, end or after.
"""

from __future__ import annotations

from typing import Any


def value(v: Any, env: dict[str, dict[str, Any]], loops: list[int]) -> Any:
    if isinstance(v, tuple):
        root, name = v
        return loops[name] if root == "loop" else env[root][name]
    return v


def lay(
    tree: tuple[Any, ...], env: dict[str, dict[str, Any]], loops: list[int] | None = None
) -> list[tuple[int, bool]]:
    """The tokens of a layout, each with whether it receives an encoder row."""
    loops = loops or []
    kind = tree[0]
    if kind in ("token", "embed"):
        return [(value(tree[1], env, loops), kind == "embed")]
    tokens: list[tuple[int, bool]] = []
    if kind == "repeat":
        for _ in range(value(tree[2], env, loops)):
            tokens += lay(tree[1], env, loops)
    elif kind == "sequence":
        for part in tree[1]:
            tokens += lay(part, env, loops)
    elif kind == "where":
        tokens += lay(tree[3] if value(tree[1], env, loops) > tree[2] else tree[4], env, loops)
    else:
        _, over, body, sep, last = tree
        over = value(over, env, loops)
        elements = list(range(over)) if isinstance(over, int) else list(over)
        for position, element in enumerate(elements):
            if position > 0 and sep is not None:
                tokens += lay(sep, env, loops)
            tokens += lay(body, env, [*loops, element])
        if elements and last is not None:
            tokens += lay(last, env, loops)
    return tokens


Way = tuple[str, list[int], list[int], set[int]]
Placed = tuple[list[int], list[tuple[str, int, int, list[int]]]]


def place(
    prompt: list[int], items: dict[str, list[list[Way]]], surplus: list[list[int]] | None = None
) -> Placed | None:
    """The new prompt and (modality, index, start, layout) per item; None where the request is refused.

    A prompt that holds every layout is expanded already. Else every item has a target or anchor, or, if that does not
    fit either, the caller has expanded some items and not others. `surplus` is what would stand for items that the
    request does not have.
    """
    for reading in ("layouts", "targets", "either"):
        try:
            if placed := _scan(prompt, items, reading, surplus or []):
                return placed
        except Ambiguous:
            return None
    return None


class Ambiguous(Exception):
    """A layout in a prompt may be that of an item of either of two modalities."""


def _scan(
    prompt: list[int], items: dict[str, list[list[Way]]], reading: str, surplus: list[list[int]]
) -> Placed | None:
    anchors: dict[int, list[tuple[str, int, int]]] = {}
    waiting: dict[str, list[int]] = {}
    for modality, ways_of in items.items():
        for index, alternatives in enumerate(ways_of):
            anchor = None if reading != "targets" or waiting.get(modality) else _anchor(prompt, alternatives)
            if anchor is None:
                waiting.setdefault(modality, []).append(index)
            else:
                anchors.setdefault(anchor[0], []).append((modality, index, anchor[1]))

    result: list[int] = []
    placed: list[tuple[str, int, int, list[int]]] = []
    untouched: list[list[int]] = [[]]
    position = 0
    while position <= len(prompt):
        here = anchors.pop(position, [])
        # what goes to the end is last there, also where the end is the start
        for modality, index, alternative in sorted(here, key=lambda at: items[at[0]][at[1]][at[2]][0] == "end"):
            layout = items[modality][index][alternative][2]
            placed.append((modality, index, len(result), layout))
            result += layout
            untouched.append([])
        if position == len(prompt):
            break
        match = _at(prompt, position, items, waiting, reading)
        if match is None:
            result.append(prompt[position])
            untouched[-1].append(prompt[position])
            position += 1
        else:
            modality, alternative, length = match
            index = waiting[modality].pop(0)
            layout = items[modality][index][alternative][2]
            placed.append((modality, index, len(result), layout))
            result += layout
            untouched.append([])
            position += length
    if anchors or any(waiting.values()):
        return None
    for ways_of in items.values():
        for alternatives in ways_of:
            for kind, target, _, embeds in alternatives:
                for segment in untouched:
                    if embeds & set(segment) or (kind == "replace" and _contains(segment, target)):
                        return None
    if any(_contains(segment, target) for segment in untouched for target in surplus):
        return None
    return result, placed


def _anchor(prompt: list[int], alternatives: list[Way]) -> tuple[int, int] | None:
    for number, (kind, prefix, _, _) in enumerate(alternatives):
        if kind == "start":
            return 0, number
        if kind == "end":
            return len(prompt), number
        if kind == "after" and prompt[: len(prefix)] == prefix:
            return len(prefix), number
    return None


def _at(
    prompt: list[int], position: int, items: dict[str, list[list[Way]]], waiting: dict[str, list[int]], reading: str
) -> tuple[str, int, int] | None:
    matches = [
        (modality, _match(prompt, position, items[modality][own[0]], reading))
        for modality in items
        if (own := waiting.get(modality))
    ]
    known = [(modality, *match) for modality, match in matches if match is not None]
    if known and known[0][-1] and sum(standing for *_, standing in known) > 1:
        raise Ambiguous
    return known[0][:3] if known else None


def _match(prompt: list[int], position: int, alternatives: list[Way], reading: str) -> tuple[int, int, bool] | None:
    """The number of the alternative, the ids that stand for it, and whether they are its layout."""
    for number, (kind, target, layout, _) in enumerate(alternatives):
        if (reading != "targets" or kind == "in_place") and prompt[position : position + len(layout)] == layout:
            return number, len(layout), True
        if reading != "layouts" and kind == "replace" and prompt[position : position + len(target)] == target:
            return number, len(target), False
    return None


def _contains(segment: list[int], target: list[int]) -> bool:
    return any(segment[i : i + len(target)] == target for i in range(len(segment) - len(target) + 1))
