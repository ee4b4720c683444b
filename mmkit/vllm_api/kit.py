"""vLLM's parts for `mmkit.testing`: caches, batches, processors and models without an engine."""

from __future__ import annotations

import inspect
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import fields
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.multimodal import MULTIMODAL_REGISTRY, utils
from vllm.multimodal.cache import MultiModalProcessorOnlyCache
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.inputs import MultiModalKwargsItems as MultiModalKwargsItems
from vllm.multimodal.processing import BaseMultiModalProcessor, InputProcessingContext

from ..errors import VllmApiError
from . import seam
from .items import embeds_size as embeds_size
from .moved import ProcessorInputs, find
from .moved import SenderCache as SenderCache

OnlyCache = MultiModalProcessorOnlyCache
item_size = find(
    "multimodal.cache.base:MultiModalCache", "multimodal.cache:MultiModalCache"
).get_item_size
ReceiverCache = find(
    "multimodal.cache:LruKeyReplicatedReceiverCache", "multimodal.cache:MultiModalReceiverCache"
)
LEAST_CACHE_GIB = 1e-6 if hasattr(OnlyCache, "cache_if_fits") else 0.01
"""A processor cache so small that items are evicted from it. Before 0.29 vLLM refuses items larger
than the cache."""

Miss: Any = None
make_renderer: Any = None
with suppress(VllmApiError):  # before 0.28 the engine's half asserts
    Miss = find("multimodal.cache:MultiModalCacheMissError")
with suppress(VllmApiError):  # there are none before 0.17
    find("renderers.base:BaseRenderer")
    make_renderer = find("renderers:renderer_from_config")

PromptIndex = find(
    "multimodal.processing.processor:PromptIndex", "multimodal.processing:PromptIndex"
)

_SERDE = "entrypoints.{}.mm_serde:{}_mm_kwargs_item"
_PLACES = ("scale_out.token_in_token_out", "serve.disagg")
encode_item: Any = None
decode_item: Any = None
with suppress(VllmApiError):  # there are no such routes before 0.19
    encode_item = find(*(_SERDE.format(place, "encode") for place in _PLACES))
    decode_item = find(*(_SERDE.format(place, "decode") for place in _PLACES))

TEXT_PROMPTS = (
    "prompt" in inspect.signature(BaseMultiModalProcessor._apply_hf_processor_main).parameters
)
"""Whether a prompt passes the processor with the items, and may be a text: up to 0.28."""

_image_loader = find("multimodal.media.image:ImageMediaIO", "multimodal.image:ImageMediaIO")

_tokenizer = find(
    "tokenizers:cached_tokenizer_from_config",
    "transformers_utils.tokenizer:cached_tokenizer_from_config",
)


@contextmanager
def holding(processor: Any, cache: Any) -> Iterator[None]:
    """A processor with another cache, where a processor has one."""
    if not hasattr(processor, "cache"):
        yield
        return
    before, processor.cache = processor.cache, cache
    try:
        yield
    finally:
        processor.cache = before


def parsed(processor: Any, data: Mapping[str, Any]) -> Any:
    """A caller's data as vLLM's items, checked."""
    if seam.INFO_PARSES:
        return processor.info.parse_mm_data(data)
    return processor._to_mm_items(data)


def encoded(processor: Any, text: str) -> list[int]:
    """The ids of a text, without placement."""
    params = getattr(processor.info, "default_tok_params", None)
    options = params.get_encode_kwargs() if params else {}
    return list(processor.info.get_tokenizer().encode(text, **options))


def tokenized(processor: Any, prompt: str, data: Mapping[str, Any]) -> list[int]:
    """The ids of a text as vLLM's renderer makes them, before any processor sees it."""
    params, tokenizer = processor.info.default_tok_params, processor.info.get_tokenizer()
    text = params.apply_pre_tokenization(tokenizer, {"prompt": prompt, "multi_modal_data": data})
    sent = {**text, "prompt_token_ids": encoded(processor, text["prompt"])}
    return list(params.apply_post_tokenization(tokenizer, sent)["prompt_token_ids"])


def render(
    processor: Any, prompt: Any, data: Any, kwargs: Any, cache: Any, uuids: Any = None
) -> Any:
    """One request, as vLLM hands it to a processor."""
    items = parsed(processor, data) if seam.INFO_PARSES else data
    if seam.TAKES_PARTS:
        with holding(processor, cache):
            return processor.apply(prompt, items, kwargs, mm_uuids=uuids)
    ids = tokenized(processor, prompt, data) if isinstance(prompt, str) else list(prompt)
    inputs = ProcessorInputs(ids, items, uuids, hf_processor_mm_kwargs=kwargs)
    if not hasattr(processor, "cache"):
        inputs.cache = cache
    with holding(processor, cache):
        return applied(processor, inputs)


def applied(processor: Any, inputs: Any) -> Any:
    """The outcome of a request as an object."""
    from vllm.multimodal.processing import TimingContext

    return processor.apply(inputs, TimingContext(enabled=False))


def call(processor: Any, prompt: Any, data: Any, kwargs: Any) -> Any:
    """One request, as one calls a processor by hand."""
    items = parsed(processor, data) if seam.INFO_PARSES else data
    with holding(processor, None):
        return processor(prompt, items, hf_processor_mm_kwargs=kwargs)


def dummy(processor: Any, counts: Mapping[str, int]) -> Any:
    """The outcome of the dummy request."""
    if hasattr(processor, "get_dummy_mm_inputs"):
        return processor.get_dummy_mm_inputs(counts)
    seq_len = processor.info.ctx.model_config.max_model_len
    inputs = processor.dummy_inputs.get_dummy_processor_inputs(seq_len, counts, {})
    if not seam.TAKES_PARTS:
        return applied(processor, inputs)
    items = getattr(inputs, seam.ITEMS)
    return processor.apply(inputs.prompt, items, inputs.hf_processor_mm_kwargs)


