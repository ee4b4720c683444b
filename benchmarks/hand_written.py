"""Classes of vLLM's processor written by hand, for modalities that vLLM has no model of.

These are Terra's actions, a series, and a record of two parts. The classes check shapes only.
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
Item = dict[str, torch.Tensor]
Request = tuple[list[int], list[Any]]
"""The ids of a prompt, and its items."""

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
        spec: the same modality, declared.
        folder: a checkpoint.
        shapes: of an item's parts, by field; None for a size that varies.
        target: the ids that stand for an item in a prompt.
        ids: returns the ids that take the target's place.
        process: makes fields of items.
        requests: to measure.
    """

    spec: ModelSpec
    folder: Path
    shapes: Shapes
    target: list[int]
    ids: Callable[[Item], list[int]]
    process: Callable[[Sequence[Item]], dict[str, Any]]
    requests: Sequence[Request]

    @property
    def name(self) -> str:
        return self.spec.modalities[0].name

    def parse_item(self, value: Any) -> Item:
        """Return a caller's item as tensors, by the names of its parts.

        An item of a single part is sent without its name.

        Raises:
            ValueError: it has another shape.
        """
        parts = value if isinstance(value, dict) else {self.name: value}
        item = {}
        for key, shape in self.shapes.items():
            tensor = torch.as_tensor(parts[key], dtype=torch.float32)
            for size, expected in zip(tensor.shape, shape, strict=True):
                if expected is not None and size != expected:
                    raise ValueError(f"{key}: expected shape {shape}, got {tuple(tensor.shape)}")
            item[key] = tensor
        return item

    def make_largest_item(self) -> Item:
        """Return an item of zeros, with 64 for each size that varies."""
        item = {}
        for key, shape in self.shapes.items():
            item[key] = torch.zeros([size or 64 for size in shape])
        return item

    def make_classes(self) -> Classes:
        """Return the classes below for this kind."""
        members = {"kind": self}
        return Classes(
            type("Info", (Info,), members),
            type("DummyInputs", (DummyInputs,), members),
            type("Processor", (Processor,), members),
        )


class Parser(MultiModalDataParser):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self._kind = kind

    def _get_subparsers(self) -> Any:
        return {self._kind.name: self._parse}

    def _parse(self, data: Any) -> Any:
        values = data if isinstance(data, list) else [data]
        items = [self._kind.parse_item(value) for value in values]
        return ProcessorBatchItems(items, self._kind.name)


class Info(BaseProcessingInfo):
    kind: ClassVar[Kind]

    def get_data_parser(self) -> Parser:
        return Parser(self.kind)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {self.kind.name: None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Any) -> Mapping[str, int]:
        return {self.kind.name: len(self.kind.ids(self.kind.make_largest_item()))}


class DummyInputs(BaseDummyInputsBuilder[Info]):
    kind: ClassVar[Kind]

    def get_dummy_text(self, mm_counts: Any) -> str:
        return ""

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Any, mm_options: Any) -> Any:
        return {name: [self.kind.make_largest_item()] * count for name, count in mm_counts.items()}


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
        name = self.kind.name

        def get_ids(index: int) -> list[int]:
            return self.kind.ids(mm_items[name].get(index))

        return [PromptReplacement(name, self.kind.target, get_ids)]


ACTION = [101] * 6
"""The ids of one of Terra's actions."""

POSE_SHAPES: dict[str, tuple[int, ...]] = {"joints": (7,), "camera": (3, 16, 16)}


def get_action_ids(item: Item) -> list[int]:
    return ACTION


def get_series_ids(item: Item) -> list[int]:
    """Return an id for every four steps, and for what is left of them."""
    return [4] * -(-len(item["series"]) // 4)


def get_pose_ids(item: Item) -> list[int]:
    return [4, 4]


def stack(items: Sequence[Item]) -> Item:
    """Return the fields of items with equal shapes."""
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def standardise_series(items: Sequence[Item]) -> dict[str, Any]:
    return dict(standardise([item["series"] for item in items], None))  # type: ignore[arg-type]


def make_video(seed: int) -> Request:
    """Return Terra's whole context: 25 frames of 64 ids, and an action between two."""
    random = np.random.default_rng(seed)
    ids: list[int] = []
    for _ in range(24):
        ids += random.integers(0, 100, 64).tolist() + ACTION
    ids += random.integers(0, 100, 64).tolist()
    return ids, [random.normal(size=(6, 3)).astype(np.float32) for _ in range(24)]


def make_text(items: Sequence[Any]) -> Request:
    """Return a text with items."""
    return [1] + [3, 5, 6, 11, 10] * len(items), list(items)


def make_waves(count: int) -> list[Any]:
    return [make_wave(seed).series for seed in range(count)]


def make_poses(count: int) -> list[dict[str, np.ndarray]]:
    """Return random items of two parts."""
    poses = []
    for seed in range(count):
        random = np.random.default_rng(seed)
        pose = {}
        for key, shape in POSE_SHAPES.items():
            pose[key] = random.normal(size=shape).astype(np.float32)
        poses.append(pose)
    return poses


KINDS = {
    "terra": Kind(
        TERRA,
        terra.CHECKPOINT,
        shapes={"actions": (6, 3)},
        target=ACTION,
        ids=get_action_ids,
        process=stack,
        requests=[make_video(seed) for seed in range(4)],
    ),
    "series": Kind(
        WAVES,
        series.CHECKPOINT,
        shapes={"series": (None, 1)},
        target=[3],
        ids=get_series_ids,
        process=standardise_series,
        requests=[make_text(make_waves(count)) for count in (1, 2, 4)],
    ),
    "record": Kind(
        POSE,
        series.CHECKPOINT,
        shapes=POSE_SHAPES,
        target=[3],
        ids=get_pose_ids,
        process=stack,
        requests=[make_text(make_poses(count)) for count in (1, 2, 4)],
    ),
}
"""By the name in the benchmark."""
