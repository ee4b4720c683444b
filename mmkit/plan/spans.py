"""Spans of a prompt, and whether one of many overlaps another one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple


class Span(NamedTuple):
    """Positions of a prompt, from `start` to before `stop`, for example the span of an item."""

    start: int
    stop: int

    @property
    def is_anchor(self) -> bool:
        """Whether it has no position: a layout is inserted at `start`."""
        return self.start == self.stop

    def precedes(self, other: Span) -> bool:
        """Return whether this span comes first; at one position, an anchor precedes ids."""
        if self.start == other.start:
            return self.is_anchor and not other.is_anchor
        return self.start < other.start


class Spans:
    """Spans of a prompt, which may overlap one another.

    Thousands of targets and items look for an overlap in one prompt, so that a search reads only
    some of the spans.

    Args:
        spans: in any order. Anchors share no position with another span, and are left out.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self._spans = sorted(span for span in spans if not span.is_anchor)
        # the largest of the stops of each span and of those before it
        self._largest_stops = list(accumulate([span.stop for span in self._spans], max))

    def find_overlapped(self, other: Span) -> Span | None:
        """Return the first span that shares a position with another one; None where none does.

        Args:
            other: no anchor.
        """
        # All spans before the first one that ends behind the start of `other` end before it. If
        # this one begins behind `other`, so do those that follow.
        index = bisect_right(self._largest_stops, other.start)
        if index == len(self._spans):
            return None
        first = self._spans[index]
        if first.start >= other.stop:
            return None
        return first
