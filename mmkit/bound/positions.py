"""M-RoPE positions of the items of one modality."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..errors import SpecError
from ..expr import Leaf, evaluate, plain
from ..layout import Placeholder, whole
from ..node import leaves
from .binding import Binding


class Positions:
    """The grid of the encoder rows of an item."""

    def __init__(self, binding: Binding) -> None:
        self._binding, self._at, self._sizes = binding, binding.at("positions"), binding.grid

    def check(self, fields: Mapping[str, Any], placeholder: Placeholder) -> None:
        """Compare the grid of an item with its layout.

        Args:
            fields: its processed fields.
            placeholder: its evaluated layout.

        Raises:
            SpecError: the grid has another number of positions than the layout has rows.
        """
        self._sizes_of(fields, [length for _, length in placeholder.runs])

    def leaves(self) -> frozenset[Leaf]:
        """What the grid of an item depends on."""
        return leaves(self._sizes)

    def grids(self, fields: Mapping[str, Any], mask: Any) -> list[tuple[int, Any]]:
        """The runs of embed() positions of an item.

        Args:
            fields: its processed fields.
            mask: which positions of its layout receive encoder rows, an array or a list.

        Returns:
            For each run the offset in the layout, and integers (3, length): time, height, width,
            counted from 0.

        Raises:
            SpecError: the grid has another number of positions than the layout has rows.
        """
        edges = np.flatnonzero(np.diff(np.asarray(mask, np.int8), prepend=0, append=0)).tolist()
        starts, stops = edges[::2], edges[1::2]
        lengths = [stop - start for start, stop in zip(starts, stops, strict=True)]
        t, h, w, *scale = self._sizes_of(fields, lengths)
        if len(starts) != 1:
            return [(start, np.indices((1, h, w)).reshape(3, -1)) for start in starts]
        grid = np.indices((t, h, w))
        if scale:
            grid[0] = (grid[0] * scale[0]).astype(np.int64)
        return [(starts[0], grid.reshape(3, -1))]

    def _sizes_of(self, fields: Mapping[str, Any], lengths: list[int]) -> list[Any]:
        """The declared sizes of an item whose runs of embed() positions have these lengths: one run
        of all its rows, or one of each time."""
        scope = self._binding.scope(SimpleNamespace(), 0, fields)
        with self._at:
            values = [plain(evaluate(part, scope)) for part in self._sizes]
            t, h, w = (
                whole(value, part, "a size of a grid")
                for value, part in zip(values[:3], self._sizes, strict=False)
            )
            if lengths not in ([t * h * w], [h * w] * t):
                expected = f"embed() positions for a grid of {(t, h, w)}"
                raise SpecError("layout", expected, f"runs of {lengths}")
        return [t, h, w, *values[3:]]
