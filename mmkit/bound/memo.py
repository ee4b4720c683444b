"""A cache of bounded size."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_gone = suppress(KeyError)
_encoded = json.JSONEncoder(sort_keys=True).encode


def options_key(options: Mapping[str, Any]) -> Any:
    """The key of some options in a `Memo`; one that cannot be hashed for values that JSON lacks."""
    try:
        return _encoded(options)
    except TypeError:
        return []


class Memo:
    """Values by key, up to a total size: the least recently used goes.

    Args:
        capacity: the total size.
        size: that of one value.
    """

    def __init__(self, capacity: int, size: Callable[[Any], int] = lambda value: 1) -> None:
        self._capacity, self._size, self._total = capacity, size, 0
        self._values: OrderedDict[Any, Any] = OrderedDict()

    def get(self, key: Any, compute: Callable[[], T]) -> T:
        """The value of a key; computed each time where the key cannot be hashed."""
        try:
            value: T | None = self._values.get(key)
        except TypeError:
            return compute()
        if value is not None:
            with _gone:  # another thread may have dropped it
                self._values.move_to_end(key)
            return value
        value = compute()
        if self._size(value) <= self._capacity:
            if (other := self._values.pop(key, None)) is not None:  # of another thread
                self._total -= self._size(other)
            self._values[key] = value
            self._total += self._size(value)
        while self._total > self._capacity and self._values:
            self._total -= self._size(self._values.popitem(last=False)[1])
        return value
