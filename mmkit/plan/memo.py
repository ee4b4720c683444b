"""A cache of bounded size."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

_encoded = json.JSONEncoder(sort_keys=True).encode


def options_key(options: Mapping[str, Any]) -> Any:
    """The key of some options in a `Memo`; one that cannot be hashed for values that JSON lacks."""
    try:
        return _encoded(options)
    except TypeError:
        return []


class Memo:
    """Values by key, up to a total size. What was not used while the other half was filled goes.

    Args:
        capacity: the total size.
        size: that of one value.
    """

    def __init__(self, capacity: int, size: Callable[[Any], int] = lambda value: 1) -> None:
        self._half, self._size, self._total = capacity // 2, size, 0
        self._values: dict[Any, Any] = {}
        self._before: dict[Any, Any] = {}

    def get(self, key: Any, compute: Callable[[], T]) -> T:
        """The value of a key; computed each time where the key cannot be hashed."""
        try:
            value: T | None = self._values.get(key)
        except TypeError:
            return compute()
        if value is not None:
            return value
        value = self._before.get(key)
        if value is None:
            value = compute()
        if (size := self._size(value)) <= self._half:
            if self._total + size > self._half:
                self._before, self._values, self._total = self._values, {}, 0
            self._values[key] = value
            self._total += size
        return value
