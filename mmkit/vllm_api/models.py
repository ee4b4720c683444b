"""The model side of vLLM: registration, the plan of a model, merging of embeddings."""

from __future__ import annotations

from typing import Any

import torch
from vllm import ModelRegistry
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import _merge_multimodal_embeddings
from vllm.multimodal import MULTIMODAL_REGISTRY

from ..plan import Plan
from ..plugin import MAIN_MODULES


def register(model: type, *, info: type, dummy_inputs: type, processor: type) -> None:
    """Register the processor classes of a model class, and the class itself under its name as architecture.

    May be called again for the same class: plugins run in several processes, and more than once in some.
    """
    MULTIMODAL_REGISTRY.register_processor(processor, info=info, dummy_inputs=dummy_inputs)(model)
    known = ModelRegistry.models.get(model.__name__)
    if known is None or getattr(known, "module_name", None) != model.__module__:
        by_name = model.__module__ not in MAIN_MODULES
        ModelRegistry.register_model(model.__name__, f"{model.__module__}:{model.__qualname__}" if by_name else model)


def current_plan() -> Plan:
    """The plan of the model that vLLM is constructing."""
    model_config = get_current_vllm_config().model_config
    plan: Plan = MULTIMODAL_REGISTRY.get_processing_info(model_config).plan
    return plan


def merge_embeddings(inputs_embeds: torch.Tensor, rows: Any, is_multimodal: torch.Tensor) -> torch.Tensor:
    """Write encoder rows into the positions that receive them, in place."""
    merged: torch.Tensor = _merge_multimodal_embeddings(inputs_embeds, rows, is_multimodal)
    return merged
