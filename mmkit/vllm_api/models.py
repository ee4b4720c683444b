"""The model side of vLLM: its interface, registration, the plan of a model, merging of
embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from vllm import ModelRegistry
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.module_mapping import MultiModelKeys
from vllm.model_executor.models.utils import AutoWeightsLoader, _merge_multimodal_embeddings
from vllm.multimodal import MULTIMODAL_REGISTRY

from ..plan.encoder_rows import rows_field
from ..plan.plan import Plan
from ..plugin import MAIN_MODULES
from . import patches
from .compat import KEEPS_ON_CPU, RENDERS
from .items import embeds_size

merge_embeddings: Any = _merge_multimodal_embeddings
"""Writes encoder rows into the positions that receive them, in place."""


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
    modalities = processor.spec.modalities
    if not KEEPS_ON_CPU:
        fields = [field for modality in modalities for field in modality.fields.items()]
        on_cpu = [name for name, field in fields if field.keep_on_cpu]
        rows = [rows_field(modality.name) for modality in modalities]
        model.multimodal_cpu_fields = frozenset([*on_cpu, *rows])
        model.merge_by_field_config = True
    model.supports_multimodal_raw_input_only = processor.spec.is_raw
    if not RENDERS:
        patches.install()
    MULTIMODAL_REGISTRY.register_processor(processor, info=info, dummy_inputs=dummy_inputs)(model)
    known = ModelRegistry.models.get(model.__name__)
    if known is None or getattr(known, "module_name", None) != model.__module__:
        by_name = model.__module__ not in MAIN_MODULES
        home = f"{model.__module__}:{model.__qualname__}" if by_name else model
        ModelRegistry.register_model(model.__name__, home)


def vllm_module(architecture: str) -> str | None:
    """The module of vLLM's own class of an architecture; None where it has none of that name."""
    known = ModelRegistry.models.get(architecture)
    has_class = getattr(known, "class_name", "") == architecture
    return str(known.module_name) if has_class else None


def current_model() -> tuple[Any, Plan, torch.dtype, int, bool]:
    """The model that vLLM is constructing: vLLM's configuration of the engine, the bound spec, the
    dtype and the width of the language model's rows, and whether this is the first process of a
    tensor-parallel group, whose processes all have the same rows."""
    vllm_config = get_current_vllm_config()
    config = vllm_config.model_config
    make = getattr(MULTIMODAL_REGISTRY, "get_processing_info", None)  # public from 0.20
    plan: Plan = (make or MULTIMODAL_REGISTRY._create_processing_info)(config).plan
    is_first = get_tensor_model_parallel_rank() == 0
    return vllm_config, plan, config.dtype, embeds_size(config), is_first


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
