"""vLLM's models without an engine: encoder rows, embeddings and positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader import utils as loading
from vllm.multimodal import utils
from vllm.multimodal.inputs import MultiModalKwargsItems
from vllm.multimodal.parse import DictEmbeddingItems, EmbeddingItems
from vllm.utils.jsontree import json_map_leaves

from ..model.mixin import MultiModalModel
from ..model.mrope import get_mrope_input_positions
from ..vllm_api.items import embeds_size
from .law import NotApplicable
from .subject import Subject
from .vllm_path import Outcome

# options of a configuration that the model has as well
_SHARED = ("trust_remote_code", "skip_tokenizer_init", "hf_overrides")


@contextmanager
def loaded_model(config: ModelConfig, dtype: str = "float32") -> Iterator[Any]:
    """The vLLM model of a checkpoint, on this machine's device, without an engine and with dummy
    weights. Until it is gone, the processor of this configuration works for its dtype."""
    from vllm import distributed
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.torch_utils import set_default_torch_dtype

    options: dict[str, Any] = {name: getattr(config, name) for name in _SHARED}
    options |= {"dtype": dtype, "load_format": "dummy", "enforce_eager": True}
    own = EngineArgs(config.model, **options).create_engine_config()
    with patch.object(config, "dtype", own.model_config.dtype), set_current_vllm_config(own):
        # the store takes a free port itself
        distributed.init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        distributed.ensure_model_parallel_initialized(1, 1)
        try:
            # as vLLM's loader does, which also wants an accelerator's allocator
            device = torch.device(own.device_config.device)
            with set_default_torch_dtype(config.dtype), device:
                model = loading.initialize_model(vllm_config=own)
                get_model_loader(own.load_config).load_weights(model, own.model_config)
                loading.process_weights_after_loading(model, own.model_config, device)
            yield model.eval()
        finally:
            distributed.cleanup_dist_env_and_memory()


def hidden_size(processor: Any) -> int:
    """Width of an embedding row."""
    return embeds_size(processor.info.ctx.model_config)


# -- rows ------------------------------------------------------------------------------------------


def device_of(model: Any) -> torch.device:
    """Where the weights of a model are."""
    return next(model.parameters()).device  # type: ignore[no-any-return]


def batches(items: Sequence[Any], device: Any = "cpu") -> Iterator[Mapping[str, Any]]:
    """The arguments of the calls of a model with items of one modality, in their order."""
    if hasattr(utils, "group_and_batch_mm_items"):
        groups = utils.group_and_batch_mm_items(list(items), device=device)
        yield from (kwargs for _, kwargs in groups)
    else:  # up to 0.15, on the CPU
        yield MultiModalKwargsItems.from_seq(list(items)).get_data()


def rows(model: Any, items: Sequence[Any]) -> list[torch.Tensor]:
    """Encoder rows of items of one modality (vLLM's kwargs items), in their order, on the CPU."""
    groups = batches(items, device_of(model))
    with torch.inference_mode():
        return [row.cpu() for kwargs in groups for row in model.embed_multimodal(**kwargs)]


def filled(item: Any, value: float) -> Any:
    """An item (vLLM's kwargs item) with a value in place of all of its floating ones."""

    def fill(data: Any) -> Any:
        is_floating = isinstance(data, torch.Tensor) and data.is_floating_point()
        return torch.full_like(data, value) if is_floating else data

    filled = {key: replace(e, data=json_map_leaves(fill, e.data)) for key, e in item.items()}
    return type(item)(filled)


def merged(model: Any, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The input of the language model at the positions of these rows."""
    device = device_of(model)
    ids = torch.zeros(sum(map(len, rows)), dtype=torch.long, device=device)
    own = [row.to(device) for row in rows]
    with torch.inference_mode():
        return model.embed_input_ids(ids, own, is_multimodal=ids == 0)  # type: ignore[no-any-return]


# -- embeddings ------------------------------------------------------------------------------------


def embeddings(
    subject: Subject, name: str, rows: Sequence[torch.Tensor], outcome: Outcome
) -> list[Any]:
    """Rows of the items of a request in each form in which a caller may send them in their place.

    A spec declares one. The parser of a hand-written processor may declare a mapping, with more
    about each item; one that declares nothing takes a list, or a mapping all the same.
    """
    fields = outcome.fields[name]
    if subject.plan is not None:
        parser = subject.plan.modalities[name].parser
        companions = {key: [own[key] for own in fields] for key in parser.companions}
        return [{parser.embeds_field: list(rows), **companions}]
    declared = getattr(subject.processor.data_parser, "embedding_fields", {}).get(name)
    if declared:
        return [_as_declared(declared, rows, fields)]
    return [list(rows), {f"{name}_embeds": list(rows)}]


def parsed_embeddings(processor: Any, name: str, sent: Any) -> Any:
    """What a caller sends for embeddings as vLLM's items; None where it is taken for raw items, for
    example a mapping for a list of its keys."""
    items = processor.data_parser.parse_mm_data({name: sent})
    return items if isinstance(items[name], EmbeddingItems | DictEmbeddingItems) else None


def _as_declared(
    declared: Mapping[str, str], rows: Sequence[torch.Tensor], fields: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What sizes the placeholders (a grid, a number of tokens) is taken from the fields of the
    items, or counted."""
    has_grid = any("grid" in key for key in declared)
    values = torch.cat(list(rows)) if has_grid else list(rows)
    sent: dict[str, Any] = dict.fromkeys(declared, torch.tensor([len(own) for own in rows]))
    sent |= {key: values for key, role in declared.items() if role == "values"}
    for key in declared:
        sizes = [_row(item[key]) for item in fields if key in item]
        if len(sizes) == len(rows):
            alike = len({size.shape for size in sizes}) == 1
            sent[key] = torch.stack(sizes) if alike else sizes
    return sent


def _row(value: Any) -> torch.Tensor:
    """A value of one item, without a dimension for the one item."""
    tensor = torch.as_tensor(value)
    return tensor[0] if tensor.ndim > 1 and len(tensor) == 1 else tensor


# -- positions -------------------------------------------------------------------------------------


# Computes positions of several dimensions, integers (dimensions, tokens), and how far the position
# after the prompt is from its length, of ids and of the features of items in prompt order.
Rope = Callable[[list[int], Sequence[Any]], tuple[torch.Tensor, int]]


def rope(subject: Subject, config: Any) -> Rope:
    """The positions that the model class gives. Those that a spec declares are those of mmkit's
    model classes, whatever vLLM has for the checkpoint.

    Args:
        subject: the processor.
        config: what the model class takes for its config.

    Raises:
        NotApplicable: tokens have positions of one dimension, the model class has no method for
            others, or (by the function) they depend on more than the config.
    """
    settings, plan = subject.processor.info.ctx.model_config, subject.plan
    declares = plan is not None and any(m.grid for m in plan.modalities.values())
    if not (declares or settings.uses_mrope or getattr(settings, "uses_xdrope_dim", 0)):
        raise NotApplicable("positions have one dimension")
    model_class: Any = loading.get_model_cls(settings)
    if declares and not issubclass(model_class, MultiModalModel):
        mixin: Any = SimpleNamespace(mm_plan=plan)
        return partial(get_mrope_input_positions, mixin)
    model = model_class.__new__(model_class)
    nn.Module.__init__(model)
    model.config, model.model_config, model.mm_plan = config, settings, plan
    method = getattr(model, "get_mrope_input_positions", None)
    method = method or getattr(model, "get_xdrope_input_positions", None)
    if method is None:
        raise NotApplicable(f"{model_class.__name__} gives no positions of several dimensions")

    def positions(ids: list[int], items: Sequence[Any]) -> tuple[torch.Tensor, int]:
        try:
            found = method(ids, items)
        except AttributeError as error:
            if str(error).startswith(f"'{model_class.__name__}' object has no attribute"):
                raise NotApplicable(f"the positions want a loaded model: {error}") from error
            raise
        # XD-RoPE goes on from the largest
        return found if isinstance(found, tuple) else (found, int(found.max()) + 1 - len(ids))

    return positions
