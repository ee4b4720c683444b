"""Work on many bytes, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

MAX_INLINE_BYTES = 2**16
"""Bytes that are decoded on the event loop. More would hold up the other requests."""


async def run_in_thread_if_large(
    size: int, function: Callable[..., T], *args: Any, most_bytes: int = MAX_INLINE_BYTES
) -> T:
    """Run a function; in a thread if it works on many bytes, so the event loop stays free.

    Args:
        size: number of bytes that the function works on.
        function: takes `args`.
        args: its arguments.
        most_bytes: the most bytes without a thread.
    """
    if size <= most_bytes:
        return function(*args)
    return await asyncio.to_thread(function, *args)
