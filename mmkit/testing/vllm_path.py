"""A request on vLLM's processing path, without an engine: what a processor makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from vllm.multimodal.cache import MultiModalProcessorOnlyCache
from vllm.multimodal.inputs import MultiModalFeatureSpec

from ..errors import VllmApiError
from ..plan.encoder_rows import row_count_field
from ..vllm_api import compat
from ..vllm_api.compat import ProcessorInputs, find
from ..vllm_api.exchange import adopt_features, exchange_features

_Cache = find("multimodal.cache.base:MultiModalCache", "multimodal.cache:MultiModalCache")
_SenderCache = find(
    "multimodal.cache:LruKeyReplicatedSenderCache",
    "multimodal.cache:MultiModalProcessorSenderCache",
)
_ReceiverCache = find(
    "multimodal.cache:LruKeyReplicatedReceiverCache", "multimodal.cache:MultiModalReceiverCache"
)
_ImageLoader = find("multimodal.media.image:ImageMediaIO", "multimodal.image:ImageMediaIO")

# What the engine's half of a cache raises for an item that it lacks. Before 0.28 it asserts.
CacheMiss: Any = None
with suppress(VllmApiError):
    CacheMiss = find("multimodal.cache:MultiModalCacheMissError")

# A processor cache so small that items are evicted from it. Before 0.29 vLLM refuses items larger
# than the cache.
LEAST_CACHE_GIB = 1e-6 if hasattr(MultiModalProcessorOnlyCache, "cache_if_fits") else 0.01

# What a caller writes into `multi_modal_data` or into `mm_processor_kwargs`.
Data = Mapping[str, Any]


# -- outcomes --------------------------------------------------------------------------------------


class ItemRange(NamedTuple):
    """The place of an item in a prompt, as vLLM's PlaceholderRange with its mask spelled out.

    Attributes:
        offset: position of its first token.
        length: number of its tokens.
        mask: for each of its tokens, whether the position receives an encoder row.
    """

    offset: int
    length: int
    mask: tuple[bool, ...]

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.offset + self.length


@dataclass(frozen=True)
class Outcome:
    """The result of a processor for a request.

    Attributes:
        ids: the prompt with the placeholders in it.
        ranges: the places of the items in the prompt, by modality and item.
        fields: the tensors (or other values) that reach the model, by modality, item and field.
        hashes: the hashes of the items, by modality and item.
        features: the items as the API server sends them to the engine, by modality and item.
    """

    ids: list[int]
    ranges: dict[str, list[ItemRange]]
    fields: dict[str, list[dict[str, Any]]]
    hashes: dict[str, list[str]]
    features: dict[str, list[MultiModalFeatureSpec]] = field(repr=False)

    @property
    def items(self) -> dict[str, list[Any]]:
        """The fields in vLLM's own form (MultiModalKwargsItem), by modality and item."""
        items: dict[str, list[Any]] = {}
        for name, features in self.features.items():
            items[name] = [feature.data for feature in features]
        return items

    @property
    def gib(self) -> float:
        """The size of the items in vLLM's caches, in GiB."""
        size = 0
        for items in self.items.values():
            for item in items:
                size += _Cache.get_item_size(item)
        return size / 2**30

    def mask(self, name: str, index: int) -> tuple[bool, ...]:
        """Return which positions of an item receive encoder rows; none where it has no range."""
        ranges = self.ranges.get(name, [])
        if index >= len(ranges):
            return ()
        return ranges[index].mask

    def values(self, name: str, index: int) -> dict[str, Any]:
        """Return the fields of an item; none where nothing of it reaches the model."""
        fields = self.fields.get(name, [])
        if index >= len(fields):
            return {}
        return fields[index]


# -- requests --------------------------------------------------------------------------------------


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
    """Run a request through a processor, as vLLM's renderer does.

    Args:
        processor: vLLM's processor object.
        prompt: a text, or token ids.
        data: the items, as a caller writes them into `multi_modal_data`.
        kwargs: `mm_processor_kwargs`.
        caches: the processor caches to use; None for none.
        direct: call the processor itself, as one does by hand, without vLLM's renderer and caches.
        uuids: the caller's names for the items, by modality.
    """
    # processors of transformers take nested options out of the mapping that they get
    options = deepcopy(dict(kwargs or {}))
    if direct:
        items = data
        if compat.INFO_PARSES:
            items = parse_items(processor, data)
        with _use_cache(processor, None):
            result = processor(prompt, items, hf_processor_mm_kwargs=options)
        return collect_outcome(result)
    sender = None
    if caches is not None:
        sender = caches.sender
    result = render(processor, prompt, data, options, sender, uuids)
    return collect_outcome(result, caches)


