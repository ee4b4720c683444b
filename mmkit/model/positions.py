"""M-RoPE: three positions per token, of time, height and width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..spec import Declaration
from .mixin import MultiModalModel


def get_mrope_input_positions(
    self: MultiModalModel, input_tokens: Sequence[int], mm_features: Sequence[Any]
) -> tuple[torch.Tensor, int]:
    """Positions of a prompt by the grids of its items.

    Text, and items whose modality has no grid, count on from the largest position before them. So
    does each grid, in every dimension.

    Args:
        input_tokens: ids of the prompt.
        mm_features: vLLM's items of the request.

    Returns:
        Integers (3, tokens), and the position after the prompt minus the prompt's length.
    """
    runs = []
    for feature in mm_features:
        modality, place = self.mm_plan.modalities[feature.modality], feature.mm_position
        if not modality.grid:
            continue
        fields = {name: element.data for name, element in feature.data.items()}
        mask = np.ones(place.length) if place.is_embed is None else place.is_embed.numpy()
        grids = modality.placeholders.grids(fields, mask)
        runs += [(place.offset + offset, grid) for offset, grid in grids]
    parts, here, following = [], 0, 0
    for offset, grid in sorted(runs, key=lambda run: run[0]):
        text = offset - here
        parts += [_text(following, text), grid + following + text]
        here, following = offset + grid.shape[1], int(parts[-1].max()) + 1
    rest = len(input_tokens) - here
    parts.append(_text(following, rest))
    positions = torch.from_numpy(np.concatenate(parts, axis=1))
    return positions, following + rest - len(input_tokens)


def _text(start: int, length: int) -> Any:
    return np.broadcast_to(np.arange(start, start + length), (3, length))


def supply(spec: Declaration, model: Any) -> None:
    """Give a class vLLM's interface for M-RoPE, if the spec has positions and the class defines
    none itself."""
    declared = any(modality.positions is not None for modality in spec.modalities)
    own = "get_mrope_input_positions" in vars(model)
    if declared and not own and issubclass(model, MultiModalModel):
        model.supports_mrope = True
        model.get_mrope_input_positions = get_mrope_input_positions
