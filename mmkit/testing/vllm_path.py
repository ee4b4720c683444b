"""vLLM's processing path as plain Python, without an engine: processors, requests and caches."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from pydantic import ValidationError
from torch import nn
from transformers import PretrainedConfig
from vllm import ModelRegistry
from vllm.config import ModelConfig
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.cache import MultiModalProcessorOnlyCache
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItems
from vllm.multimodal.processing import BaseMultiModalProcessor, InputProcessingContext
from vllm.plugins import load_general_plugins as load_general_plugins

from ..errors import MmkitError, SpecError, VllmApiError
from ..language.layout import Insert
from ..plan.encoder_rows import rows_field
from ..plan.placement import ItemLayout
from ..training.saving import TOKENIZER_FILES
from ..vllm_api import compat
from ..vllm_api.compat import ProcessorInputs, find
from ..vllm_api.exchange import adopted, exchanged
from ..vllm_api.processor import CommonProcessor, Request

_Cache = find("multimodal.cache.base:MultiModalCache", "multimodal.cache:MultiModalCache")
_SenderCache = find(
    "multimodal.cache:LruKeyReplicatedSenderCache",
    "multimodal.cache:MultiModalProcessorSenderCache",
)
_ReceiverCache = find(
    "multimodal.cache:LruKeyReplicatedReceiverCache", "multimodal.cache:MultiModalReceiverCache"
)
_PromptIndex = find(
    "multimodal.processing.processor:PromptIndex", "multimodal.processing:PromptIndex"
)
_image_loader = find("multimodal.media.image:ImageMediaIO", "multimodal.image:ImageMediaIO")
_tokenizer = find(
    "tokenizers:cached_tokenizer_from_config",
    "transformers_utils.tokenizer:cached_tokenizer_from_config",
)

Miss: Any = None
with suppress(VllmApiError):  # before 0.28 the engine's half of a cache asserts
    Miss = find("multimodal.cache:MultiModalCacheMissError")

# A processor cache so small that items are evicted from it. Before 0.29 vLLM refuses items larger
# than the cache.
LEAST_CACHE_GIB = 1e-6 if hasattr(MultiModalProcessorOnlyCache, "cache_if_fits") else 0.01

# Up to 0.28 a prompt passes the processor with the items, and may be a text.
_main = BaseMultiModalProcessor._apply_hf_processor_main
_TEXT_PROMPTS = "prompt" in inspect.signature(_main).parameters

# what a caller writes into ``multi_modal_data``, or into `mm_processor_kwargs`
Data = Mapping[str, Any]


# -- processors ------------------------------------------------------------------------------------


class StandIn(nn.Module, SupportsMultiModal):
    """A model class that runs nothing, where vLLM wants one and there is none."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    def _nothing(self, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError

    embed_input_ids = embed_multimodal = forward = compute_logits = _nothing


def stand_in(*architectures: str, model: type = StandIn) -> None:
    """Let vLLM accept checkpoints of architectures that it does not know, and take what it reads
    from the class of such a model from this one."""
    for architecture in set(architectures) - set(ModelRegistry.get_supported_archs()):
        ModelRegistry.register_model(architecture, model)


def architectures_of(folder: str | Path) -> list[str]:
    """The model classes that the config of a checkpoint names."""
    known, _ = PretrainedConfig.get_config_dict(str(folder))
    return list(known.get("architectures") or [])


def model_config(folder: str | Path, **options: Any) -> ModelConfig:
    """The config of a checkpoint folder, in float32; without a tokenizer if the folder has none.
    Plugins are loaded first: config classes are theirs. What code the folder brings is run with
    `trust_remote_code=True` alone.

    Raises:
        MmkitError: the model class cannot be imported.
        SpecError: the spec of the model class does not fit the checkpoint.
    """
    load_general_plugins()
    tokenizer = any((Path(folder) / name).exists() for name in TOKENIZER_FILES)
    defaults = {"dtype": "float32", "seed": 0, "mm_processor_cache_gb": 1}
    settings = {**defaults, "skip_tokenizer_init": not tokenizer, **options}
    try:
        return ModelConfig(model=str(folder), tokenizer=str(folder), **settings)
    except ValueError as error:
        if "failed to be inspected" in str(error):
            _import_models(architectures_of(folder))
        details = error.errors() if isinstance(error, ValidationError) else []
        for own in (detail.get("ctx", {}).get("error") for detail in details):
            if isinstance(own, SpecError):  # vLLM binds it to learn the modalities
                raise own from error
        raise


