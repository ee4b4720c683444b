"""vLLM's models without an engine: encoder rows, embeddings and positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.multimodal import utils
from vllm.multimodal.inputs import MultiModalKwargsItems
from vllm.multimodal.parse import DictEmbeddingItems, EmbeddingItems
from vllm.utils.jsontree import json_map_leaves

from ..vllm_api.items import get_embeds_size
from .law import NotApplicable
from .subject import Subject
from .vllm_path import Outcome

# Options that are copied from the config of the processor to the config of the model.
_COPIED_OPTIONS = ("trust_remote_code", "skip_tokenizer_init", "hf_overrides")


@contextmanager
def load_model(config: ModelConfig, dtype: str = "float32") -> Iterator[Any]:
    """Load the vLLM model of a checkpoint for a `with` block, with dummy weights.

    The model is on this machine's device, and has no engine. Inside the block, the processor of
    this config works for the dtype of the model.
    """
    # all that vLLM needs to load models takes seconds to import, and most laws load none
    from vllm import distributed
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader import utils as loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    options: dict[str, Any] = {"dtype": dtype, "load_format": "dummy", "enforce_eager": True}
    for name in _COPIED_OPTIONS:
        options[name] = getattr(config, name)
    engine_config = EngineArgs(config.model, **options).create_engine_config()
    model_config = engine_config.model_config
    with (
        patch.object(config, "dtype", model_config.dtype),
        set_current_vllm_config(engine_config),
    ):
        # with port 0 the store takes a free port itself
        distributed.init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        distributed.ensure_model_parallel_initialized(1, 1)
        try:
            # The steps of vLLM's loader, which itself also wants an accelerator's allocator.
            device = torch.device(engine_config.device_config.device)
            with set_default_torch_dtype(config.dtype), device:
                model = loading.initialize_model(vllm_config=engine_config)
                loader = get_model_loader(engine_config.load_config)
                loader.load_weights(model, model_config)
                loading.process_weights_after_loading(model, model_config, device)
            yield model.eval()
        finally:
            distributed.cleanup_dist_env_and_memory()


def get_hidden_size(processor: Any) -> int:
    """Return the width of an embedding row."""
    return get_embeds_size(processor.info.ctx.model_config)


# -- rows ------------------------------------------------------------------------------------------


def get_device(model: Any) -> torch.device:
    """Return the device of a model's weights."""
    return next(model.parameters()).device  # type: ignore[no-any-return]


def batch_items(items: Sequence[Any], device: Any = "cpu") -> Iterator[Mapping[str, Any]]:
    """Yield the keyword arguments with which vLLM calls a model for items of one modality.

    Args:
        items: vLLM's kwargs items, in their order.
        device: where the tensors go.
    """
    if hasattr(utils, "group_and_batch_mm_items"):
        for _, kwargs in utils.group_and_batch_mm_items(list(items), device=device):
            yield kwargs
    else:  # up to 0.15, on the CPU
        yield MultiModalKwargsItems.from_seq(list(items)).get_data()


def compute_rows(model: Any, items: Sequence[Any]) -> list[torch.Tensor]:
    """Return the encoder rows of items of one modality, on the CPU.

    Args:
        model: vLLM's model.
        items: vLLM's kwargs items.

    Returns:
        One tensor (rows, width) per item, in their order.
    """
    of_items = []
    with torch.inference_mode():
        for kwargs in batch_items(items, get_device(model)):
            for of_item in model.embed_multimodal(**kwargs):
                of_items.append(of_item.cpu())
    return of_items


def fill_item(item: Any, value: float) -> Any:
    """Return a copy of an item (vLLM's kwargs item) whose floating-point data is all one value."""

    def fill(data: Any) -> Any:
        if isinstance(data, torch.Tensor) and data.is_floating_point():
            return torch.full_like(data, value)
        return data

    elements = {}
    for key, element in item.items():
        elements[key] = replace(element, data=json_map_leaves(fill, element.data))
    return type(item)(elements)


