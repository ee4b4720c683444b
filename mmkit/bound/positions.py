"""M-RoPE positions of the items of one modality."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import SpecError
from ..expr import Scope, evaluate, plain
from ..layout import Placeholder, whole

if TYPE_CHECKING:
    from .modality import BoundModality


class Positions:
    """The grid of the encoder rows of an item."""

    def __init__(self, modality: BoundModality) -> None:
        self._modality, self._at = modality, modality.at("positions")

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
        placeholder = Placeholder([], np.asarray(mask, np.bool_).tobytes())
        scope = self._modality.scope(SimpleNamespace(), 0, fields)
        t, h, w, *scale = self.sizes(scope, placeholder)
        starts = [start for start, _ in placeholder.runs]
        if len(starts) != 1:
            return [(start, np.indices((1, h, w)).reshape(3, -1)) for start in starts]
        grid = np.indices((t, h, w))
        if scale:
            grid[0] = (grid[0] * scale[0]).astype(np.int64)
        return [(starts[0], grid.reshape(3, -1))]

    def sizes(self, scope: Scope, placeholder: Placeholder) -> list[Any]:
        """The declared sizes of an item, compared with its evaluated layout: one run of all its
        rows, or one of each time.

        Args:
            scope: that of the item, with its processed fields.
            placeholder: of which the mask is looked at.

        Raises:
            SpecError: as for `grids`.
        """
        declared = self._modality.grid
        with self._at:
            values = [plain(evaluate(part, scope)) for part in declared]
            pairs = zip(values[:3], declared, strict=False)
            t, h, w = (whole(value, part, "a size of a grid") for value, part in pairs)
            lengths = [length for _, length in placeholder.runs]
            if lengths not in ([t * h * w], [h * w] * t):
                expected = f"embed() positions for a grid of {(t, h, w)}"
                raise SpecError("layout", expected, f"runs of {lengths}")
        return [t, h, w, *values[3:]]