def _import_models(architectures: Sequence[str]) -> None:
    """Find the exception of which vLLM says only that it is in the logs: its inspection imports the
    model in another process."""
    for name in ModelRegistry.models.keys() & {*architectures}:
        try:
            ModelRegistry.models[name].load_model_cls()
        except Exception as error:
            got = f"{type(error).__name__}: {error}".rstrip(".")
            raise MmkitError(name, "a model class that can be imported", got) from error


def config_for_spec(folder: str | Path, **options: Any) -> ModelConfig:
    """`model_config`, of a model that vLLM need not know, or knows as one of text alone: its config
    may name the language model that a spec adds a modality to."""
    names = architectures_of(folder)
    stand_in(*names)
    config = model_config(folder, **options)
    overrides = options.get("hf_overrides", {})
    if config.is_multimodal_model or not isinstance(overrides, Mapping):
        return config
    stand_ins = [f"MultiModal{name}" for name in names]
    stand_in(*stand_ins)
    return model_config(
        folder, **{**options, "hf_overrides": {**overrides, "architectures": stand_ins}}
    )


def registered(config: ModelConfig) -> Any:
    """The processor that vLLM makes for a checkpoint, whoever wrote it."""
    return MULTIMODAL_REGISTRY.create_processor(config)


def generated(classes: Any, config: ModelConfig) -> Any:
    """A processor of classes as `ModelSpec.classes` has them, or `factories_of`; vLLM need not know
    the model."""
    tokenizer = None if config.skip_tokenizer_init else _tokenizer(config)
    info = classes.info(InputProcessingContext(config, tokenizer))
    return classes.processor(info, classes.dummy_inputs(info))


def factories_of(model: Any) -> Any:
    """The classes that are registered for a model class; None if there are none."""
    in_registry = getattr(MULTIMODAL_REGISTRY, "_processor_factories", {})  # before 0.12
    return getattr(model, "_processor_factory", None) or in_registry.get(model)


# -- requests --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result of a processor for a request.

    Attributes:
        ids: the prompt with the placeholders in it.
        ranges: per modality and item, offset, length, and for each position whether it receives an
            encoder row.
        fields: per modality and item, the tensors (or other values) that reach the model, by field.
        hashes: per modality and item.
        features: per modality, the items as the API server sends them to the engine.
    """

    ids: list[int]
    ranges: dict[str, list[tuple[int, int, tuple[bool, ...]]]]
    fields: dict[str, list[dict[str, Any]]]
    hashes: dict[str, list[str]]
    features: dict[str, list[MultiModalFeatureSpec]] = field(repr=False)

    @property
    def items(self) -> dict[str, list[Any]]:
        """Per modality, vLLM's own form of the fields."""
        return {name: [feature.data for feature in own] for name, own in self.features.items()}

    def mask(self, name: str, index: int) -> tuple[bool, ...]:
        """Which positions of an item receive encoder rows; none where it has no range."""
        ranges = self.ranges.get(name, [])
        return ranges[index][2] if index < len(ranges) else ()

    def values(self, name: str, index: int) -> dict[str, Any]:
        """The fields of an item; none where nothing of it reaches the model."""
        items = self.fields.get(name, [])
        return items[index] if index < len(items) else {}

    @property
    def gib(self) -> float:
        """The size of the items in vLLM's caches, in GiB."""
        size: int = sum(_Cache.get_item_size(item) for own in self.items.values() for item in own)
        return size / 2**30