def merge_rows(model: Any, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what the language model gets at the positions of these rows, (positions, width)."""
    device = get_device(model)
    count = sum(len(of_item) for of_item in rows)
    ids = torch.zeros(count, dtype=torch.long, device=device)
    is_multimodal = torch.ones(count, dtype=torch.bool, device=device)
    on_device = [of_item.to(device) for of_item in rows]
    with torch.inference_mode():
        return model.embed_input_ids(  # type: ignore[no-any-return]
            ids, on_device, is_multimodal=is_multimodal
        )


# -- embeddings ------------------------------------------------------------------------------------


def list_embedding_forms(
    subject: Subject, name: str, rows: Sequence[torch.Tensor], outcome: Outcome
) -> list[Any]:
    """Return rows of the items of a request in each form in which a caller may send them.

    A spec declares one form. The parser of a hand-written processor may declare a mapping with more
    about each item; one that declares nothing takes a list, or a mapping all the same.

    Args:
        subject: the processor.
        name: the modality of the items.
        rows: the rows of each item.
        outcome: of the request with the items themselves.
    """
    fields = outcome.fields[name]
    if subject.plan is not None:
        parser = subject.plan.modalities[name].parser
        form = {parser.embeds_field: list(rows)}
        for key in parser.companions:
            form[key] = [of_item[key] for of_item in fields]
        return [form]
    declared = getattr(subject.processor.data_parser, "embedding_fields", {}).get(name)
    if declared:
        return [_write_declared_form(declared, rows, fields)]
    return [list(rows), {f"{name}_embeds": list(rows)}]


def parse_embeddings(processor: Any, name: str, form: Any) -> Any:
    """Parse what a caller sends for embeddings, and return vLLM's items.

    Returns:
        None where the parser takes the form for raw items, for example a mapping for a list of its
        keys.
    """
    items = processor.data_parser.parse_mm_data({name: form})
    if isinstance(items[name], EmbeddingItems | DictEmbeddingItems):
        return items
    return None


def _write_declared_form(
    declared: Mapping[str, str], rows: Sequence[torch.Tensor], fields: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return rows in the form that the parser of a hand-written processor declares.

    Values that size the placeholders (a grid, a number of tokens) are taken from the fields of the
    items; where the items have none, they are the numbers of rows.

    Args:
        declared: the roles of the keys; the key of the rows has the role ``values``.
        rows: the rows of each item.
        fields: the fields of each item.
    """
    values: Any = list(rows)
    if any("grid" in key for key in declared):
        values = torch.cat(values)
    lengths = torch.tensor([len(of_item) for of_item in rows])
    form: dict[str, Any] = {}
    for key, role in declared.items():
        form[key] = values if role == "values" else lengths
        sizes = []
        for item in fields:
            if key in item:
                sizes.append(_drop_item_dimension(item[key]))
        if len(sizes) == len(rows):
            form[key] = _stack_if_alike(sizes)
    return form


def _stack_if_alike(tensors: list[torch.Tensor]) -> Any:
    """Return tensors of one shape as one tensor, and others as a list."""
    shapes = {tensor.shape for tensor in tensors}
    if len(shapes) == 1:
        return torch.stack(tensors)
    return tensors


def _drop_item_dimension(value: Any) -> torch.Tensor:
    """Return a value of one item as a tensor without a dimension for the one item."""
    tensor = torch.as_tensor(value)
    if tensor.ndim > 1 and len(tensor) == 1:
        return tensor[0]
    return tensor


# -- positions -------------------------------------------------------------------------------------


# Computes positions of several dimensions, integers (dimensions, tokens), and how far the position
# after the prompt is from its length, of ids and of the features of items in prompt order.
Rope = Callable[[list[int], Sequence[Any]], tuple[torch.Tensor, int]]


def find_rope(subject: Subject, config: Any) -> Rope:
    """Return the function of the model class that computes positions.

    Positions that a spec declares are those of mmkit's model classes, whatever vLLM has for the
    checkpoint.

    Args:
        subject: the processor.
        config: what the model class takes for its config.

    Raises:
        NotApplicable: tokens have positions of one dimension, the model class has no method for
            others, or (by the function) they depend on more than the config.
    """
    model_config = subject.processor.info.ctx.model_config
    plan = subject.plan
    is_declared = False
    if plan is not None:
        is_declared = any(modality.grid for modality in plan.modalities.values())
    has_dimensions = model_config.uses_mrope or getattr(model_config, "uses_xdrope_dim", 0)
    if not is_declared and not has_dimensions:
        raise NotApplicable("positions have one dimension")
    from vllm.model_executor.model_loader import utils as loading

    from ..model.mixin import MultiModalModel

    model_class: Any = loading.get_model_cls(model_config)
    if is_declared and not issubclass(model_class, MultiModalModel):
        return _make_declared_rope(plan)
    return _make_rope_of_class(model_class, config, model_config, plan)


def _make_declared_rope(plan: Any) -> Rope:
    """Return the function of mmkit's mixin, which reads only the plan of a model."""
    from ..model.mrope import get_mrope_input_positions

    mixin: Any = SimpleNamespace(mm_plan=plan)

    def compute_positions(ids: list[int], items: Sequence[Any]) -> tuple[torch.Tensor, int]:
        return get_mrope_input_positions(mixin, ids, items)

    return compute_positions


def _make_rope_of_class(model_class: Any, config: Any, model_config: Any, plan: Any) -> Rope:
    """Return the method of a model class, bound to a model that has a config and no weights.

    Raises:
        NotApplicable: the class has no such method.
    """
    # without `__init__`, which would make the layers: most methods read only the config
    model = model_class.__new__(model_class)
    nn.Module.__init__(model)
    model.config = config
    model.model_config = model_config
    model.mm_plan = plan
    method = getattr(model, "get_mrope_input_positions", None)
    if method is None:
        method = getattr(model, "get_xdrope_input_positions", None)
    if method is None:
        raise NotApplicable(f"{model_class.__name__} gives no positions of several dimensions")

    def compute_positions(ids: list[int], items: Sequence[Any]) -> tuple[torch.Tensor, int]:
        try:
            result = method(ids, items)
        except AttributeError as error:
            if str(error).startswith(f"'{model_class.__name__}' object has no attribute"):
                raise NotApplicable(f"the positions want a loaded model: {error}") from error
            raise
        if isinstance(result, tuple):
            return result
        # XD-RoPE gives only positions; generated tokens go on from the largest one
        return result, int(result.max()) + 1 - len(ids)

    return compute_positions
