"""The history of a session: its tokens and items, and the part that its window drops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import InputError
from ..plan.parsing import Embedding
from .protocol import Dropped


class SessionItem(NamedTuple):
    """One item: its modality, what it came as, its name for the cache, and the end of its
    placeholders among the tokens."""

    name: str
    value: Any
    uuid: str | None = None
    stop: int = 0


class History(NamedTuple):
    """What the model has read and written since the window begins.

    Attributes:
        keep: the most items after a slide; None without a window.
        ids: the tokens.
        items: the items, in the order of their placeholders.
    """

    keep: int | None = None
    ids: Sequence[int] = ()
    items: Sequence[SessionItem] = ()

    def drop_until_fits(self, new: int, check: Callable[[History], object]) -> History:
        """The history after which a message fits: this one, or what is left of it behind the first
        item whose end leaves at most `keep` items, those of the message among them.

        Args:
            new: items of the message.
            check: refuses a history that leaves no room for it.

        Raises:
            InputError: there is none; the error of the last one.
        """
        for number in range(len(self.items) + 1 if self.keep else 1):
            cut = self.items[number - 1].stop if number else 0
            # the engine tells where the items are once it has the message
            left = self._replace(ids=self.ids[cut:], items=self.items[number:])
            if number and left.items and len(left.items) + new > (self.keep or 0):
                continue
            try:
                check(left)
                return left
            except InputError as error:
                refused = error
        raise refused

    def count_dropped(self, left: History) -> Dropped | None:
        """The part of this history that `left` lacks; None if that is nothing."""
        tokens = len(self.ids) - len(left.ids)
        dropped = self.items[: len(self.items) - len(left.items)]
        items = Counter(item.name for item in dropped)
        return Dropped(tokens=tokens, items=dict(items)) if tokens else None


def group_by_modality(items: Iterable[SessionItem]) -> dict[str, list[SessionItem]]:
    """Items by their modality."""
    found: dict[str, list[SessionItem]] = {}
    for item in items:
        found.setdefault(item.name, []).append(item)
    return found


def locate_items(items: Iterable[SessionItem], rendered: Mapping[str, Any]) -> list[SessionItem]:
    """The items of a rendered prompt, in the order of their placeholders."""
    of, places = group_by_modality(items), rendered.get("mm_placeholders", {})
    found = [
        item._replace(stop=place.offset + place.length)
        for name in places
        for item, place in zip(of[name], places[name], strict=True)
    ]
    return sorted(found, key=lambda item: item.stop)


def merge_values(items: Sequence[SessionItem]) -> Any:
    """The items of one modality as a caller writes them; embeddings, if all are, by their field."""
    values = [item.value for item in items]
    if all(isinstance(value, Embedding) for value in values):
        return {field: [value[field] for value in values] for field in values[0]}
    return values
