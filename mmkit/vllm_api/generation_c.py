"""vLLM 0.29 and 0.30: as later, but that the builder makes the dummy inputs and the processor holds
its cache."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

from transformers.feature_extraction_utils import BatchFeature
from typing_extensions import override
from vllm.multimodal.processing import ProcessorInputs

from . import processor as common
from . import requests
from .generation_d import embedded, process, spelled
from .prompts import holding
from .requests import ProcessingInfo, RequestProcessor, applied, encoded, parsed, tokenized


class DummyInputs(common.DummyInputs):
    """The worst-case request of a spec; generated classes set `spec`."""

    @override
    def get_dummy_processor_inputs(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any = None
    ) -> ProcessorInputs:
        prompt, items = self.processor.worst(seq_len, mm_counts, mm_options)
        return ProcessorInputs(prompt=prompt, mm_data_items=items)


class Processor(RequestProcessor):
    """Processes the requests of a spec; generated classes set `spec`."""

    @override
    def _apply_hf_processor_main(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        return self.features(mm_items, hf_processor_mm_kwargs)

    @override
    def _postprocess_prompt(self, prompt: list[int]) -> list[int]:
        return self.prompt_ids(prompt)

    def call_hf(
        self, processor: Any, inputs: Mapping[str, Any], kwargs: Mapping[str, object]
    ) -> Any:
        @wraps(processor.__call__)
        def without_truncation(**options: Any) -> Any:
            options.pop("truncation", None)  # vLLM adds it where there is no text to cut off, too
            return processor(**options)

        return super().call_hf(
            processor if "text" in inputs else without_truncation, inputs, kwargs
        )

    def cache_of(self, inputs: ProcessorInputs) -> Any:
        return self.cache


HOOKS = (*requests.HOOKS, Processor, DummyInputs)


# -- for mmkit.testing -----------------------------------------------------------------------------


def render(
    processor: Any, prompt: Any, data: Any, kwargs: Any, cache: Any, uuids: Any = None
) -> Any:
    """One request, as vLLM's renderer hands it to a processor."""
    ids = tokenized(processor, prompt, data) if isinstance(prompt, str) else list(prompt)
    items = parsed(processor, data)
    with holding(processor, cache):
        return applied(processor, ProcessorInputs(ids, items, uuids, hf_processor_mm_kwargs=kwargs))


def call(processor: Any, prompt: Any, data: Any, kwargs: Any) -> Any:
    """One request, as one calls a processor by hand."""
    with holding(processor, None):
        return processor(prompt, parsed(processor, data), hf_processor_mm_kwargs=kwargs)


def dummy(processor: Any, counts: Mapping[str, int]) -> Any:
    """The outcome of the dummy request."""
    seq_len = processor.info.ctx.model_config.max_model_len
    return applied(
        processor, processor.dummy_inputs.get_dummy_processor_inputs(seq_len, counts, {})
    )
