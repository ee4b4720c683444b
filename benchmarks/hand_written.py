"""Classes of vLLM's processor written by hand, for modalities that vLLM has no model of: Terra's
actions, a series, and a record of two parts. They check shapes, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import BatchFeature
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import MultiModalDataParser, ProcessorBatchItems
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ProcessorInputs,
    PromptReplacement,
)

from examples import series, terra
from examples.series.spec import WAVES, standardise
from examples.series.waves import make_wave
from examples.terra.spec import TERRA
from mmkit import Modality, ModelSpec, Record, Tensor, batched, replace, tok
from mmkit.generate import Classes

Shapes = Mapping[str, tuple[int | None, ...]]
Items = Sequence[dict[str, torch.Tensor]]

POSE = ModelSpec(
    "pose",
    Modality(
        "pose",
        item=Record(joints=Tensor((7,)), camera=Tensor((3, 16, 16))),
        fields={"joints": batched(), "camera": batched()},
        placeholder="<patch>",
        tokens=2,
        update=replace(tok["<series>"]),
    ),
)


@dataclass(frozen=True)
class Kind:
    """What the classes of one modality know.

    Attributes:
        spec: the declaration of the same.
        folder: a checkpoint.
        shapes: those of an item's parts, by field; None for a size that varies.
        target: the ids that stand for an item in a prompt.
        ids: those that take their place.
        process: makes fields of items.
        requests: ids and items of some requests.
    """

    spec: ModelSpec
    folder: Path
    shapes: Shapes
    target: list[int]
    ids: Callable[[dict[str, torch.Tensor]], list[int]]
    process: Callable[[Items], dict[str, Any]]
    requests: Sequence[tuple[list[int], list[Any]]]

    @property
    def name(self) -> str:
        return self.spec.modalities[0].name

    def item(self, value: Any) -> dict[str, torch.Tensor]:
        """A caller's item; one of a single part is sent without its name."""
        parts = value if isinstance(value, dict) else {self.name: value}
        item = {key: torch.as_tensor(parts[key], dtype=torch.float32) for key in self.shapes}
        for key, shape in self.shapes.items():
            sizes = zip(item[key].shape, shape, strict=True)
            if any(size not in (own, None) for own, size in sizes):
                raise ValueError(f"{key}: expected shape {shape}, got {tuple(item[key].shape)}")
        return item

    def largest(self) -> dict[str, torch.Tensor]:
        return {
            key: torch.zeros([size or 64 for size in shape]) for key, shape in self.shapes.items()
        }

    def classes(self) -> Classes:
        written = Info, DummyInputs, Processor
        return Classes(*(type(one.__name__, (one,), {"kind": self}) for one in written))


class Parser(MultiModalDataParser):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self._kind = kind

    def _get_subparsers(self) -> Any:
        return {self._kind.name: self._parsed}

    def _parsed(self, data: Any) -> Any:
        values = data if isinstance(data, list) else [data]
        return ProcessorBatchItems([*map(self._kind.item, values)], self._kind.name)


class Info(BaseProcessingInfo):
    kind: ClassVar[Kind]

    def get_data_parser(self) -> Parser:
        return Parser(self.kind)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {self.kind.name: None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Any) -> Mapping[str, int]:
        return {self.kind.name: len(self.kind.ids(self.kind.largest()))}


class DummyInputs(BaseDummyInputsBuilder[Info]):
    kind: ClassVar[Kind]

    def get_dummy_text(self, mm_counts: Any) -> str:
        return ""

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Any, mm_options: Any) -> Any:
        return {name: [self.kind.largest()] * count for name, count in mm_counts.items()}


class Processor(BaseMultiModalProcessor[Info]):
    kind: ClassVar[Kind]
    requires_tokenizer = False

    def get_dummy_inputs(self, seq_len: int, mm_counts: Any, mm_options: Any) -> ProcessorInputs:
        data = self.dummy_inputs.get_dummy_mm_data(seq_len, mm_counts, mm_options)
        ids = self.kind.target * mm_counts[self.kind.name]
        return ProcessorInputs(ids, self.info.parse_mm_data(data))

    def _call_hf_processor(self, hf_data: Any, hf_kwargs: Any) -> BatchFeature:
        return BatchFeature(self.kind.process(hf_data[f"{self.kind.name}s"]))

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Any:
        return {key: MultiModalFieldConfig.batched(self.kind.name) for key in self.kind.shapes}

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> Any:
        name, target = self.kind.name, self.kind.target

        def ids(index: int) -> list[int]:
            return self.kind.ids(mm_items[name].get(index))

        return [PromptReplacement(name, target, ids)]


def _stacked(items: Items) -> dict[str, torch.Tensor]:
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def _standardised(items: Items) -> dict[str, Any]:
    return dict(standardise([item["series"] for item in items], None))  # type: ignore[arg-type]


def _video(seed: int) -> tuple[list[int], list[Any]]:
    """Terra's whole context: 25 frames of 64 ids, and an action between two."""
    random = np.random.default_rng(seed)
    ids: list[int] = []
    for _ in range(24):
        ids += [*random.integers(0, 100, 64).tolist(), *ACTION]
    ids += random.integers(0, 100, 64).tolist()
    return ids, [random.normal(size=(6, 3)).astype(np.float32) for _ in range(24)]


def _text(count: int, item: Callable[[int], Any]) -> tuple[list[int], list[Any]]:
    """A text with some items."""
    return [1, *[3, 5, 6, 11, 10] * count], [item(number) for number in range(count)]


def _pose(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {key: random.normal(size=shape).astype(np.float32) for key, shape in POSE_SHAPES.items()}


ACTION = [101] * 6
POSE_SHAPES: dict[str, tuple[int, ...]] = {"joints": (7,), "camera": (3, 16, 16)}
KINDS = {
    "terra": Kind(
        TERRA,
        terra.CHECKPOINT,
        shapes={"actions": (6, 3)},
        target=ACTION,
        ids=lambda item: ACTION,
        process=_stacked,
        requests=[_video(seed) for seed in range(4)],
    ),
    "series": Kind(
        WAVES,
        series.CHECKPOINT,
        shapes={"series": (None, 1)},
        target=[3],
        ids=lambda item: [4] * -(-len(item["series"]) // 4),
        process=_standardised,
        requests=[_text(count, lambda seed: make_wave(seed).series) for count in (1, 2, 4)],
    ),
    "record": Kind(
        POSE,
        series.CHECKPOINT,
        shapes=POSE_SHAPES,
        target=[3],
        ids=lambda item: [4, 4],
        process=_stacked,
        requests=[_text(count, _pose) for count in (1, 2, 4)],
    ),
}
"""By the name in the benchmark."""
