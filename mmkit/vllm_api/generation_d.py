"""vLLM 0.31 to 0.33: the processor sees token ids only, builds its own dummy inputs, and gets its
cache with each request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.feature_extraction_utils import BatchFeature
from typing_extensions import override
from vllm.multimodal.processing import ProcessorInputs

from . import requests
from .processor import DummyInputs
from .requests import ProcessingInfo, RequestProcessor, applied, encoded, parsed, tokenized


class Processor(RequestProcessor):
    """Processes the requests of a spec; generated classes set `spec`."""

    @override
    def get_dummy_inputs(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any
    ) -> ProcessorInputs:
        prompt, items = self.worst(seq_len, mm_counts, mm_options)
        return ProcessorInputs(prompt=prompt, mm_data_items=items)

    @override
    def _apply_hf_processor_main(
        self, mm_items: Any, hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        return self.features(mm_items, hf_kwargs)

    @override
    def _postprocess_prompt(self, prompt: list[int]) -> list[int]:
        return self.prompt_ids(prompt)

    def cache_of(self, inputs: ProcessorInputs) -> Any:
        return inputs.cache


HOOKS = (*requests.HOOKS, Processor, DummyInputs)


# -- for mmkit.testing -----------------------------------------------------------------------------


def render(
    processor: Any, prompt: Any, data: Any, kwargs: Any, cache: Any, uuids: Any = None
) -> Any:
    """One request, as vLLM's renderer hands it to a processor."""
    ids = tokenized(processor, prompt, data) if isinstance(prompt, str) else list(prompt)
    items = parsed(processor, data)
    inputs = ProcessorInputs(ids, items, uuids, hf_processor_mm_kwargs=kwargs, cache=cache)
    return applied(processor, inputs)


def call(processor: Any, prompt: Any, data: Any, kwargs: Any) -> Any:
    """One request, as one calls a processor by hand."""
    return processor(prompt, parsed(processor, data), hf_processor_mm_kwargs=kwargs)


def process(processor: Any, items: Any, kwargs: Any) -> Any:
    """The processed fields of parsed items."""
    return processor._apply_hf_processor_main(items, kwargs)


def dummy(processor: Any, counts: Mapping[str, int]) -> Any:
    """The outcome of the dummy request."""
    return processor.get_dummy_mm_inputs(counts)


def spelled(processor: Any, sequence: Any) -> list[int]:
    """The ids of a target, or of what it becomes."""
    return list(sequence)


def embedded(processor: Any, content: Any) -> Any:
    """Which ids of what a target becomes receive encoder rows; None for all."""
    return None if content.is_embed is None else content.is_embed(content.full)