def run(
    processor: Any,
    prompt: str | Sequence[int],
    data: Data,
    kwargs: Data | None = None,
    caches: Caches | None = None,
    *,
    direct: bool = False,
    uuids: Mapping[str, Sequence[str | None]] | None = None,
) -> Outcome:
    """One request, as vLLM's renderer hands it to a processor; `direct`: as one calls the processor
    by hand."""
    options = deepcopy(dict(kwargs or {}))  # processors of transformers take out nested ones
    if direct:
        items = parsed(processor, data) if compat.INFO_PARSES else data
        with _holding(processor, None):
            return outcome(processor(prompt, items, hf_processor_mm_kwargs=options))
    sender = caches and caches.sender
    return outcome(render(processor, prompt, data, options, sender, uuids), caches)


def render(
    processor: Any, prompt: Any, data: Any, kwargs: Any, cache: Any, uuids: Any = None
) -> Any:
    """One request, as vLLM hands it to a processor."""
    items = parsed(processor, data) if compat.INFO_PARSES else data
    with _holding(processor, cache):
        if compat.TAKES_PARTS:
            return processor.apply(prompt, items, kwargs, mm_uuids=uuids)
        ids = _tokenized(processor, prompt, data) if isinstance(prompt, str) else list(prompt)
        inputs = ProcessorInputs(ids, items, uuids, hf_processor_mm_kwargs=kwargs)
        inputs.cache = cache
        return _applied(processor, inputs)


def _holding(processor: Any, cache: Any) -> Any:
    """A processor with another cache, where a processor has one: up to 0.30."""
    return patch.object(processor, "cache", cache) if hasattr(processor, "cache") else nullcontext()


def _applied(processor: Any, inputs: Any) -> Any:
    from vllm.multimodal.processing import TimingContext

    return processor.apply(inputs, TimingContext(enabled=False))


def parsed(processor: Any, data: Data) -> Any:
    """A caller's data as vLLM's items, checked."""
    if compat.INFO_PARSES:
        return processor.info.parse_mm_data(data)
    return processor._to_mm_items(data)


def encoded(processor: Any, text: str) -> list[int]:
    """The ids of a text, without placement."""
    params = getattr(processor.info, "default_tok_params", None)
    options = params.get_encode_kwargs() if params else {}
    return list(processor.info.get_tokenizer().encode(text, **options))


def _tokenized(processor: Any, prompt: str, data: Data) -> list[int]:
    """The ids of a text as vLLM's renderer makes them, before any processor sees it."""
    params, tokenizer = processor.info.default_tok_params, processor.info.get_tokenizer()
    text = params.apply_pre_tokenization(tokenizer, {"prompt": prompt, "multi_modal_data": data})
    sent = {**text, "prompt_token_ids": encoded(processor, text["prompt"])}
    return list(params.apply_post_tokenization(tokenizer, sent)["prompt_token_ids"])


def outcome(result: Any, caches: Caches | None = None) -> Outcome:
    """The outcome in vLLM's form of a rendered request."""
    ranges = {
        name: [(at.offset, at.length, _flags(at.is_embed, at.length)) for at in places]
        for name, places in result["mm_placeholders"].items()
    }
    hashes = {name: list(of_items) for name, of_items in result["mm_hashes"].items()}
    features = {
        name: [
            MultiModalFeatureSpec(item, name, *at)
            for item, *at in zip(own, hashes[name], result["mm_placeholders"][name], strict=True)
        ]
        for name, own in result["mm_kwargs"].items()
    }
    if caches is not None and caches.receiver is not None:
        features = caches.sent(features)
    fields = {name: [_fields(name, one.data) for one in own] for name, own in features.items()}
    ids = list(result.get("encoder_prompt_token_ids", result["prompt_token_ids"]))
    return Outcome(ids, ranges, fields, hashes, features)


def _flags(mask: Any, length: int) -> tuple[bool, ...]:
    """An embed mask of vLLM, which has None where all positions receive rows."""
    return (True,) * length if mask is None else tuple(map(bool, mask))


