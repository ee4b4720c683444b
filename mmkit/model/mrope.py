"""vLLM's interface for M-RoPE: three positions per token, of time, height and width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..language.spec import Declaration
from ..plan.mrope import compute_positions, find_grids
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
    """Return the positions of a prompt by the grids of its items; see `compute_positions`.

    Args:
        input_tokens: ids of the prompt.
        mm_features: vLLM's items of the request.

    Returns:
        Integers (3, tokens), and the position after the prompt minus the prompt's length.
    """
    grids: dict[int, np.ndarray] = {}
    for feature in mm_features:
        placeholders = feature.mm_position
        fields = {name: element.data for name, element in feature.data.items()}
        mask = np.ones(placeholders.length)
        if placeholders.is_embed is not None:
            mask = placeholders.is_embed.numpy()
        modality = self.mm_plan.modalities[feature.modality]
        grids |= find_grids(modality, fields, mask, placeholders.offset)
    return compute_positions(len(input_tokens), grids)