def render(
    processor: Any, prompt: Any, data: Any, kwargs: Any, cache: Any, uuids: Any = None
) -> Any:
    """Run a request through a processor, and return the result in vLLM's form.

    Args:
        processor: vLLM's processor object.
        prompt: a text, or token ids.
        data: the items, as a caller writes them into `multi_modal_data`.
        kwargs: `mm_processor_kwargs`; the processor may change this mapping.
        cache: the API server's half of vLLM's processor cache; None for none.
        uuids: the caller's names for the items, by modality.
    """
    items = data
    if compat.INFO_PARSES:
        items = parse_items(processor, data)
    with _use_cache(processor, cache):
        if compat.TAKES_PARTS:
            return processor.apply(prompt, items, kwargs, mm_uuids=uuids)
        if isinstance(prompt, str):
            ids = _tokenize_as_renderer(processor, prompt, data)
        else:
            ids = list(prompt)
        inputs = ProcessorInputs(ids, items, uuids, hf_processor_mm_kwargs=kwargs)
        inputs.cache = cache
        return apply_inputs(processor, inputs)


def apply_inputs(processor: Any, inputs: Any) -> Any:
    """Run vLLM's ProcessorInputs through a processor, with a vLLM that has them."""
    from vllm.multimodal.processing import TimingContext

    return processor.apply(inputs, TimingContext(enabled=False))


def parse_items(processor: Any, data: Data) -> Any:
    """Parse and check a caller's data, and return vLLM's items."""
    if compat.INFO_PARSES:
        return processor.info.parse_mm_data(data)
    return processor._to_mm_items(data)


def encode_text(processor: Any, text: str) -> list[int]:
    """Return the ids of a text with the special tokens that vLLM adds, and without its items."""
    options = {}
    params = getattr(processor.info, "default_tok_params", None)
    if params:
        options = params.get_encode_kwargs()
    return list(processor.info.get_tokenizer().encode(text, **options))


def decode_on_backgrounds(file: bytes) -> list[Any]:
    """Decode an image file that has transparent parts with vLLM's loader, on white and on black."""
    pictures = []
    for grey in (255, 0):
        loader = _ImageLoader(rgba_background_color=(grey, grey, grey))
        pictures.append(loader.load_bytes(file))
    return pictures


def _use_cache(processor: Any, cache: Any) -> Any:
    """Replace the cache of a processor inside a `with` block.

    Up to 0.30 a processor has a cache of its own; later the cache is a part of its inputs.
    """
    if hasattr(processor, "cache"):
        return patch.object(processor, "cache", cache)
    return nullcontext()


def _tokenize_as_renderer(processor: Any, prompt: str, data: Data) -> list[int]:
    """Return the ids of a text as vLLM's renderer makes them, before any processor sees it."""
    params = processor.info.default_tok_params
    tokenizer = processor.info.get_tokenizer()
    inputs: dict[str, Any] = {"prompt": prompt, "multi_modal_data": data}
    inputs = dict(params.apply_pre_tokenization(tokenizer, inputs))
    inputs["prompt_token_ids"] = encode_text(processor, inputs["prompt"])
    inputs = params.apply_post_tokenization(tokenizer, inputs)
    return list(inputs["prompt_token_ids"])


# -- results ---------------------------------------------------------------------------------------


def collect_outcome(result: Any, caches: Caches | None = None) -> Outcome:
    """Read the outcome of a request from the result in vLLM's form.

    Args:
        result: what a processor returns.
        caches: the caches with which the request was rendered. Where they are a pair, the items are
            sent to the engine's half, as when vLLM's client sends the request.
    """
    ranges: dict[str, list[ItemRange]] = {}
    for name, positions in result["mm_placeholders"].items():
        ranges[name] = [_make_range(position) for position in positions]
    hashes: dict[str, list[str]] = {}
    for name, of_modality in result["mm_hashes"].items():
        hashes[name] = list(of_modality)
    features = _make_features(result)
    if caches is not None and caches.receiver is not None:
        features = caches.send_to_engine(features)
    fields: dict[str, list[dict[str, Any]]] = {}
    for name, of_modality in features.items():
        fields[name] = [unpack_fields(name, feature.data) for feature in of_modality]
    ids = list(result.get("encoder_prompt_token_ids", result["prompt_token_ids"]))
    return Outcome(ids, ranges, fields, hashes, features)


