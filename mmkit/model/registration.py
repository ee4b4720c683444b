"""What a model class has to have when it is registered for a spec, and what it gets: M-RoPE, three
positions per token, of time, height and width."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import SpecError
from ..language.names import FORWARD_ARGUMENTS
from ..language.spec import Declaration
from .mixin import MultiModalModel

_OF_MIXIN = {"__init__", "embed_multimodal", "embed_input_ids", "compute_logits"}
"""The methods by which the mixin keeps a spec."""


def check_class(spec: Declaration, model: type) -> None:
    """Refuse a model class that cannot run a spec.

    Raises:
        SpecError: the class is no multimodal model, the mixin is not first among its bases, or an
            `embed_<modality>`, or the `forward` of raw input, is missing or does not take the
            fields by their names.
    """
    where = f"{spec.name}, {model.__name__}"
    remedy = f"Write class {model.__name__}(MultiModalModel, ...)."
    if not issubclass(model, MultiModalModel):
        if not getattr(model, "supports_multimodal", False):
            raise SpecError(where, "a multimodal model", "a class without MultiModalModel", remedy)
        return  # vLLM's own, or written by hand
    for base in model.__mro__[1 : model.__mro__.index(MultiModalModel)]:
        hidden = _OF_MIXIN & vars(base).keys()
        if hidden and not issubclass(base, MultiModalModel):
            got = f"{base.__name__} before it, whose {min(hidden)} hides the mixin's"
            raise SpecError(where, "MultiModalModel first among the bases", got, remedy)
    if model.embed_multimodal is not MultiModalModel.embed_multimodal and not spec.is_raw:
        return
    for modality in spec.modalities:
        method = "forward" if spec.is_raw else f"embed_{modality.name}"
        fields = sorted(name for name, field in modality.fields.items() if not field.hidden)
        if not callable(encode := getattr(model, method, None)):
            raise SpecError(where, f"a method {method}(self, {', '.join(fields)})", "none")
        taken = list(inspect.signature(encode).parameters)[1:]
        beside = set(FORWARD_ARGUMENTS).intersection(taken) if spec.is_raw else ()
        try:
            inspect.signature(encode).bind(None, **dict.fromkeys([*fields, *beside]))
        except TypeError:
            expected = f"the fields ({', '.join(fields)}) as parameters"
            raise SpecError(f"{where}.{method}", expected, f"({', '.join(taken)})") from None


def supply_positions(spec: Declaration, model: Any) -> None:
    """Give a class vLLM's interface for M-RoPE, if the spec has positions and the class defines
    none itself."""
    declared = any(modality.positions is not None for modality in spec.modalities)
    own = "get_mrope_input_positions" in vars(model)
    if declared and not own and issubclass(model, MultiModalModel):
        model.supports_mrope = True
        model.get_mrope_input_positions = get_mrope_input_positions


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
        grids = modality.layout_evaluator.grids(fields, mask)
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
