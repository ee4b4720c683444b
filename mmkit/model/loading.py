"""Refusal of missing weights, which vLLM does not ask for in its own linear layers. Unexpected ones
`AutoWeightsLoader` refuses."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any

import torch

from ..errors import MmkitError

logger = logging.getLogger(__name__)

Weights = Iterable[tuple[str, torch.Tensor]]

_HEADS = {"score", "classifier", "pooler"}
"""Modules that vLLM adds to a model that it converts; their weights may come from elsewhere than
the checkpoint."""

_NAMED = 20
"""The most names in a message."""


def check_loaded(model: Any, loaded: Collection[str]) -> None:
    """Refuse a model of which a parameter was not loaded, by its name in the model. A quantised one
    may lack parameters, which vLLM fills itself.

    Raises:
        MmkitError: names them.
    """
    if model.mm_engine.quant_config is not None:
        return
    names: dict[int, list[str]] = {}  # a tied parameter has several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    missing = [own[0] for own in names.values() if not {*own} & {*loaded}]
    where = f"{model.mm_spec.name}.load_weights"
    if getattr(model, "is_pooling_model", False):
        heads = [name for name in missing if not _HEADS.isdisjoint(name.split("."))]
        if heads:
            text = "%s: %s not in the checkpoint: arbitrary, unless vLLM or an adapter brings them."
            logger.warning(text, where, ", ".join(heads))
        missing = [name for name in missing if name not in heads]
    if missing:
        shown = ", ".join(sorted(missing)[:_NAMED])
        raise MmkitError(where, "the weights of the model", f"{len(missing)} missing: {shown}")