def process(processor: Any, items: Any, kwargs: Any) -> Any:
    """The processed fields of parsed items, by a hand-written processor."""
    if not TEXT_PROMPTS:
        return processor._apply_hf_processor_main(items, kwargs)
    done = processor._apply_hf_processor_main([], items, kwargs, {}, enable_hf_prompt_update=False)
    return done[1]


def spelled(processor: Any, sequence: Any) -> list[int]:
    """The ids of a target of a hand-written processor, or of what it becomes."""
    if isinstance(sequence, str):
        sequence = processor.info.get_tokenizer().encode(sequence, add_special_tokens=False)
    return list(sequence)


def embedded(processor: Any, content: Any) -> Any:
    """Which ids of what a target becomes receive encoder rows; None for all."""
    if content.is_embed is None:
        return None
    tokenizer = [processor.info.ctx.tokenizer] if TEXT_PROMPTS else []
    return content.is_embed(*tokenizer, content.full)


def built(info: type, dummy_inputs: type, processor: type, config: ModelConfig) -> Any:
    """A processor of these classes, whether vLLM knows the model or not."""
    tokenizer = None if config.skip_tokenizer_init else _tokenizer(config)
    instance = info(InputProcessingContext(config, tokenizer))
    return processor(instance, dummy_inputs(instance))


@contextmanager
def rendering(processor: Any, cache: Any) -> Iterator[Callable[..., Awaitable[Any]] | None]:
    """A function that processes a request beside others in vLLM's renderer, as in its servers, with
    this processor and cache; None before 0.19, which renders requests one after the other."""
    if make_renderer is None:
        yield None
        return
    config = VllmConfig()
    config.model_config = copy(processor.info.ctx.model_config)
    # vLLM may not know the model
    vars(config.model_config).pop("_supports_multimodal_inputs_cache", None)
    known = {"create_processor": processor, "get_processing_info": processor.info}
    known["_create_processing_info"] = processor.info  # up to 0.28
    registry = vars(MULTIMODAL_REGISTRY)
    registry.update({name: lambda *_, _made=made, **__: _made for name, made in known.items()})
    try:
        renderer = make_renderer(config)
    finally:
        for name in known:
            del registry[name]
    process: Any = getattr(renderer, "_process_multimodal_async", None)
    named = inspect.signature(renderer._process_multimodal).parameters
    nothing = dict.fromkeys({"tokenization_kwargs", "mm_uuids"} & set(named))

    def processed(prompt: Any, data: Any, kwargs: Any) -> Awaitable[Any]:
        sent: Awaitable[Any] = process(prompt, data, mm_processor_kwargs=kwargs, **nothing)
        return sent

    renderer._mm_processor_cache = cache  # up to 0.30 the processor has it
    try:
        with holding(processor, cache):
            yield processed if process else None
    finally:
        renderer._mm_processor_cache = None
        renderer.shutdown()


def feature(item: Any, modality: str, item_hash: str, position: Any) -> Any:
    """One item as the API server sends it to the engine."""
    known = {
        "data": item,
        "modality": modality,
        "identifier": item_hash,
        "mm_position": position,
        "mm_hash": item_hash,
    }
    taken = {field.name for field in fields(MultiModalFeatureSpec)}
    return MultiModalFeatureSpec(**{name: value for name, value in known.items() if name in taken})


def place(offset: int, length: int, mask: Sequence[bool]) -> Any:
    """The place of an item in a prompt."""
    return PlaceholderRange(offset, length, None if all(mask) else torch.tensor(mask))


def written(result: Mapping[str, Any]) -> bytes:
    """A rendered request as vLLM sends it to the host that generates: the body of
    `/inference/v1/generate`, which has no masks."""
    features = {
        "mm_hashes": result["mm_hashes"],
        "mm_placeholders": {
            name: [{"offset": place.offset, "length": place.length} for place in places]
            for name, places in result["mm_placeholders"].items()
        },
        "kwargs_data": {
            name: [encode_item(item) for item in items]
            for name, items in result["mm_kwargs"].items()
        },
    }
    return json.dumps({"token_ids": result["prompt_token_ids"], "features": features}).encode()


def read(body: bytes) -> dict[str, Any]:
    """A rendered request as that host reads it."""
    sent = json.loads(body)
    features = sent["features"]
    items = {
        name: [decode_item(item) for item in own] for name, own in features["kwargs_data"].items()
    }
    places = {
        name: [PlaceholderRange(**place) for place in own]
        for name, own in features["mm_placeholders"].items()
    }
    return {
        "type": "multimodal",
        "prompt_token_ids": sent["token_ids"],
        "mm_kwargs": MultiModalKwargsItems(items),
        "mm_hashes": features["mm_hashes"],
        "mm_placeholders": places,
    }


def decoded(file: bytes) -> list[Any]:
    """The pictures that vLLM's loader makes of an image file with transparent parts, on white and
    on black."""
    return [
        _image_loader(rgba_background_color=background).load_bytes(file)
        for background in ((255, 255, 255), (0, 0, 0))
    ]


def batches(items: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """The arguments of the calls of a model with items of one modality, in their order."""
    if hasattr(utils, "group_and_batch_mm_items"):
        yield from (kwargs for _, kwargs in utils.group_and_batch_mm_items(list(items)))
    else:  # up to 0.15
        yield MultiModalKwargsItems.from_seq(list(items)).get_data()


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
