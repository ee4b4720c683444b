"""Processors that somebody wrote by hand against vLLM, each unlike what mmkit generates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from transformers.feature_extraction_utils import BatchFeature
from vllm.inputs import mm_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.parse import ModalityDataItems, MultiModalDataItems, MultiModalDataParser, ProcessorBatchItems
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ProcessorInputs,
    PromptReplacement,
)

from mmkit.testing import vllm_path

MARK, EMBED = 7, 8


class Items(ProcessorBatchItems):
    """Items of any kind, in a list."""


class Parser(MultiModalDataParser):
    """Takes one modality, under whatever name, of items that `check` takes."""

    def __init__(self, modality: str, check: Callable[[Any], bool], **options: Any) -> None:
        super().__init__(**options)
        self.modality, self.check = modality, check

    def _items(self, data: Any) -> ModalityDataItems[Any, Any]:
        values = list(data) if isinstance(data, list) else [data]
        if not all(map(self.check, values)):
            raise ValueError(f"no {self.modality}")
        return Items(values, self.modality)

    def _get_subparsers(self) -> Mapping[str, Any]:
        return {self.modality: self._items}


class Info(BaseProcessingInfo):
    modality: str
    limit: int | None = None
    tokens = 4
    check: Callable[[Any], bool]

    def get_data_parser(self) -> Parser:
        return Parser(self.modality, type(self).check)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {self.modality: self.limit}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {self.modality: self.tokens}


class Dummy(BaseDummyInputsBuilder[Any]):
    largest: Any

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> Any:
        return [MARK] * sum(mm_counts.values())

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> Any:
        return {name: [self.largest] * count for name, count in mm_counts.items()}


class Processor(BaseMultiModalProcessor[Any]):
    """Four positions for each item, and fields by name, each with the values of all items."""

    requires_tokenizer = False
    fields: Callable[[list[Any]], dict[str, Any]]

    def get_dummy_inputs(self, seq_len: int, mm_counts: Any, mm_options: Any) -> Any:
        data = self.dummy_inputs.get_dummy_mm_data(seq_len, mm_counts, mm_options)
        items = self.info.parse_mm_data(data, validate=False)
        return ProcessorInputs(prompt=self.dummy_inputs.get_dummy_text(mm_counts), mm_data_items=items)

    def _apply_hf_processor_main(self, mm_items: MultiModalDataItems, hf_kwargs: Any) -> BatchFeature:
        items = [item for own in mm_items.values() for item in own.get_all()]
        return BatchFeature(type(self).fields(items) if items else {})

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Any:
        return dict.fromkeys(hf_inputs, MultiModalFieldConfig.batched(self.info.modality))

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> Any:
        return [PromptReplacement(modality=self.info.modality, target=[MARK], replacement=[EMBED] * 4)]


class Raw(Processor):
    """Every prompt becomes one id, and no position stands for an item."""

    def _get_prompt_updates(self, *arguments: Any, **options: Any) -> Any:
        return []

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        processed = self._apply_hf_processor_main(inputs.mm_data_items, {})
        config = self._get_mm_fields_config(processed, {})
        return mm_input(
            prompt_token_ids=[1],
            mm_kwargs=MultiModalKwargsItems.from_hf_inputs(processed, config),
            mm_hashes=inputs.get_mm_hashes(self.info.model_id, "blake3"),
            mm_placeholders={self.info.modality: [PlaceholderRange(offset=0, length=0)]},
        )


def array(value: Any) -> np.ndarray:
    return np.asarray(value, dtype=np.float32)


def padded(items: list[Any]) -> list[np.ndarray]:
    """A mistake: each series has the length of the longest of its request."""
    longest = max(map(len, items))
    return [np.resize(array(item), (longest, 2)) for item in items]


def breaking(item: Any) -> torch.Tensor:
    """A mistake: it cannot read three steps."""
    if len(item) == 3:
        raise RuntimeError("three steps")
    return torch.as_tensor(array(item))


def instance(modality: str, largest: Any, check: Any, fields: Any, config: Any, base: type = Processor) -> Any:
    """The processor of such classes."""
    raw = {"limit": 1, "tokens": 0} if base is Raw else {}
    info = type("TheInfo", (Info,), {"modality": modality, "check": staticmethod(check), **raw})
    dummy = type("TheDummy", (Dummy,), {"largest": largest})
    return vllm_path.generated(info, dummy, type("TheProcessor", (base,), {"fields": staticmethod(fields)}), config)
