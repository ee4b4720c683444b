"""The history of a session: its tokens and items, and the part that its window drops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import InputError
from ..plan.parsing import Embedding
from .protocol import Dropped


class SessionItem(NamedTuple):
    """One item of a session.

    Attributes:
        modality: its name.
        value: the item as the parser of its modality returns it.
        uuid: its name in the caches, if it has one.
        stop: the end of its placeholders among the tokens of the history.
    """

    modality: str
    value: Any
    uuid: str | None = None
    stop: int = 0


class History(NamedTuple):
    """What the model has read and written since the window begins.

    Attributes:
        keep: the most items after the window has dropped something; None without a window.
        ids: the tokens.
        items: the items, in the order of their placeholders.
    """

    keep: int | None = None
    ids: Sequence[int] = ()
    items: Sequence[SessionItem] = ()

    def drop_until_fits(self, num_new_items: int, check: Callable[[History], object]) -> History:
        """Return the history after which a message fits.

        That is this one; or, with a window, what remains of it behind the first item whose end
        leaves at most `keep` items, including the items of the message.

        Args:
            num_new_items: number of items of the message.
            check: raises `InputError` for a history that leaves no room for the message.

        Raises:
            InputError: no history leaves room; the error for the shortest one.
        """
        last_drop = len(self.items) if self.keep else 0
        for num_dropped in range(last_drop + 1):
            history = self._drop_items(num_dropped)
            if num_dropped > 0 and history._has_too_many(num_new_items):
                continue
            try:
                check(history)
            except InputError as error:
                refusal = error
            else:
                return history
        raise refusal

    def _has_too_many(self, num_new_items: int) -> bool:
        """Return whether this history, with the items of a message, exceeds what the window keeps.

        The window drops no item of the message, which may have more than `keep` by itself.
        """
        if self.keep is None or not self.items:
            return False
        return len(self.items) + num_new_items > self.keep

    def _drop_items(self, number: int) -> History:
        """Return the history behind the first items.

        The items keep their ends in the longer history, which are wrong in this one: `locate_items`
        sets them once the engine has the next message.
        """
        if not number:
            return self
        stop = self.items[number - 1].stop
        return self._replace(ids=self.ids[stop:], items=self.items[number:])

    def count_dropped(self, remaining: History) -> Dropped | None:
        """Count the tokens and items of this history that `remaining` lacks; None for nothing."""
        num_tokens = len(self.ids) - len(remaining.ids)
        if not num_tokens:
            return None
        num_items = len(self.items) - len(remaining.items)
        counts = Counter(item.modality for item in self.items[:num_items])
        return Dropped(tokens=num_tokens, items=dict(counts))


def group_by_modality(items: Iterable[SessionItem]) -> dict[str, list[SessionItem]]:
    """Return items by modality, in the order in which they come."""
    groups: dict[str, list[SessionItem]] = {}
    for item in items:
        groups.setdefault(item.modality, []).append(item)
    return groups


def locate_items(items: Iterable[SessionItem], rendered: Mapping[str, Any]) -> list[SessionItem]:
    """Return the items of a rendered prompt with their ends, in the order of their placeholders.

    Args:
        items: in the order in which the prompt was made of them.
        rendered: vLLM's input for its engine, with its `mm_placeholders`.
    """
    groups = group_by_modality(items)
    located = []
    for modality, ranges in rendered.get("mm_placeholders", {}).items():
        for item, placeholder in zip(groups[modality], ranges, strict=True):
            located.append(item._replace(stop=placeholder.offset + placeholder.length))
    return sorted(located, key=_get_stop)


def _get_stop(item: SessionItem) -> int:
    return item.stop


def merge_values(items: Sequence[SessionItem]) -> Any:
    """Return the items of one modality as a caller sends them.

    That is a list of items; or, if all of them are precomputed embeddings, a dict of their fields
    with a list each.
    """
    values = [item.value for item in items]
    if not all(isinstance(value, Embedding) for value in values):
        return values
    merged: dict[str, list[Any]] = {}
    for field in values[0]:
        merged[field] = [value[field] for value in values]
    return merged
