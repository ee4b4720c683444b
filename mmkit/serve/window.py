"""The history of a session: its tokens and items, and the part that its window drops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple

from ..errors import InputError
from ..items import Embedding
from .protocol import Slid


class Held(NamedTuple):
    """One item: its placeholders, from `start` to `stop` among the tokens, and what it came as.

    Attributes:
        value: as a caller writes it; None if there is no window.
        uuid: its name for the cache.
    """

    name: str
    start: int
    stop: int
    value: Any = None
    uuid: str | None = None


class History:
    """What the model has read and written since the window begins.

    Args:
        keep: the most items after a slide; None without a window.

    Attributes:
        ids: the tokens.
        items: the items, in the order of their placeholders.
    """

    def __init__(self, keep: int | None = None) -> None:
        self._keep = keep
        self.ids: list[int] = []
        self.items: list[Held] = []

    def add(self, ids: Sequence[int], items: Sequence[Held]) -> None:
        """Append tokens, and items whose placeholders count from the first of these."""
        at = len(self.ids)
        self.items += [item._replace(start=item.start + at, stop=item.stop + at) for item in items]
        self.ids += ids

    def fitting(self, new: int, check: Callable[[int, Counter[str]], object]) -> History:
        """The history after which a message fits: this one, or what is left of it behind the first
        item whose end leaves at most `keep` items, those of the message among them.

        Args:
            new: items of the message.
            check: refuses a number of tokens, and items, that leave no room for it.

        Raises:
            InputError: there is none; the error of the last one.
        """
        refused = self._refusal(check)
        if refused is None:
            return self
        for number in range(1, len(self.items) + 1 if self._keep else 0):
            behind = len(self.items) - number
            if behind and behind + new > (self._keep or 0):
                continue
            left = self._after(number)
            refused = left._refusal(check)
            if refused is None:
                return left
        raise refused

    def _refusal(self, check: Callable[[int, Counter[str]], object]) -> InputError | None:
        try:
            check(len(self.ids), Counter(item.name for item in self.items))
        except InputError as error:
            return error
        return None

    def _after(self, number: int) -> History:
        left, cut = History(self._keep), self.items[number - 1].stop
        left.ids = self.ids[cut:]
        left.items = [
            i._replace(start=i.start - cut, stop=i.stop - cut) for i in self.items[number:]
        ]
        return left

    def slid(self, left: History) -> Slid | None:
        """The part of this history that `left` lacks; None if that is nothing."""
        tokens = len(self.ids) - len(left.ids)
        dropped = self.items[: len(self.items) - len(left.items)]
        items = Counter(item.name for item in dropped)
        return Slid(tokens=tokens, items=dict(items)) if tokens else None


def held(
    rendered: Mapping[str, Any],
    values: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    uuids: Mapping[str, Sequence[str | None]] = MappingProxyType({}),
) -> list[Held]:
    """The items of a rendered prompt, in the order of their placeholders.

    Args:
        rendered: the prompt.
        values: what they came as, by modality.
        uuids: their names for the cache.
    """
    items = [
        Held(name, place.offset, place.offset + place.length, value, uuid)
        for name, places in rendered.get("mm_placeholders", {}).items()
        for place, value, uuid in zip(
            places,
            values.get(name) or repeat(None, len(places)),
            uuids.get(name) or repeat(None, len(places)),
            strict=True,
        )
    ]
    return sorted(items, key=lambda item: item.start)


def together(items: Sequence[Held]) -> Any:
    """The items of a modality as a caller writes them.

    Raises:
        InputError: some are precomputed embeddings, others are not.
    """
    values = [item.value for item in items]
    kinds = {isinstance(value, Embedding) for value in values}
    if len(kinds) > 1:
        expected = "items, or embeddings of all of them, in one window"
        raise InputError(f"items.{items[0].name}", expected, "both")
    if kinds == {True}:
        return {field: [value[field] for value in values] for field in values[0]}
    return values