def _fields(modality: str, item: Any) -> dict[str, Any]:
    """The values of an item; tensors and arrays are copied: a processor may reuse their memory."""
    values = {key: own.data for key, own in item.items() if key != rows_field(modality)}
    reused = {key for key, own in values.items() if isinstance(own, torch.Tensor | np.ndarray)}
    return {key: deepcopy(own) if key in reused else own for key, own in values.items()}


def kinds(outcome: Outcome) -> dict[str, list[dict[str, str]]]:
    """The kinds of batching of an outcome's fields: per modality, item and field."""
    items = outcome.items
    return {
        name: [{key: _kind(items[name][i][key].field) for key in own} for i, own in enumerate(of)]
        for name, of in outcome.fields.items()
    }


def _kind(field: Any) -> str:
    options = [f"dim={field.dim}"] if getattr(field, "dim", 0) else []
    options += ["keep_on_cpu"] if getattr(field, "keep_on_cpu", False) else []
    return " ".join([type(field).__name__, *options])


def decoded(file: bytes) -> list[Any]:
    """The pictures that vLLM's loader makes of an image file with transparent parts, on white and
    on black."""
    loaders = (_image_loader(rgba_background_color=(grey,) * 3) for grey in (255, 0))
    return [loader.load_bytes(file) for loader in loaders]


# -- caches ----------------------------------------------------------------------------------------


