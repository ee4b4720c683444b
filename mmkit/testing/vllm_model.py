"""vLLM's models without an engine: encoder rows, embeddings and positions."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader import utils as loading
from vllm.multimodal import utils
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.parse import DictEmbeddingItems, EmbeddingItems
from vllm.utils.jsontree import json_map_leaves

from ..model.mixin import MultiModalModel
from ..model.positions import get_mrope_input_positions
from ..vllm_api.items import embeds_size
from .law import NotApplicable
from .vllm_path import Outcome, features, in_prompt_order


@contextmanager
def loaded_model(
    config: ModelConfig, load_format: str = "dummy", dtype: str = "float32"
) -> Iterator[Any]:
    """The vLLM model of a checkpoint, on this machine's device, without an engine. Until it is
    gone, the processor of this configuration works for its dtype."""
    from vllm import distributed
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.torch_utils import set_default_torch_dtype

    vllm_config = EngineArgs(
        model=config.model,
        dtype=dtype,
        load_format=load_format,
        enforce_eager=True,
        trust_remote_code=config.trust_remote_code,
        skip_tokenizer_init=config.skip_tokenizer_init,
        hf_overrides=config.hf_overrides,
    ).create_engine_config()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    of_model = patch.object(config, "dtype", vllm_config.model_config.dtype)
    with of_model, set_current_vllm_config(vllm_config):
        distributed.init_distributed_environment(1, 0, address, 0, "gloo")
        distributed.ensure_model_parallel_initialized(1, 1)
        try:
            # as vLLM's loader does, which also wants an accelerator's allocator
            device = torch.device(vllm_config.device_config.device)
            with set_default_torch_dtype(config.dtype), device:
                model = loading.initialize_model(vllm_config=vllm_config)
                loader = get_model_loader(vllm_config.load_config)
                loader.load_weights(model, vllm_config.model_config)
                loading.process_weights_after_loading(model, vllm_config.model_config, device)
            yield model.eval()
        finally:
            distributed.cleanup_dist_env_and_memory()


def hidden_size(processor: Any) -> int:
    """Width of an embedding row."""
    return embeds_size(processor.info.ctx.model_config)


# -- rows ------------------------------------------------------------------------------------------


def batches(items: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """The arguments of the calls of a model with items of one modality, in their order."""
    if hasattr(utils, "group_and_batch_mm_items"):
        yield from (kwargs for _, kwargs in utils.group_and_batch_mm_items(list(items)))
    else:  # up to 0.15
        yield MultiModalKwargsItems.from_seq(list(items)).get_data()


def rows(model: Any, items: Sequence[Any]) -> list[torch.Tensor]:
    """Encoder rows of items of one modality (vLLM's kwargs items), in their order."""
    with torch.inference_mode():
        return [row for kwargs in batches(items) for row in model.embed_multimodal(**kwargs)]


def filled(item: Any, value: float) -> Any:
    """An item (vLLM's kwargs item) with a value in place of all of its floating ones."""

    def fill(data: Any) -> Any:
        is_floating = isinstance(data, torch.Tensor) and data.is_floating_point()
        return torch.full_like(data, value) if is_floating else data

    filled = {key: replace(e, data=json_map_leaves(fill, e.data)) for key, e in item.items()}
    return type(item)(filled)


def embedded(model: Any, modality: Any, item: Any, embeds: torch.Tensor) -> list[torch.Tensor]:
    """The rows of one precomputed embedding, (rows, hidden_size), in place of an item of vLLM's
    kwargs."""
    intake = modality.intake
    sent = {key: item[key].data[None] for key in intake.companions}
    sent[intake.embeds_field] = intake.embeds_as.batch([embeds])
    with torch.inference_mode():
        return list(model.embed_multimodal(**sent))


def merged(model: Any, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The input of the language model at the positions of these rows."""
    ids = torch.zeros(sum(map(len, rows)), dtype=torch.long)
    everywhere = torch.ones_like(ids).bool()
    with torch.inference_mode():
        return model.embed_input_ids(ids, list(rows), is_multimodal=everywhere)  # type: ignore[no-any-return]


# -- embeddings ------------------------------------------------------------------------------------


def embeddings(
    processor: Any, name: str, rows: Sequence[torch.Tensor], fields: Sequence[Mapping[str, Any]]
) -> list[Any]:
    """Rows of items in each form that a hand-written processor's parser may take for embeddings.

    It may declare a mapping, with more about each item; one that declares nothing takes a list, or
    a mapping all the same.
    """
    declared = getattr(processor.data_parser, "embedding_fields", {}).get(name)
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
    counts = torch.tensor([len(of_item) for of_item in rows])
    has_grid = any("grid" in key for key in declared)
    values = torch.cat(list(rows)) if has_grid else list(rows)
    sent: dict[str, Any] = {}
    for key, role in declared.items():
        sizes = [_row(item[key]) for item in fields if key in item]
        if not sizes or len(sizes) != len(rows):
            sent[key] = values if role == "values" else counts
        elif len({size.shape for size in sizes}) == 1:
            sent[key] = torch.stack(sizes)
        else:
            sent[key] = sizes
    return sent


def _row(value: Any) -> torch.Tensor:
    """A value of one item, without a dimension for the one item."""
    tensor = torch.as_tensor(value)
    return tensor[0] if tensor.ndim > 1 and len(tensor) == 1 else tensor


# -- positions -------------------------------------------------------------------------------------


def rope(
    processor: Any, plan: Any, config: Any
) -> Callable[[list[int], Sequence[Any]], tuple[torch.Tensor, int]]:
    """A function that computes positions of several dimensions, integers (dimensions, tokens), and
    how far the position after the prompt is from its length, of ids and of items as `placed` makes
    them.

    Positions that a spec declares are those of mmkit's model classes, whatever vLLM has for the
    checkpoint.

    Args:
        processor: vLLM's.
        plan: of a generated one, else None.
        config: what the model class takes for its config.

    Raises:
        NotApplicable: tokens have positions of one dimension, the model class has no method for
            others, or (by the function) they depend on more than the config.
    """
    settings = processor.info.ctx.model_config
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


def placed(outcome: Outcome) -> list[Any]:
    """The items of a request as vLLM's model has them, in the order of the prompt."""
    places = {name: [_place(*at) for at in own] for name, own in outcome.ranges.items()}
    return in_prompt_order(features(outcome.items, outcome.hashes, places))


def _place(offset: int, length: int, mask: Sequence[bool]) -> PlaceholderRange:
    return PlaceholderRange(offset, length, None if all(mask) else torch.tensor(mask))