def unpack_fields(modality: str, item: Any) -> dict[str, Any]:
    """Return the values of vLLM's form of an item by field.

    Tensors and arrays are copied, since a processor may use their memory again.
    """
    values = {}
    for key, element in item.items():
        if key == row_count_field(modality):
            continue
        value = element.data
        if isinstance(value, torch.Tensor | np.ndarray):
            value = deepcopy(value)
        values[key] = value
    return values


def list_field_kinds(outcome: Outcome) -> dict[str, list[dict[str, str]]]:
    """Return how vLLM batches the fields of an outcome, by modality, item and field."""
    kinds: dict[str, list[dict[str, str]]] = {}
    for name, of_modality in outcome.fields.items():
        kinds[name] = []
        for index, fields in enumerate(of_modality):
            item = outcome.items[name][index]
            kinds[name].append({key: _describe_kind(item[key].field) for key in fields})
    return kinds


def mask_flags(mask: Any, length: int) -> tuple[bool, ...]:
    """Return vLLM's embed mask as flags.

    None, its mask of an item whose positions all receive rows, becomes `length` times True.
    """
    if mask is None:
        return (True,) * length
    return tuple(bool(flag) for flag in mask)


def _make_range(position: Any) -> ItemRange:
    mask = mask_flags(position.is_embed, position.length)
    return ItemRange(position.offset, position.length, mask)


def _make_features(result: Any) -> dict[str, list[MultiModalFeatureSpec]]:
    """Make the features that the API server sends to the engine."""
    features: dict[str, list[MultiModalFeatureSpec]] = {}
    for name, items in result["mm_kwargs"].items():
        hashes = result["mm_hashes"][name]
        positions = result["mm_placeholders"][name]
        features[name] = []
        for item, item_hash, position in zip(items, hashes, positions, strict=True):
            features[name].append(MultiModalFeatureSpec(item, name, item_hash, position))
    return features


def _describe_kind(field: Any) -> str:
    words = [type(field).__name__]
    if getattr(field, "dim", 0):
        words.append(f"dim={field.dim}")
    if getattr(field, "keep_on_cpu", False):
        words.append("keep_on_cpu")
    return " ".join(words)


# -- caches ----------------------------------------------------------------------------------------


class Caches:
    """vLLM's processor cache of some capacity.

    Attributes:
        sender: the cache of the API server; the only one where API server and engine are one
            process.
        receiver: the cache of the engine; None in one process.
    """

    def __init__(self, processor: Any, capacity_gib: float, *, pair: bool) -> None:
        config = processor.info.ctx.model_config
        sender_class = MultiModalProcessorOnlyCache
        if pair:
            sender_class = _SenderCache
        # caches read their capacity from the config
        settings = config.get_multimodal_config()
        with patch.object(settings, "mm_processor_cache_gb", capacity_gib):
            self.sender: Any = sender_class(config)
            self.receiver: Any = None
            if pair:
                self.receiver = _ReceiverCache(config)

    def send_to_engine(
        self, features: Mapping[str, Sequence[MultiModalFeatureSpec]]
    ) -> dict[str, list[MultiModalFeatureSpec]]:
        """Move both halves of the cache by the items of a request.

        Returns:
            The items as the engine has them.
        """
        slots: list[_Slot] = []
        for name, of_modality in features.items():
            for index, feature in enumerate(of_modality):
                slots.append(_Slot(name, index, feature))
        slots.sort(key=_get_slot_offset)
        ordered = [slot.feature for slot in slots]
        received = exchange_features(adopt_features(ordered, self.sender))
        self.receiver.get_and_update_features(received)

        in_engine = {name: list(of_modality) for name, of_modality in features.items()}
        for slot, feature in zip(slots, received, strict=True):
            in_engine[slot.modality][slot.index] = feature
        return in_engine


@dataclass(frozen=True)
class _Slot:
    """A feature with its place among the items of a request."""

    modality: str
    index: int
    feature: MultiModalFeatureSpec


def _get_slot_offset(slot: _Slot) -> int:
    return _get_offset(slot.feature)


def sort_by_position(
    features: Mapping[str, Sequence[MultiModalFeatureSpec]],
) -> list[MultiModalFeatureSpec]:
    """Return the items of all modalities in the order of the prompt."""
    ordered: list[MultiModalFeatureSpec] = []
    for of_modality in features.values():
        ordered.extend(of_modality)
    ordered.sort(key=_get_offset)
    return ordered


def _get_offset(feature: MultiModalFeatureSpec) -> int:
    return int(feature.mm_position.offset)
