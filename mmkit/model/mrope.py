"""M-RoPE: three positions per token, of time, height and width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..language.spec import Declaration
from .mixin import MultiModalModel


def supply_positions(spec: Declaration, model: Any) -> None:
    """Give a class vLLM's interface for M-RoPE, if its spec has positions.

    A class that defines `get_mrope_input_positions` itself stays as it is.
    """
    has_positions = any(modality.positions is not None for modality in spec.modalities)
    if not has_positions or not issubclass(model, MultiModalModel):
        return
    if "get_mrope_input_positions" not in vars(model):
        model.supports_mrope = True
        model.get_mrope_input_positions = get_mrope_input_positions


def get_mrope_input_positions(
    self: MultiModalModel, input_tokens: Sequence[int], mm_features: Sequence[Any]
) -> tuple[torch.Tensor, int]:
    """Return the positions of a prompt by the grids of its items.

    Text, and items whose modality has no grid, count on from the largest position before them. So
    does each grid, in every dimension.

    Args:
        input_tokens: ids of the prompt.
        mm_features: vLLM's items of the request.

    Returns:
        Integers (3, tokens), and the position after the prompt minus the prompt's length.
    """
    grids = _find_grids(self, mm_features)
    parts: list[np.ndarray] = []
    num_done = 0  # tokens of the prompt whose positions are in `parts`
    next_position = 0
    for offset in sorted(grids):
        num_text = offset - num_done
        parts.append(_count_text(next_position, num_text))
        grid = grids[offset] + next_position + num_text
        parts.append(grid)
        num_done = offset + grid.shape[1]
        next_position = int(grid.max()) + 1
    num_text = len(input_tokens) - num_done
    parts.append(_count_text(next_position, num_text))
    positions = torch.from_numpy(np.concatenate(parts, axis=1))
    return positions, next_position + num_text - len(input_tokens)


def _find_grids(model: MultiModalModel, mm_features: Sequence[Any]) -> dict[int, np.ndarray]:
    """Return integers (3, length), counted from 0, by the offset in the prompt where they begin."""
    grids: dict[int, np.ndarray] = {}
    for feature in mm_features:
        modality = model.mm_plan.modalities[feature.modality]
        if not modality.grid:
            continue
        fields = {name: element.data for name, element in feature.data.items()}
        mask = np.ones(feature.mm_position.length)
        if feature.mm_position.is_embed is not None:
            mask = feature.mm_position.is_embed.numpy()
        for offset, grid in modality.layout_evaluator.evaluate_positions(fields, mask):
            grids[feature.mm_position.offset + offset] = grid
    return grids


def _count_text(start: int, length: int) -> np.ndarray:
    """Return the positions of text, integers (3, length): the same in all dimensions."""
    return np.broadcast_to(np.arange(start, start + length), (3, length))
