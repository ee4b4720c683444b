"""The model side of vLLM: its interface, registration, the plan of a model, merging of
embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from vllm import ModelRegistry
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.module_mapping import MultiModelKeys
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    _merge_multimodal_embeddings,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from ..bound.placeholders import rows_field
from ..plan import Plan
from ..plugin import MAIN_MODULES
from . import patches
from .compat import KEEPS_ON_CPU, RENDERS
from .items import embeds_size


class UnmarkedModel(SupportsMultiModal):
    """Methods of the interface that it lacks before vLLM 0.15."""

    def get_language_model(self) -> Any:
        """The part that reads the rows: the first one that embeds ids."""
        return next(child for child in self.children() if hasattr(child, "embed_input_ids"))

    @contextmanager
    def _unmarked(self, *_: Any, **__: Any) -> Iterator[None]:
        yield

    _mark_language_model = _mark_tower_model = _mark_composite_model = _unmarked


ModelInterface: Any = (
    SupportsMultiModal if hasattr(SupportsMultiModal, "_mark_language_model") else UnmarkedModel
)


def register(model: Any, *, info: type, dummy_inputs: type, processor: Any) -> None:
    """Register the processor classes of a model class, and the class itself under its name as
    architecture.

    May be called again for the same class: plugins run in several processes, and more than once in
    some.
    """
    if not KEEPS_ON_CPU:
        fields = {
            name: field
            for modality in processor.spec.modalities
            for name, field in modality.fields.items()
        }
        model.multimodal_cpu_fields = frozenset(
            [name for name, field in fields.items() if field.keep_on_cpu]
            + [rows_field(modality.name) for modality in processor.spec.modalities]
        )
        model.merge_by_field_config = True
    model.supports_multimodal_raw_input_only = processor.spec.is_raw
    if not RENDERS:
        patches.install()
    MULTIMODAL_REGISTRY.register_processor(processor, info=info, dummy_inputs=dummy_inputs)(model)
    known = ModelRegistry.models.get(model.__name__)
    if known is None or getattr(known, "module_name", None) != model.__module__:
        by_name = model.__module__ not in MAIN_MODULES
        ModelRegistry.register_model(
            model.__name__, f"{model.__module__}:{model.__qualname__}" if by_name else model
        )


class Current(NamedTuple):
    """The facts about the model that vLLM is constructing.

    Attributes:
        config: vLLM's configuration of the engine.
        plan: the spec, bound to the model.
        dtype: dtype of the language model.
        width: width of the language model's rows.
        first: whether this is the first process of a tensor-parallel group, whose processes all
            have the same rows.
    """

    config: Any
    plan: Plan
    dtype: torch.dtype
    width: int
    first: bool


def current_model() -> Current:
    """The facts about the model that vLLM is constructing."""
    vllm_config = get_current_vllm_config()
    config = vllm_config.model_config
    make = getattr(MULTIMODAL_REGISTRY, "get_processing_info", None)  # public from 0.20
    plan: Plan = (make or MULTIMODAL_REGISTRY._create_processing_info)(config).plan
    return Current(
        vllm_config, plan, config.dtype, embeds_size(config), get_tensor_model_parallel_rank() == 0
    )


def merge_embeddings(
    inputs_embeds: torch.Tensor, rows: Any, is_multimodal: torch.Tensor
) -> torch.Tensor:
    """Write encoder rows into the positions that receive them, in place."""
    merged: torch.Tensor = _merge_multimodal_embeddings(inputs_embeds, rows, is_multimodal)
    return merged


def weights_loader(model: Any) -> Callable[[Iterable[tuple[str, torch.Tensor]]], set[str]]:
    """vLLM's loader of a model's weights, by the `hf_to_vllm_mapper` of its class."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return partial(AutoWeightsLoader(model).load_weights, mapper=mapper)


def module_names(model: Any, language_model: Any) -> Any:
    """The names of a model's parts for vLLM's LoRA: the parts beside the language model are
    towers."""
    path = next(name for name, part in model.named_modules() if part is language_model).split(".")
    towers = [
        ".".join([*path[:depth], name])
        for depth, inner in enumerate(path)
        for name, part in model.get_submodule(".".join(path[:depth])).named_children()
        if name != inner and any(True for _ in part.parameters())
    ]
    return MultiModelKeys.from_string_field(language_model=f"{'.'.join(path)}.", tower_model=towers)
