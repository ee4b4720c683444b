"""The largest item of a modality, for which vLLM reserves memory and plans its schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import SpecError
from ..language.items import ItemType
from ..language.layout import ItemTokens

SHRINK_STEPS = 1024
"""The steps in which all sizes of the largest item are made smaller together."""


class LaidOutItem(NamedTuple):
    """An item that mmkit made, and its layout.

    Attributes:
        value: the canonical item.
        tokens: its evaluated layout.
    """

    value: Any
    tokens: ItemTokens


class LargestItem(NamedTuple):
    """The largest item that fits the context.

    Attributes:
        value: the canonical item.
        rows: the number of its encoder rows.
    """

    value: Any
    rows: int


@dataclass(frozen=True)
class LargestItemFinder:
    """Finds the item with the most encoder rows.

    Attributes:
        lay_out: returns the layout of an item that mmkit made; raises SpecError for one that the
            spec refuses.
        max_model_len: the longest context, into which the item has to fit; None for any.
    """

    lay_out: Callable[[Any], ItemTokens]
    max_model_len: int | None

    def find(self, values: Sequence[Any]) -> LaidOutItem:
        """Return the item with the most encoder rows, the first of equals."""
        items = [LaidOutItem(value, self.lay_out(value)) for value in values]
        largest = items[0]
        for item in items:
            if item.tokens.num_embeds > largest.tokens.num_embeds:
                largest = item
        return largest

    def fit(self, item_type: ItemType, largest: LaidOutItem) -> LaidOutItem:
        """Return an item with as many encoder rows as fit the context.

        That is the largest item itself, if it fits. Otherwise it is the best of several: all sizes
        are made smaller together, or one after the other, beginning with each of them. What is best
        depends on the layout: where one size makes encoder rows and another one literals, the rows
        stay if the other one is made smaller.
        """
        if self._fits(largest):
            return largest
        sizes = item_type.sizes(largest.value)
        fitting: list[LaidOutItem] = []
        for first_axis in range(len(sizes)):
            item = self._shrink_axes(item_type, sizes, first_axis)
            if item is not None:
                fitting.append(item)
        if len(sizes) != 1:
            item = self._shrink_together(item_type)
            if item is not None:
                fitting.append(item)
        if not fitting:
            return self.find(item_type.candidates(0.0))
        best = fitting[0]
        for item in fitting:
            if item.tokens.num_embeds > best.tokens.num_embeds:
                best = item
        return best

    def _fits(self, item: LaidOutItem) -> bool:
        return self.max_model_len is None or len(item.tokens) <= self.max_model_len

    def _shrink_together(self, item_type: ItemType) -> LaidOutItem | None:
        """Return the largest fitting item with all sizes made smaller alike; None if none fits."""

        def candidates(step: int) -> list[Any]:
            return item_type.candidates(step / SHRINK_STEPS)

        return self._find_last_fitting(range(1, SHRINK_STEPS), candidates)

    def _shrink_axes(
        self, item_type: ItemType, sizes: Sequence[int], first_axis: int
    ) -> LaidOutItem | None:
        """Return the largest item that fits the context, with one size after another made smaller.

        The first size shrinks to the largest value with which the item fits. Where none fits, it
        becomes 1, and the next size shrinks. None if no item fits.
        """
        bounds = [math.inf] * len(sizes)
        for offset in range(len(sizes)):
            axis = (first_axis + offset) % len(sizes)

            def candidates(size: int, axis: int = axis) -> list[Any]:
                most = list(bounds)
                most[axis] = size
                return item_type.candidates(most=most)

            item = self._find_last_fitting(range(1, sizes[axis] + 1), candidates)
            if item is not None:
                return item
            bounds[axis] = 1
        return None

    def _find_last_fitting(
        self, steps: range, candidates: Callable[[int], list[Any]]
    ) -> LaidOutItem | None:
        """Return the candidate of the last step that fits the context, found by bisection.

        Candidates grow from step to step. One that the spec refuses counts as too small. None if no
        candidate fits.
        """
        fitting: LaidOutItem | None = None
        begin = steps.start
        end = steps.stop
        while begin < end:
            step = (begin + end) // 2
            try:
                item = self.find(candidates(step))
            except SpecError:
                begin = step + 1
                continue
            if self._fits(item):
                fitting = item
                begin = step + 1
            else:
                end = step
        return fitting
