"""Independent, deliberately naive references: layouts token by token, and placement by scanning the prompt once.

Both are written from the documentation of mmkit, not from its code, and use plain lists and tuples only. The words
are those of `mmkit.plan.placement`; the algorithm is another one.

A layout is a tree: ``("token", v)``, ``("embed", v)``, ``("repeat", tree, v)``, ``("sequence", trees)``,
``("where", v, limit, tree, other)``, the tree for values above the limit, or ``("each", over, body, sep, last)``, where
`sep` and `last` may be None. A value `v` is a number, ``("cfg", name)``, ``("item", name)`` or ``("loop", depth)``;
`over` is a value or a list of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

# -- layouts -----------------------------------------------------------------------------------------------------------


def value(v: Any, env: dict[str, dict[str, Any]], loops: Sequence[int]) -> Any:
    if not isinstance(v, tuple):
        return v
    root, name = v
    if root == "loop":
        return loops[name]
    return env[root][name]


def lay(tree: tuple[Any, ...], env: dict[str, dict[str, Any]], loops: Sequence[int] = ()) -> list[tuple[int, bool]]:
    """Return the tokens of a layout, each with whether it receives an encoder row.

    Args:
        tree: the layout.
        env: the values of `cfg` and `item`, by name.
        loops: the elements of the loops around the tree, from the outermost.
    """
    tokens: list[tuple[int, bool]] = []
    match tree:
        case ("token", token):
            tokens.append((value(token, env, loops), False))
        case ("embed", token):
            tokens.append((value(token, env, loops), True))
        case ("repeat", part, count):
            tokens += lay(part, env, loops) * value(count, env, loops)
        case ("sequence", parts):
            for part in parts:
                tokens += lay(part, env, loops)
        case ("where", fact, limit, part, other):
            is_above = value(fact, env, loops) > limit
            tokens += lay(part if is_above else other, env, loops)
        case ("each", over, body, sep, last):
            elements = value(over, env, loops)
            if isinstance(elements, int):
                elements = range(elements)
            for position, element in enumerate(elements):
                if position > 0 and sep:
                    tokens += lay(sep, env, loops)
                tokens += lay(body, env, (*loops, element))
            if elements and last:
                tokens += lay(last, env, loops)
        case _:
            raise ValueError(tree)
    return tokens


# -- placement ---------------------------------------------------------------------------------------------------------


class Update(NamedTuple):
    """One of the updates of an item.

    Attributes:
        kind: replace, already_expanded, or start or after, which insert.
        target: the ids that the item replaces, or after which it is inserted.
        layout: the ids of the item.
        embed_ids: those of them that receive an encoder row.
    """

    kind: str
    target: list[int]
    layout: list[int]
    embed_ids: set[int]


Items = dict[str, list[list[Update]]]
"""The updates of each item in order of preference, by modality."""


class Placement(NamedTuple):
    modality: str
    index: int
    start: int
    layout: list[int]


class PlacedPrompt(NamedTuple):
    token_ids: list[int]
    placements: list[Placement]


PromptForm = Literal["expanded", "unexpanded", "mixed"]
"""What stands for items in a prompt: layouts, targets and anchors, or either."""


def place(prompt: list[int], items: Items, reserved: list[list[int]] | None = None) -> PlacedPrompt | None:
    """Return the new prompt and its items; None where the request is refused.

    A prompt that holds every layout is expanded already. Else every item has a target or anchor, or, if that does not
    fit either, the caller has expanded some items and not others. A prompt with a target inside a layout of another
    modality, of which some tokens would be left, is refused.

    Args:
        prompt: what the caller wrote.
        items: the items of the request.
        reserved: targets of items that the request does not have.
    """
    forms: list[PromptForm] = ["unexpanded", "mixed"]
    if _is_expanded(prompt, items):
        forms.insert(0, "expanded")
    with suppress(Ambiguous):
        for form in forms:
            placed = _Scan(prompt, items, form).run(reserved or [])
            if placed is not None:
                return placed
    return None


class Ambiguous(Exception):
    """A layout in a prompt may be that of an item of either of two modalities, or a target stands inside a layout of
    another modality."""


def _is_expanded(prompt: list[int], items: Items) -> bool:
    """Return whether the first item of each modality stands expanded; else nobody sent the expanded prompt."""
    for items_of_modality in items.values():
        if items_of_modality and not _contains(prompt, items_of_modality[0][0].layout):
            return False
    return True


class _Anchor(NamedTuple):
    """An item that is inserted at a position of the prompt."""

    position: int
    modality: str
    index: int
    update: Update


class _Match(NamedTuple):
    """What stands for an item in the prompt."""

    modality: str
    update: Update
    length: int
    is_layout: bool


class _Span(NamedTuple):
    """The part of the prompt that an item takes."""

    modality: str
    start: int
    end: int
    is_target: bool


class _Scan:
    """One pass over a prompt.

    Attributes:
        anchors: the items with an anchor.
        waiting: the indices of the items that have not come yet, by modality.
        ids: the new prompt up to here.
        placed: the items up to here.
        spans: what they took of the prompt.
        texts: the parts of the prompt between items.
    """

    def __init__(self, prompt: list[int], items: Items, form: PromptForm) -> None:
        self.prompt = prompt
        self.items = items
        self.form = form
        self.anchors: list[_Anchor] = []
        self.waiting: dict[str, list[int]] = {}
        self.ids: list[int] = []
        self.placed: list[Placement] = []
        self.spans: list[_Span] = []
        self.texts: list[list[int]] = [[]]

    def run(self, reserved: list[list[int]]) -> PlacedPrompt | None:
        self.find_anchors()
        position = 0
        while position < len(self.prompt):
            self.put_anchored(position)
            match = self.find_match(position)
            if match is None:
                self.ids.append(self.prompt[position])
                self.texts[-1].append(self.prompt[position])
                position += 1
            else:
                self.put_match(position, match)
                position += match.length
        self.put_anchored(position)

        num_items = sum(len(items_of_modality) for items_of_modality in self.items.values())
        if self.has_left_over(reserved) or len(self.placed) != num_items:
            return None
        if self.is_target_inside_layout():
            raise Ambiguous
        return PlacedPrompt(self.ids, self.placed)

    def find_anchors(self) -> None:
        """Find the items with an anchor. Of a modality, these are the first ones; the others wait for a target."""
        for modality, items_of_modality in self.items.items():
            for index, updates in enumerate(items_of_modality):
                anchored = None
                if self.form == "unexpanded" and modality not in self.waiting:
                    anchored = _find_anchored(self.prompt, updates)
                if anchored is None:
                    self.waiting.setdefault(modality, []).append(index)
                else:
                    self.anchors.append(_Anchor(len(anchored.target), modality, index, anchored))

    def put_anchored(self, position: int) -> None:
        for anchor in self.anchors:
            if anchor.position == position:
                self.put(anchor.modality, anchor.index, anchor.update)

    def put_match(self, position: int, match: _Match) -> None:
        index = self.waiting[match.modality].pop(0)
        end = position + match.length
        is_target = False
        for update in self.items[match.modality][index]:
            if update.kind == "replace" and update.target == self.prompt[position:end]:
                is_target = True
        self.spans.append(_Span(match.modality, position, end, is_target))
        self.put(match.modality, index, match.update)

    def put(self, modality: str, index: int, update: Update) -> None:
        self.placed.append(Placement(modality, index, len(self.ids), update.layout))
        self.ids.extend(update.layout)
        self.texts.append([])

    def find_match(self, position: int) -> _Match | None:
        """Return what stands here for the next item of the first modality that has anything here."""
        matches: list[_Match] = []
        for modality in self.items:
            indices = self.waiting.get(modality)
            if indices:
                updates = self.items[modality][indices[0]]
                match = _match(self.prompt[position:], modality, updates, self.form)
                if match is not None:
                    matches.append(match)
        if not matches:
            return None
        num_layouts = sum(match.is_layout for match in matches)
        if matches[0].is_layout and num_layouts > 1:
            raise Ambiguous
        return matches[0]

    def has_left_over(self, reserved: list[list[int]]) -> bool:
        """Return whether a placeholder or a target is left over between the items."""
        targets = list(reserved)
        embed_ids: set[int] = set()
        for items_of_modality in self.items.values():
            for updates in items_of_modality:
                for update in updates:
                    embed_ids |= update.embed_ids
                    if update.kind == "replace":
                        targets.append(update.target)
        for text in self.texts:
            if embed_ids.intersection(text):
                return True
            for target in targets:
                if _contains(text, target):
                    return True
        return False

    def is_target_inside_layout(self) -> bool:
        """Return whether a target stands inside a layout of another modality, some of whose tokens stand for no
        item."""
        covered: set[int] = set()
        for span in self.spans:
            covered.update(range(span.start, span.end))
        for modality, items_of_modality in self.items.items():
            for updates in items_of_modality:
                layout = updates[0].layout
                for start in _find_all(self.prompt, layout):
                    end = start + len(layout)
                    has_inside = self.has_target_of_other_modality(modality, start, end)
                    if has_inside and not covered.issuperset(range(start, end)):
                        return True
        return False

    def has_target_of_other_modality(self, modality: str, start: int, end: int) -> bool:
        for span in self.spans:
            is_inside = start <= span.start and span.end <= end
            if is_inside and span.is_target and span.modality != modality:
                return True
        return False


def _find_anchored(prompt: list[int], updates: list[Update]) -> Update | None:
    """Return the first update that inserts the item into the prompt; at the start, its target is empty."""
    for update in updates:
        if update.kind == "start":
            return update
        if update.kind == "after" and _begins_with(prompt, update.target):
            return update
    return None


def _match(ids: list[int], modality: str, updates: list[Update], form: PromptForm) -> _Match | None:
    """Return what stands for an item at the beginning of these ids."""
    for update in updates:
        kind, target, layout, _ = update
        if (form != "unexpanded" or kind == "already_expanded") and _begins_with(ids, layout):
            return _Match(modality, update, len(layout), is_layout=True)
        if form != "expanded" and kind == "replace" and _begins_with(ids, target):
            return _Match(modality, update, len(target), is_layout=target == layout)
    return None


def _begins_with(ids: list[int], prefix: list[int]) -> bool:
    return ids[: len(prefix)] == prefix


def _find_all(ids: list[int], part: list[int]) -> list[int]:
    """Return where a part stands in a list."""
    starts = range(len(ids) - len(part) + 1)
    return [start for start in starts if _begins_with(ids[start:], part)]


def _contains(ids: list[int], part: list[int]) -> bool:
    return bool(_find_all(ids, part))
