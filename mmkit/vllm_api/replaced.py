"""Attributes of vLLM's objects that are others for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(target: Any, **attributes: Any) -> Iterator[None]:
    """Other attributes of a module, a class or an instance, inside a block."""
    own = vars(target)
    before = {name: own[name] for name in attributes if name in own}
    for name, value in attributes.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(target, name, before[name])
            else:
                delattr(target, name)
