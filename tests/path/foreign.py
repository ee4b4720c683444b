"""Processors that somebody wrote by hand against vLLM, each unlike what mmkit generates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

MARK, EMBED = 7, 8


class Items(ProcessorBatchItems):
    """Items of any kind, in a list."""


class Parser(MultiModalDataParser):
    """Takes one modality, under whatever name."""

    def __init__(self, modality: str, **options: Any) -> None:
        super().__init__(**options)
        self.modality = modality

    def _items(self, data: Any) -> ModalityDataItems[Any, Any]:
        values = list(data) if isinstance(data, list) else [data]
        for value in values:
            self.check(value)
        return Items(values, self.modality)

    def check(self, value: Any) -> None:
        if self.modality == "molecule" and not isinstance(value, str):
            raise ValueError(f"a molecule is a string, not a {type(value).__name__}")
        if self.modality == "scene" and not (isinstance(value, dict) and {*value} == {"pixels", "place"}):
            raise ValueError("a scene is a dict of pixels and place")
        if self.modality == "series" and np.asarray(value, dtype=np.float32).ndim != 2:
            raise ValueError("a series is two-dimensional")

    def _get_subparsers(self) -> Mapping[str, Any]:
        return {self.modality: self._items}


class Info(BaseProcessingInfo):
    modality: str

    def get_data_parser(self) -> Parser:
        return Parser(self.modality)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {self.modality: None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {self.modality: 4}


class Dummy(BaseDummyInputsBuilder[Any]):
    largest: Any

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> Any:
        return [MARK] * sum(mm_counts.values())

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> Any:
        return {name: [self.largest] * count for name, count in mm_counts.items()}


class Processor(BaseMultiModalProcessor[Any]):
    """Four positions for each item."""

    requires_tokenizer = False
    key = "data"

    def values(self, items: Sequence[Any]) -> Any:
        """The one field, of all items."""
        raise NotImplementedError

    def get_dummy_inputs(self, seq_len: int, mm_counts: Any, mm_options: Any) -> Any:
        data = self.dummy_inputs.get_dummy_mm_data(seq_len, mm_counts, mm_options)
        items = self.info.parse_mm_data(data, validate=False)
        return ProcessorInputs(prompt=self.dummy_inputs.get_dummy_text(mm_counts), mm_data_items=items)

    def _apply_hf_processor_main(self, mm_items: MultiModalDataItems, hf_kwargs: Any) -> BatchFeature:
        items = [item for own in mm_items.values() for item in own.get_all()]
        return BatchFeature({self.key: self.values(items)} if items else {})

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Any:
        return {self.key: MultiModalFieldConfig.batched(self.info.modality)}

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> Any:
        return [PromptReplacement(modality=self.info.modality, target=[MARK], replacement=[EMBED] * 4)]


# -- numpy arrays as fields ------------------------------------------------------------------------------------------


class SeriesInfo(Info):
    modality = "series"


class SeriesDummy(Dummy):
    largest = np.zeros((4, 2), dtype=np.float32)


class NumpyFields(Processor):
    def values(self, items: Sequence[Any]) -> Any:
        return [np.asarray(item, dtype=np.float32) for item in items]


class PaddedNumpyFields(Processor):
    """A mistake: each series has the length of the longest of its request."""

    def values(self, items: Sequence[Any]) -> Any:
        longest = max(len(item) for item in items)
        return [np.resize(np.asarray(item, dtype=np.float32), (longest, 2)) for item in items]


class OneShotFields(Processor):
    """A mistake: what reaches the model can be read once."""

    def values(self, items: Sequence[Any]) -> Any:
        return [iter(np.asarray(item)) for item in items]


class Breaking(Processor):
    """A mistake: it cannot read three steps."""

    def values(self, items: Sequence[Any]) -> Any:
        if any(len(item) == 3 for item in items):
            raise RuntimeError("three steps")
        return [torch.as_tensor(np.asarray(item)) for item in items]


# -- strings as items, without a tokenizer ---------------------------------------------------------------------------


class MoleculeInfo(Info):
    modality = "molecule"


class MoleculeDummy(Dummy):
    largest = "CCCCCC"


class Molecules(Processor):
    def values(self, items: Sequence[Any]) -> Any:
        return [torch.tensor([ord(letter) for letter in item]) for item in items]


# -- dicts as items, no updates of the prompt, raw input -------------------------------------------------------------


class SceneInfo(Info):
    modality = "scene"

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"scene": 1}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"scene": 0}


class SceneDummy(Dummy):
    @property
    def largest(self) -> Any:
        return {"pixels": np.zeros((3, 4, 4), dtype=np.float32), "place": np.zeros(2, dtype=np.float32)}


class Scenes(Processor):
    """Every prompt becomes one id, and no position stands for the scene."""

    def _apply_hf_processor_main(self, mm_items: MultiModalDataItems, hf_kwargs: Any) -> BatchFeature:
        items = [item for own in mm_items.values() for item in own.get_all()]
        parts = {key: [torch.as_tensor(np.asarray(item[key])) for item in items] for key in ("pixels", "place")}
        return BatchFeature({key: torch.stack(own) for key, own in parts.items() if own})

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Any:
        return {key: MultiModalFieldConfig.batched("scene") for key in ("pixels", "place")}

    def _get_prompt_updates(self, *arguments: Any, **options: Any) -> Any:
        return []

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        processed = self._apply_hf_processor_main(inputs.mm_data_items, {})
        config = self._get_mm_fields_config(processed, {})
        return mm_input(
            prompt_token_ids=[1],
            mm_kwargs=MultiModalKwargsItems.from_hf_inputs(processed, config),
            mm_hashes=inputs.get_mm_hashes(self.info.model_id, "blake3"),
            mm_placeholders={"scene": [PlaceholderRange(offset=0, length=0)]},
        )
