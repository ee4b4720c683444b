"""mmkit's items, fields and layouts as vLLM's objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.multimodal.parse import (
    AudioProcessorItems,
    EmbeddingItems,
    ImageProcessorItems,
    ModalityDataItems,
    MultiModalDataItems,
    MultiModalDataParser,
    ProcessorBatchItems,
    VideoProcessorItems,
)

from ..bound.intake import Taken
from ..bound.modality import BoundModality
from ..bound.placeholders import rows_field
from ..field import Field, Flat, Shared, packed
from ..items import Embedding
from ..placement import Placement
from ..plan import Plan
from .compat import ELEMENTS_ARE_NAMED, KEEPS_ON_CPU
from .offload import Offloaded


class RequestItems(MultiModalDataItems):
    """The items of a request.

    Attributes:
        offloaded: the request's data, where they are processed in other processes.
        largest: the modalities whose items are the largest ones of the spec.
        hashes: those of the items, as far as they are known, by modality.
    """

    def __init__(
        self, items: Mapping[str, ModalityDataItems[Any, Any]], offloaded: Offloaded | None = None
    ) -> None:
        super().__init__()
        self.data: dict[str, ModalityDataItems[Any, Any]] = dict(items)
        self.offloaded = offloaded
        self.largest: frozenset[str] = frozenset()
        self.hashes: dict[str, list[str]] = {}

    def taken(self, name: str, indices: Iterable[int]) -> Taken:
        """Some items of a modality, ready for processing."""
        own = self.data[name]
        return Taken([own.get(i) for i in indices], isinstance(own, EmbedItems), len(own))


class EmbedItems(EmbeddingItems):
    """Precomputed embeddings."""

    def __init__(self, embeddings: Sequence[Embedding], modality: str) -> None:
        super().__init__([own.rows for own in embeddings], modality)  # vLLM looks at these
        self.data: Any = list(embeddings)

    def get_item_for_hash(self, index: int) -> object:
        embedding = self.get(index)
        return dict(embedding) if len(embedding) > 1 else embedding.rows


class Parser(MultiModalDataParser):
    """Turns callers' data into canonical items."""

    def __init__(self, plan: Plan, hidden_size: int | None) -> None:
        # not target_sr: canonical audio has its rate
        super().__init__(
            video_needs_metadata=any(m.item.metadata for m in plan.modalities.values())
        )
        self.plan, self.hidden_size = plan, hidden_size

    @override
    def parse_mm_data(self, mm_data: Any) -> RequestItems:
        offloaded = mm_data if isinstance(mm_data, Offloaded) else None
        if offloaded is not None and offloaded.parsed is not None:
            return offloaded.parsed
        self.plan.check_names(mm_data)
        items = RequestItems(
            {name: self.parsed(self.plan.modalities[name], own) for name, own in mm_data.items()},
            offloaded,
        )
        if offloaded is not None:
            offloaded.parsed = items
        return items

    def parsed(self, modality: BoundModality, data: Any) -> ModalityDataItems[Any, Any]:
        """The items of one modality."""
        items, embeds, _ = modality.intake.take(data, self.hidden_size)
        if embeds and items:
            return EmbedItems(items, modality.name)
        media = modality.item.media if items else None
        if media == "video":
            return _videos(items, self.video_needs_metadata)
        if media in _MEDIA:
            return _MEDIA[media](items)
        return ProcessorBatchItems(items, modality.name)


def _videos(items: Sequence[Any], with_metadata: bool) -> VideoProcessorItems:
    pairs = [item if isinstance(item, tuple) else (item, None) for item in items]
    data = items if with_metadata else [frames for frames, _ in pairs]
    return VideoProcessorItems(list(data), [metadata for _, metadata in pairs])


_MEDIA = {"image": ImageProcessorItems, "audio": AudioProcessorItems}


def vllm_fields(modality: BoundModality, with_rows: bool) -> dict[str, Any]:
    """vLLM's forms of the fields of a modality, by name: how it batches the parts of items.

    Args:
        modality: the modality.
        with_rows: whether the model compares the rows of its encoder with the layouts.
    """
    if (known := modality.adapted.get(with_rows)) is None:
        known = {key: _field(own) for key, own in modality.fields_and_embeds.items()}
        if with_rows and modality.placeholders.has_own_rows:
            known[rows_field(modality.name)] = MultiModalBatchedField(**_ON_CPU)
        modality.adapted[with_rows] = known
    return known


_ON_CPU = {"keep_on_cpu": True} if KEEPS_ON_CPU else {}


def _field(declared: Field) -> Any:
    options = _ON_CPU if declared.keep_on_cpu else {}
    if isinstance(declared, Flat):  # the slices are for what splits a field, and this one is split
        return MultiModalFlatField(slices=[], dim=declared.dim, **options)
    if isinstance(declared, Shared):
        return MultiModalSharedField(batch_size=1, **options)
    return MultiModalBatchedField(**options)


def kwargs_item(
    modality: BoundModality, fields: Mapping[str, Any], rows: int | None = None
) -> MultiModalKwargsItem:
    """vLLM's form of the processed fields of one item.

    Args:
        modality: that of the item.
        fields: hidden ones are left out.
        rows: the number of its encoder rows, where the model compares it.
    """
    forms = vllm_fields(modality, rows is not None)
    if rows is not None and (key := rows_field(modality.name)) in forms:
        fields = {**fields, key: torch.tensor(rows)}
    return MultiModalKwargsItem(
        {
            key: _element(modality.name, key, packed(fields[key]), form)
            for key, form in forms.items()
            if key in fields
        }
    )


def _element(modality: str, key: str, data: Any, form: Any) -> MultiModalFieldElem:
    if ELEMENTS_ARE_NAMED:
        return MultiModalFieldElem(modality, key, data, form)
    return MultiModalFieldElem(data, form)


class Rendered(MultiModalKwargsItems):
    """The fields of a request that a processor of this copy of mmkit has made, or has checked."""


def is_rendered(prompt: Mapping[str, Any]) -> bool:
    """Whether a caller's prompt is a result of vLLM's renderer, with processed items."""
    return prompt.get("type") == "multimodal" and "mm_kwargs" in prompt


def engine_input(
    ids: list[int],
    items: Mapping[str, Sequence[MultiModalKwargsItem]],
    hashes: Mapping[str, Sequence[str]],
    placements: Sequence[Placement],
) -> dict[str, Any]:
    """A request in vLLM's form for its engine."""
    ranges: dict[str, list[PlaceholderRange]] = {}
    for at in placements:
        placeholder = at.placeholder
        place = PlaceholderRange(at.start, len(placeholder), placeholder.is_embed)
        ranges.setdefault(at.modality, []).append(place)
    kwargs = Rendered()
    kwargs.data = dict(items)
    return {
        "type": "multimodal",
        "prompt_token_ids": ids,
        "mm_kwargs": kwargs,
        "mm_hashes": hashes,
        "mm_placeholders": ranges,
    }


def embeds_size(model_config: Any) -> int:
    """Width of the language model's rows."""
    # 0.11 has no projections
    size = getattr(model_config, "get_inputs_embeds_size", model_config.get_hidden_size)
    return int(size())


HOOKS = (Parser,)
"""Classes whose methods vLLM calls."""
