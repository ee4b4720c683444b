"""vLLM 0.11.2 to 0.16: the parts of a request come one by one. Before 0.16 the processor parses the
data itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from typing_extensions import override
from vllm.multimodal.inputs import PlaceholderRange
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import BaseMultiModalProcessor, BaseProcessingInfo

from . import processor as common
from .common import Parser, ResolvedUpdate
from .moved import ProcessorInputs
from .prompts import PromptProcessor, embedded, holding, process, spelled

_APPLY = inspect.signature(BaseMultiModalProcessor.apply)
_ITEMS = list(_APPLY.parameters)[2]  # mm_data, or mm_items
_INFO_PARSES = hasattr(BaseProcessingInfo, "get_data_parser")
_CACHED_TWICE = (
    "mm_is_cached" not in inspect.signature(BaseMultiModalProcessor._merge_mm_kwargs).parameters
)


class ProcessingInfo(common.ParsingInfo if _INFO_PARSES else common.CommonInfo):  # type: ignore[misc]
    """vLLM's questions about the modalities of a spec; generated classes set `spec`."""

    @override
    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int] | None:
        # before 0.13 the length of a layout counts, not its embed positions: vLLM sees it in the
        # dummy inputs
        counts_embeds = hasattr(PlaceholderRange, "embeds_cumsum")
        return super().get_mm_max_tokens_per_item(seq_len, mm_counts) if counts_embeds else None


class DummyInputs(common.DummyInputs):
    """The worst-case request of a spec; generated classes set `spec`."""

    @override
    def get_dummy_processor_inputs(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any = None
    ) -> ProcessorInputs:
        prompt, items = self.processor.worst(seq_len, mm_counts, mm_options)
        return ProcessorInputs(prompt=prompt, **{_ITEMS: items})


class PartsProcessor(PromptProcessor):
    """Processes requests that come in parts."""

    @override
    def apply(self, *args: Any, **kwargs: Any) -> Any:
        sent = _APPLY.bind(self, *args, **kwargs).arguments
        sent[_ITEMS] = items = self.parsed(sent[_ITEMS])
        uuids = {
            name: [u] if isinstance(u, str) else u
            for name, u in (sent.get("mm_uuids") or {}).items()
        }
        own = {name: value for name, value in sent.items() if name != "self"} | {"mm_uuids": uuids}
        return self.guarded(sent["prompt"], items, uuids, partial(super().apply, **own))

    def parsed(self, data: Any) -> Any:
        """The items of a request."""
        return data

    @override
    def _cached_apply_hf_processor(
        self,
        prompt: Any,
        mm_data_items: Any,
        hf_processor_mm_kwargs: Any,
        tokenization_kwargs: Any,
        *,
        mm_uuids: Any,
    ) -> Any:
        cached = self.may_cache(mm_data_items)
        run = super()._cached_apply_hf_processor if cached else self._apply_hf_processor
        return run(
            prompt, mm_data_items, hf_processor_mm_kwargs, tokenization_kwargs, mm_uuids=mm_uuids
        )

    @override
    def _hash_mm_items(
        self,
        mm_items: Any,
        hf_processor_mm_kwargs: Any,
        tokenization_kwargs: Any,
        *,
        mm_uuids: Any = None,
    ) -> Any:
        # the options of the tokenizer have no influence on the items
        def by_vllm(forms: Any) -> Any:
            return super(PartsProcessor, self)._hash_mm_items(forms, hf_processor_mm_kwargs, {})

        return self.hashed(mm_items, mm_uuids or {}, by_vllm, options=hf_processor_mm_kwargs)

    @override
    def _get_cache_missing_items(self, cache: Any, mm_data_items: Any, mm_hashes: Any) -> Any:
        cached, missing = super()._get_cache_missing_items(cache, mm_data_items, mm_hashes)
        return missing if _CACHED_TWICE else (cached, missing)


class ParsingProcessor(PartsProcessor):
    """Parses the data, too."""

    @override
    def _get_data_parser(self) -> Parser:
        parser: Parser = self.info.new_parser()
        return parser

    @override
    def _to_mm_items(self, mm_data: Any) -> Any:
        return self.parsed(mm_data)

    def parsed(self, data: Any) -> Any:
        return data if isinstance(data, MultiModalDataItems) else super()._to_mm_items(data)

    @override
    def validate_num_items(self, modality: str, num_items: int) -> None:
        self.plan.modalities[modality].intake.check_count(
            num_items, self.allowed_mm_limits[modality]
        )


Processor = PartsProcessor if _INFO_PARSES else ParsingProcessor

HOOKS = (ProcessingInfo, DummyInputs, Processor, Parser, ResolvedUpdate)


# -- for mmkit.testing -----------------------------------------------------------------------------


def parsed(processor: Any, data: Mapping[str, Any]) -> Any:
    """A caller's data as vLLM's items, checked."""
    return processor.info.parse_mm_data(data) if _INFO_PARSES else processor._to_mm_items(data)


def encoded(processor: Any, text: str) -> list[int]:
    """The ids of a text, as they are."""
    return list(processor.info.get_tokenizer().encode(text))


def render(
    processor: Any, prompt: Any, data: Any, kwargs: Any, cache: Any, uuids: Any = None
) -> Any:
    """One request, as vLLM's input preprocessor hands it to a processor."""
    items = parsed(processor, data) if _INFO_PARSES else data
    with holding(processor, cache):
        return processor.apply(prompt, items, kwargs, mm_uuids=uuids)


def call(processor: Any, prompt: Any, data: Any, kwargs: Any) -> Any:
    """One request, as one calls a processor by hand."""
    with holding(processor, None):
        return processor(prompt, parsed(processor, data) if _INFO_PARSES else data, kwargs)


def dummy(processor: Any, counts: Mapping[str, int]) -> Any:
    """The outcome of the dummy request."""
    seq_len = processor.info.ctx.model_config.max_model_len
    inputs = processor.dummy_inputs.get_dummy_processor_inputs(seq_len, counts, None)
    return processor.apply(inputs.prompt, getattr(inputs, _ITEMS), inputs.hf_processor_mm_kwargs)
