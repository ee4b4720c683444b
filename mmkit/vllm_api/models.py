"""The model side of vLLM: its interface, registration, a model's plan, merging of embeddings."""

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
from vllm.model_executor.models.utils import AutoWeightsLoader, _merge_multimodal_embeddings
from vllm.multimodal import MULTIMODAL_REGISTRY

from ..language.spec import Declaration
from ..plan.encoder_rows import row_count_field
from ..plan.plan import Plan
from ..plugin import check_claim, is_of_script
from . import patches
from .compat import KEEPS_ON_CPU, RENDERS
from .items import get_embeds_size

merge_embeddings: Any = _merge_multimodal_embeddings
"""Writes encoder rows into the positions that receive them, in place."""


class UnmarkedModel(SupportsMultiModal):
    """Methods of the interface that it lacks before vLLM 0.15."""

    def get_language_model(self) -> Any:
        """Return the part that reads the rows: the first part that embeds ids."""
        for child in self.children():
            if hasattr(child, "embed_input_ids"):
                return child
        raise LookupError("no part of the model embeds ids")

    # each is a context that the model enters for a part
    @contextmanager
    def _mark_nothing(self, *_: Any, **__: Any) -> Iterator[None]:
        yield

    _mark_language_model = _mark_tower_model = _mark_composite_model = _mark_nothing


ModelInterface: Any = (
    SupportsMultiModal if hasattr(SupportsMultiModal, "_mark_language_model") else UnmarkedModel
)


def register(model: Any, *, info: type, dummy_inputs: type, processor: Any) -> None:
    """Register a model class and its processor classes with vLLM.

    The architecture is the name of the model class.

    May be called again for the same class: plugins run in several processes, and more than once in
    some.
    """
    prepare(model, processor.spec)
    model.supports_multimodal_raw_input_only = processor.spec.is_raw
    MULTIMODAL_REGISTRY.register_processor(processor, info=info, dummy_inputs=dummy_inputs)(model)
    check_claim(model.__name__, model.__module__)
    registered = ModelRegistry.models.get(model.__name__)
    if registered is None or getattr(registered, "module_name", None) != model.__module__:
        entry = model
        if not is_of_script(model.__module__):
            entry = f"{model.__module__}:{model.__qualname__}"
        ModelRegistry.register_model(model.__name__, entry)


def prepare(model: Any, spec: Declaration) -> None:
    """Prepare vLLM and a model class for a spec, where a release needs it."""
    if not RENDERS:
        patches.install()
    if KEEPS_ON_CPU:
        return
    cpu_fields: set[str] = set()
    for modality in spec.modalities:
        cpu_fields.add(row_count_field(modality.name))
        for name, field in modality.fields.items():
            if field.keep_on_cpu:
                cpu_fields.add(name)
    model.multimodal_cpu_fields = frozenset(cpu_fields)
    model.merge_by_field_config = True


class CurrentModel(NamedTuple):
    """A model that vLLM is constructing.

    Attributes:
        vllm_config: vLLM's configuration of the engine.
        info: vLLM's processing info, which has the plan.
        plan: the bound spec.
        dtype: the dtype of the language model's rows.
        width: the width of these rows.
        is_first: whether this is the first process of a tensor-parallel group, whose processes all
            have the same rows.
    """

    vllm_config: Any
    info: Any
    plan: Plan
    dtype: torch.dtype
    width: int
    is_first: bool


def get_current_model() -> CurrentModel:
    """Return the model that vLLM is constructing in this context."""
    vllm_config = get_current_vllm_config()
    config = vllm_config.model_config
    make = getattr(MULTIMODAL_REGISTRY, "get_processing_info", None)  # public from 0.20
    info = (make or MULTIMODAL_REGISTRY._create_processing_info)(config)
    is_first = get_tensor_model_parallel_rank() == 0
    width = get_embeds_size(config)
    return CurrentModel(vllm_config, info, info.plan, config.dtype, width, is_first)


def make_weights_loader(model: Any) -> Callable[[Iterable[tuple[str, torch.Tensor]]], set[str]]:
    """Return vLLM's loader of a model's weights, by the `hf_to_vllm_mapper` of its class."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return partial(AutoWeightsLoader(model).load_weights, mapper=mapper)


def find_module_names(model: Any, language_model: Any) -> Any:
    """Return the names of a model's parts, for vLLM's LoRA.

    The parts outside the language model are towers.
    """
    path = _find_path(model, language_model)
    towers: list[str] = []
    parent = model
    for depth, inner_name in enumerate(path):
        for name, part in parent.named_children():
            if name != inner_name and _has_parameters(part):
                towers.append(".".join([*path[:depth], name]))
        parent = parent.get_submodule(inner_name)
    return MultiModelKeys.from_string_field(language_model=f"{'.'.join(path)}.", tower_model=towers)


def _find_path(model: Any, part: Any) -> list[str]:
    """Return the names that lead from a model to one of its parts."""
    for name, module in model.named_modules():
        if module is part:
            return list(name.split("."))
    raise LookupError("the model has no such part")


def _has_parameters(module: Any) -> bool:
    for _ in module.parameters():
        return True
    return False