class Caches:
    """vLLM's processor cache of some capacity: in one process, or as the pair of API server and
    engine."""

    def __init__(self, processor: Any, capacity_gib: float, *, pair: bool) -> None:
        config = processor.info.ctx.model_config
        multimodal = config.get_multimodal_config()
        with patch.object(multimodal, "mm_processor_cache_gb", capacity_gib):
            self.sender: Any = (_SenderCache if pair else MultiModalProcessorOnlyCache)(config)
            self.receiver: Any = _ReceiverCache(config) if pair else None

    def sent(self, features: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """The items of a request in the engine, after both halves of the cache have moved."""
        ordered = in_prompt_order(features)
        received = exchanged(adopted(ordered, self.sender))
        self.receiver.get_and_update_features(received)
        places = {id(feature): at for at, feature in enumerate(ordered)}
        return {
            name: [received[places[id(feature)]] for feature in of_modality]
            for name, of_modality in features.items()
        }


def in_prompt_order(features: Mapping[str, Sequence[Any]]) -> list[Any]:
    """The items of all modalities in the order of the prompt."""
    every = [feature for own in features.values() for feature in own]
    return sorted(every, key=lambda feature: feature.mm_position.offset)


# -- parts of a request ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """The ids of one item in a prompt.

    Attributes:
        written: what a caller writes for it; nothing where it is inserted at an anchor.
        ids: what it becomes.
        mask: which of these ids receive encoder rows.
        inserted: `ids` go after what is written instead of in its place.
        prefix: ids with which a prompt must start.
        targets: what the alternatives would have a caller write.
    """

    written: list[int]
    ids: list[int]
    mask: tuple[bool, ...]
    inserted: bool
    prefix: list[int]
    targets: list[list[int]]


def pieces(processor: Any, name: str, values: list[Any], kwargs: Data | None = None) -> list[Piece]:
    """The ids of one modality's items in a prompt, by the first alternative of the processor's own
    updates. Without an update, an item has no ids."""
    data, kwargs = {name: values}, kwargs or {}
    if isinstance(processor, CommonProcessor):
        request = Request([], parsed(processor, data), {}, kwargs, None)
        missing = {name: range(len(values))}
        entries = processor._processed(request, {name: len(values)}, missing)
        return [_own_piece(layouts) for _, layouts in entries.get(name, {}).values()]
    _, kwargs_items, items = processed(processor, data, kwargs)
    updates = processor._get_mm_prompt_updates(items, kwargs, kwargs_items)
    if name not in updates:
        return [Piece([], [], (), True, [], []) for _ in values]
    return [_piece(processor, alternatives) for alternatives in updates[name]]


def processed(processor: Any, data: Data, kwargs: Data) -> tuple[Any, Any, Any]:
    """By a hand-written processor: the processed fields with their configuration, the same split
    into items, and the parsed items."""
    items, options = parsed(processor, data), deepcopy(dict(kwargs))
    if _TEXT_PROMPTS:
        update = {"enable_hf_prompt_update": False}
        raw = processor._apply_hf_processor_main([], items, options, {}, **update)[1]
    else:
        raw = processor._apply_hf_processor_main(items, options)
    config = processor._get_mm_fields_config(raw, kwargs)
    return (raw, config), MultiModalKwargsItems.from_hf_inputs(raw, config), items


def _piece(processor: Any, alternatives: Sequence[Any]) -> Piece:
    update = alternatives[0]
    content = update.content
    anchored = [a.target for a in alternatives if not isinstance(a.target, _PromptIndex)]
    targets = [_spelled(processor, target) for target in anchored]
    full, mask = _spelled(processor, content.full), None
    if content.is_embed is not None:
        tokenizer = [processor.info.ctx.tokenizer] if _TEXT_PROMPTS else []
        mask = content.is_embed(*tokenizer, content.full)
    if isinstance(update.target, _PromptIndex):
        closure = getattr(update.target.get_match_index, "__closure__", None) or ()
        lists = [cell.cell_contents for cell in closure if isinstance(cell.cell_contents, list)]
        written, prefix = [], next(iter(lists), [])
    else:
        written, prefix = targets[0], []
    is_inserted = update.mode.name == "INSERT"
    return Piece(written, full, _flags(mask, len(full)), is_inserted, prefix, targets)


def _spelled(processor: Any, sequence: Any) -> list[int]:
    """The ids of a target of a hand-written processor, or of what it becomes."""
    if isinstance(sequence, str):
        sequence = processor.info.get_tokenizer().encode(sequence, add_special_tokens=False)
    return list(sequence)


def _own_piece(own: ItemLayout) -> Piece:
    update, target = own.updates[0]
    inserted = isinstance(update, Insert)
    targets = [list(written) for written in own.caller_ids if written]
    ids, mask = list(own.tokens.ids), tuple(map(bool, own.tokens.mask))
    prefix = list(target) if inserted else []
    return Piece(list(own.caller_ids[0]), ids, mask, inserted, prefix, targets)


def round_trip(processor: Any, data: Data, kwargs: Data) -> dict[str, tuple[Any, Any]]:
    """By a hand-written processor, per declared field: the processed value, and what batching its
    items again makes of it."""
    (raw, config), by_modality, _ = processed(processor, data, kwargs)
    joined = {
        key: element.field.reduce_data([item[key] for item in items])
        for items in by_modality.values()
        for key, element in items[0].items()
    }
    # theirs are fields of no items
    absent = set(processor.info.get_supported_mm_limits()) - set(data)
    present = [key for key in config if key in raw and config[key].modality not in absent]
    return {key: (raw[key], joined.get(key)) for key in present}


@cache
def most_rows(processor: Any, name: str) -> tuple[int, int]:
    """(stated, reached): the most encoder rows of an item, as stated for scheduling, and those of
    the dummy item."""
    seq_len, counts = processor.info.ctx.model_config.max_model_len, {name: 1}
    if hasattr(processor, "get_dummy_mm_inputs"):
        result = processor.get_dummy_mm_inputs(counts)
    else:
        sent = processor.dummy_inputs.get_dummy_processor_inputs(seq_len, counts, {})
        parts = (sent.prompt, getattr(sent, compat.ITEMS, None), sent.hf_processor_mm_kwargs)
        result = processor.apply(*parts) if compat.TAKES_PARTS else _applied(processor, sent)
    ranges = outcome(result).ranges.get(name, ())
    reached = sum(sum(mask) for _, _, mask in ranges)
    stated = (processor.info.get_mm_max_tokens_per_item(seq_len, counts) or {}).get(name)
    return reached if stated is None else stated, reached
