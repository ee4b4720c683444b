"""vLLM's models without an engine: encoder rows, embeddings and positions."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.multimodal import utils
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.parse import DictEmbeddingItems, EmbeddingItems

from ..model.mixin import MultiModalModel
from ..model.positions import get_mrope_input_positions
from ..vllm_api.items import embeds_size
from .vllm_path import NotTaken, Outcome, feature


@contextmanager
def loaded_model(
    config: ModelConfig, load_format: str = "dummy", dtype: str = "float32"
) -> Iterator[Any]:
    """The vLLM model of a checkpoint, on this machine's device, without an engine. Until it is
    gone, the processor of this configuration works for its dtype."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )
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
    before, config.dtype = config.dtype, vllm_config.model_config.dtype
    with set_current_vllm_config(vllm_config):
        init_distributed_environment(1, 0, address, 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        try:
            # as vLLM's loader does, which also wants an accelerator's allocator
            device = torch.device(vllm_config.device_config.device)
            with set_default_torch_dtype(config.dtype), device:
                model = initialize_model(vllm_config=vllm_config)
                get_model_loader(vllm_config.load_config).load_weights(
                    model, vllm_config.model_config
                )
                process_weights_after_loading(model, vllm_config.model_config, device)
            yield model.eval()
        finally:
            config.dtype = before
            cleanup_dist_env_and_memory()


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
        if isinstance(data, list):
            return [fill(part) for part in data]
        if isinstance(data, torch.Tensor) and data.is_floating_point():
            return torch.full_like(data, value)
        return data

    return type(item)({key: replace(e, data=fill(e.data)) for key, e in item.items()})


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
    """Rows of items in every form that a hand-written processor's parser takes for embeddings.

    It may declare a mapping, with more about each item; one that declares nothing takes a list, or
    a mapping all the same.

    Raises:
        Exception: the error with which the parser takes none.
    """
    parser = processor.data_parser
    declared = getattr(parser, "embedding_fields", {}).get(name)
    forms: list[Any] = [list(rows), {f"{name}_embeds": list(rows)}]
    if declared:
        forms = [_as_declared(declared, rows, fields)]
    taken: list[Any] = []
    refusal: Exception | None = None
    for form in forms:
        try:
            items = parser.parse_mm_data({name: form})[name]
        except Exception as error:
            refusal = refusal or error
        else:
            # not a mapping taken for a list of its keys
            if isinstance(items, EmbeddingItems | DictEmbeddingItems):
                taken.append(form)
    if not taken:
        raise refusal or NotTaken(f"the parser takes embeddings of {name} for something else")
    return taken


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


class Rope:
    """Computes positions of several dimensions for the tokens of a request.

    Positions that a spec declares are those of mmkit's model classes, whatever vLLM has for the
    checkpoint.

    Args:
        processor: vLLM's.
        plan: of a generated one, else None.
        config: what the model class takes for its config.

    Raises:
        NotTaken: the model class has no method for them.
    """

    def __init__(self, processor: Any, plan: Any, config: Any) -> None:
        self.config = config
        model_config = processor.info.ctx.model_config
        self._class: Any = get_model_cls(model_config)
        if _declares_positions(plan) and not issubclass(self._class, MultiModalModel):
            mixin: Any = SimpleNamespace(mm_plan=plan)
            self._method: Any = partial(get_mrope_input_positions, mixin)
            return
        model = self._class.__new__(self._class)
        nn.Module.__init__(model)
        model.config, model.model_config, model.mm_plan = config, model_config, plan
        names = ("get_mrope_input_positions", "get_xdrope_input_positions")
        methods = [getattr(model, name) for name in names if hasattr(model, name)]
        if not methods:
            raise NotTaken(f"{self._class.__name__} gives no positions of several dimensions")
        self._method = methods[0]

    def positions(self, ids: list[int], items: Sequence[Any]) -> tuple[torch.Tensor, int]:
        """Of ids and of items as `placed` makes them, integers (dimensions, tokens), and how far
        the position after the prompt is from its length.

        Raises:
            NotTaken: they depend on more than the config.
        """
        try:
            found = self._method(ids, items)
        except AttributeError as error:
            if str(error).startswith(f"'{self._class.__name__}' object has no attribute"):
                raise NotTaken(f"the positions want a loaded model: {error}") from error
            raise
        # XD-RoPE goes on from the largest
        return found if isinstance(found, tuple) else (found, int(found.max()) + 1 - len(ids))


def has_rope(processor: Any, plan: Any) -> bool:
    """Whether tokens have positions of several dimensions, by the config or by the spec."""
    config = processor.info.ctx.model_config
    by_config = config.uses_mrope or getattr(config, "uses_xdrope_dim", 0)
    return bool(by_config or _declares_positions(plan))


def _declares_positions(plan: Any) -> bool:
    """Whether the spec of a plan says what positions the tokens of its items have."""
    return plan is not None and any(m.positions is not None for m in plan.modalities.values())


def placed(outcome: Outcome) -> list[Any]:
    """The items of a request as vLLM's model has them, in the order of the prompt."""
    items = []
    for name, of_items in outcome.items.items():
        for i, item in enumerate(of_items):
            offset, length, mask = outcome.ranges[name][i]
            place = PlaceholderRange(offset, length, None if all(mask) else torch.tensor(mask))
            items.append(feature(item, name, outcome.hashes[name][i], place))
    return sorted(items, key=lambda item: item.mm_position.offset)
