"""Processors that somebody wrote by hand against vLLM, each unlike what mmkit generates, and the kit on them: each law
ends in a verdict, and none in an error of the kit."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from transformers.feature_extraction_utils import BatchFeature
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import ModalityDataItems, MultiModalDataItems, MultiModalDataParser, ProcessorBatchItems
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ProcessorInputs,
    PromptReplacement,
)

from examples.terra import CHECKPOINT
from mmkit.testing import Subject, TensorSample, check, vllm_path

MARK, EMBED = 7, 8


class Parser(MultiModalDataParser):
    """Takes series of points of the plane."""

    def _items(self, data: Any) -> ModalityDataItems[Any, Any]:
        values = list(data) if isinstance(data, list) else [data]
        if any(array(value).ndim != 2 for value in values):
            raise ValueError("no series")
        return ProcessorBatchItems(values, "series")

    def _get_subparsers(self) -> Mapping[str, Any]:
        return {"series": self._items}


class Info(BaseProcessingInfo):
    def get_data_parser(self) -> Parser:
        return Parser()

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"series": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"series": 4}


class Dummy(BaseDummyInputsBuilder[Any]):
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> Any:
        return [MARK] * sum(mm_counts.values())

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> Any:
        return {name: [np.zeros((4, 2), np.float32)] * count for name, count in mm_counts.items()}


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
        return dict.fromkeys(hf_inputs, MultiModalFieldConfig.batched("series"))

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> Any:
        return [PromptReplacement(modality="series", target=[MARK], replacement=[EMBED] * 4)]


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


def instance(values: Any, config: Any) -> Any:
    """The processor of such classes, whose field `data` has these values of items."""
    fields = staticmethod(lambda items: {"data": values(items)})
    return vllm_path.generated(Info, Dummy, type("TheProcessor", (Processor,), {"fields": fields}), config)


SERIES = st.builds(TensorSample, st.integers(0, 3), st.tuples(st.integers(1, 4), st.just(2)))
CASES: dict[str, tuple[Any, dict[str, str]]] = {
    "numpy arrays as fields": (
        lambda items: [*map(array, items)],
        {
            "ranges": "holds$",
            "text": "not applicable: the model has no tokenizer",
            "independence": "holds$",
            "round_trip": "holds$",
        },
    ),
    "numpy arrays that are padded": (
        padded,
        {
            "ranges": "holds$",
            "independence": r"violated: .*: numpy float32 \(\d, 2\) and numpy float32 \(\d, 2\)",
            "round_trip": "holds$",
        },
    ),
    "one-shot iterators": (
        lambda items: [iter(array(item)) for item in items],
        {
            "ranges": "holds$",
            "round_trip": "violated: .*: a one-shot iterator, which caches and batches read more than once",
        },
    ),
    "an exception of the processor": (
        lambda items: [*map(breaking, items)],
        {"ranges": r"violated: RuntimeError: three steps\n +in the processing of series: \[TensorSample\("},
    ),
}
"""Of each: the values of its field, and what the laws say."""


@pytest.mark.parametrize("name", CASES)
def test_verdicts(name: str) -> None:
    values, said = CASES[name]
    subject = Subject(instance(values, vllm_path.config_for_spec(CHECKPOINT)), {"series": SERIES}, model_dir=CHECKPOINT)
    results = {result.law: result for result in check(subject, examples=10).results}
    assert all(result.status != "kit error" for result in results.values()), results
    for law, pattern in said.items():
        assert re.match(pattern, results[law].sentence), results[law]
