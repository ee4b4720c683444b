"""M-RoPE positions of the items of one modality."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..errors import SpecError
from ..expr import evaluate, fold, plain
from ..layout import whole
from ..spec import Modality
from .binding import Binding


class Positions:
    """The grid of the encoder rows of an item."""

    def __init__(self, spec: Modality, binding: Binding) -> None:
        self._binding, self._at = binding, binding.at("positions")
        with self._at:
            self._sizes = [fold(part, binding.static) for part in spec.positions or ()]

    def grids(self, fields: Mapping[str, Any], mask: Any) -> list[tuple[int, Any]]:
        """The runs of embed() positions of an item.

        Args:
            fields: its processed fields.
            mask: which positions of its layout receive encoder rows, an array or a list.

        Returns:
            For each run the offset in the layout, and integers (3, length): time, height, width,
            counted from 0.

        Raises:
            SpecError: the grid is not that of the rows.
        """
        scope = self._binding.scope(SimpleNamespace(), 0, fields)
        edges = np.flatnonzero(np.diff(np.asarray(mask, np.int8), prepend=0, append=0)).tolist()
        starts, stops = edges[::2], edges[1::2]
        with self._at:
            values = [plain(evaluate(part, scope)) for part in self._sizes]
            t, h, w = (
                whole(value, part, "a size of a grid")
                for value, part in zip(values[:3], self._sizes, strict=False)
            )
            frames = [np.indices((1, h, w)).reshape(3, -1)] * t
            if len(starts) == 1:
                grid = np.indices((t, h, w))
                if values[3:]:
                    grid[0] = (grid[0] * values[3]).astype(np.int64)
                frames = [grid.reshape(3, -1)]
            lengths = [stop - start for start, stop in zip(starts, stops, strict=True)]
            if lengths != [frame.shape[1] for frame in frames]:
                expected = f"embed() positions for a grid of {(t, h, w)}"
                raise SpecError("layout", expected, f"runs of {lengths}")
        return list(zip(starts, frames, strict=True))
