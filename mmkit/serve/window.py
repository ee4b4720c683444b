"""The history of a session: its tokens and items, and the part that its window drops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import InputError
from ..items import Embedding
from .protocol import Slid

ByName = Mapping[str, Sequence[Any]]
"""Something of each item, by modality."""


class Held(NamedTuple):
    """One item: its placeholders, from `start` to `stop` among the tokens, what it came as, and its
    name for the cache."""

    name: str
    start: int
    stop: int
    value: Any
    uuid: str | None


class History(NamedTuple):
    """What the model has read and written since the window begins.

    Attributes:
        keep: the most items after a slide; None without a window.
        ids: the tokens.
        items: the items, in the order of their placeholders.
    """

    keep: int | None = None
    ids: Sequence[int] = ()
    items: Sequence[Held] = ()

    def fitting(self, new: int, check: Callable[[int, Counter[str]], object]) -> History:
        """The history after which a message fits: this one, or what is left of it behind the first
        item whose end leaves at most `keep` items, those of the message among them.

        Args:
            new: items of the message.
            check: refuses a number of tokens, and items, that leave no room for it.

        Raises:
            InputError: there is none; the error of the last one.
        """
        for number in range(len(self.items) + 1 if self.keep else 1):
            left = self._after(number)
            if number and left.items and len(left.items) + new > (self.keep or 0):
                continue
            try:
                check(len(left.ids), Counter(item.name for item in left.items))
                return left
            except InputError as error:
                refused = error
        raise refused

    def _after(self, number: int) -> History:
        """What is left behind so many items."""
        cut = self.items[number - 1].stop if number else 0
        left = [i._replace(start=i.start - cut, stop=i.stop - cut) for i in self.items[number:]]
        return self._replace(ids=self.ids[cut:], items=left)

    def slid(self, left: History) -> Slid | None:
        """The part of this history that `left` lacks; None if that is nothing."""
        tokens = len(self.ids) - len(left.ids)
        dropped = self.items[: len(self.items) - len(left.items)]
        items = Counter(item.name for item in dropped)
        return Slid(tokens=tokens, items=dict(items)) if tokens else None

    def came_as(self, values: ByName, uuids: ByName) -> tuple[ByName, ByName]:
        """What the items came as, and their names, with those of a message after them."""
        whole: dict[str, list[Any]] = {}
        names: dict[str, list[str | None]] = {}
        for item in self.items:
            whole.setdefault(item.name, []).append(item.value)
            names.setdefault(item.name, []).append(item.uuid)
        for name, own in values.items():
            whole.setdefault(name, []).extend(own)
            names.setdefault(name, []).extend(uuids.get(name) or [None] * len(own))
        return whole, names


def held(rendered: Mapping[str, Any], values: ByName, uuids: ByName) -> list[Held]:
    """The items of a rendered prompt, in the order of their placeholders.

    Args:
        rendered: the prompt.
        values: what they came as.
        uuids: their names for the cache.
    """
    items = [
        Held(name, place.offset, place.offset + place.length, value, uuid)
        for name, places in rendered.get("mm_placeholders", {}).items()
        for place, value, uuid in zip(places, values[name], uuids[name], strict=True)
    ]
    return sorted(items, key=lambda item: item.start)


def together(name: str, values: Sequence[Any]) -> Any:
    """The items of a modality as a caller writes them.

    Raises:
        InputError: some are precomputed embeddings, others are not.
    """
    kinds = {isinstance(value, Embedding) for value in values}
    if len(kinds) > 1:
        expected = "items, or embeddings of all of them, in one session"
        raise InputError(f"items.{name}", expected, "both")
    if kinds == {True}:
        return {field: [value[field] for value in values] for field in values[0]}
    return list(values)
