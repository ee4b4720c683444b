"""M-RoPE: three positions per token, of time, height and width, without an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from .modality import BoundModality


class PromptPositions(NamedTuple):
    """The M-RoPE positions of a prompt.

    Attributes:
        positions: integers (3, tokens).
        delta: the position after the prompt, minus the number of tokens of the prompt.
    """

    positions: torch.Tensor
    delta: int


def compute_positions(num_tokens: int, grids: Mapping[int, np.ndarray]) -> PromptPositions:
    """Return the positions of a prompt by the grids of its items.

    Text, and items whose modality has no grid, count on from the largest position before them. So
    does each grid, in every dimension.

    Args:
        num_tokens: of the prompt.
        grids: integers (3, length), counted from 0, by the offset in the prompt where they begin.
    """
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
    num_text = num_tokens - num_done
    parts.append(_count_text(next_position, num_text))
    positions = torch.from_numpy(np.concatenate(parts, axis=1))
    return PromptPositions(positions, next_position + num_text - num_tokens)


def find_grids(
    modality: BoundModality, fields: Mapping[str, Any], mask: Any, offset: int
) -> dict[int, np.ndarray]:
    """Return the grids of an item, by the offset in the prompt where they begin.

    Args:
        modality: of the item.
        fields: its processed fields.
        mask: which positions of its layout receive encoder rows, an array or a list.
        offset: where its layout begins in the prompt.

    Returns:
        Integers (3, length), counted from 0; empty for a modality without positions.
    """
    grids: dict[int, np.ndarray] = {}
    if modality.grid:
        for start, grid in modality.layout_evaluator.evaluate_positions(fields, mask):
            grids[offset + start] = grid
    return grids


def _count_text(start: int, length: int) -> np.ndarray:
    """Return the positions of text, integers (3, length): the same in all dimensions."""
    return np.broadcast_to(np.arange(start, start + length), (3, length))
