"""What a frozen plan may still learn: caches of bounded size, and values that are found once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")

NOT_CACHEABLE: Any = []
"""A key, or a part of one, for which a `Memo` keeps nothing: a list has no hash."""

_encode_json = json.JSONEncoder(sort_keys=True).encode


def options_key(options: Mapping[str, Any]) -> Any:
    """Return the key of options in a `Memo`; `NOT_CACHEABLE` for values that JSON lacks."""
    try:
        return _encode_json(options)
    except TypeError:
        return NOT_CACHEABLE


class Memo:
    """Caches values by key, up to a total size.

    Values lie in two halves. When the new half is full it becomes the old one, and the values of
    the old half that were not used meanwhile go.

    Args:
        capacity: the total size of both halves.
        size_of: returns the size of a value; by default 1, so that `capacity` counts values.
    """

    def __init__(self, capacity: int, size_of: Callable[[Any], int] | None = None) -> None:
        self._half_capacity = capacity // 2
        self._size_of = size_of
        self._new_size = 0
        self._new: dict[Any, Any] = {}
        self._old: dict[Any, Any] = {}

    def get(self, key: Any, compute: Callable[[], T]) -> T:
        """Return the value of a key, which is computed where it is not cached.

        A key without a hash (see `NOT_CACHEABLE`) is computed each time.
        """
        try:
            value: T | None = self.find(key)
        except TypeError:
            return compute()
        if value is None:
            value = compute()
            self.keep(key, value)
        return value

    def find(self, key: Any) -> Any:
        """Return the value of a key; None where it is not cached.

        Raises:
            TypeError: a key without a hash.
        """
        value = self._new.get(key)
        if value is None and self._old:
            value = self._old.get(key)
            if value is not None:
                self.keep(key, value)
        return value

    def keep(self, key: Any, value: Any) -> None:
        """Cache the value of a key, unless it is larger than a half."""
        size = 1 if self._size_of is None else self._size_of(value)
        if size > self._half_capacity:
            return
        if self._new_size + size > self._half_capacity:
            self._old = self._new
            self._new = {}
            self._new_size = 0
        self._new[key] = value
        self._new_size += size


class Once(Generic[T]):
    """A value that is found when it is first asked for, or that a request tells before."""

    def __init__(self) -> None:
        self._value: T | None = None

    @property
    def value(self) -> T | None:
        """The value; None as long as it is not known."""
        return self._value

    def get(self, find: Callable[[], T]) -> T:
        """Return the value, which is found where it is not known."""
        if self._value is None:
            self._value = find()
        return self._value

    def remember(self, value: T) -> None:
        """Keep a value, unless one is known already."""
        if self._value is None:
            self._value = value
