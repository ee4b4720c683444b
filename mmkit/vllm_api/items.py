"""mmkit's items, fields and layouts as vLLM's objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from typing_extensions import override
from vllm.multimodal import inputs as vllm_inputs
from vllm.multimodal import parse as vllm_parse

from ..language.field import Field, Flat, Shared, packed
from ..plan.encoder_rows import rows_field
from ..plan.modality import BoundModality
from ..plan.parsing import Embedding, Taken
from ..plan.placement import Placement
from ..plan.plan import Plan
from .compat import ELEMENTS_ARE_NAMED, KEEPS_ON_CPU
from .offload import Offloaded

Items: TypeAlias = vllm_parse.ModalityDataItems[Any, Any]
"""The items of one modality."""


class RequestItems(vllm_parse.MultiModalDataItems):
    """The items of a request.

    Attributes:
        offloaded: the request's data, where they are processed in other processes.
        largest: the modalities whose items are the largest ones of the spec.
        hashes: those of the items, as far as they are known, by modality.
    """

    def __init__(self, items: Mapping[str, Items]) -> None:
        super().__init__()
        self.data: dict[str, Items] = dict(items)
        self.offloaded: Offloaded | None = None
        self.largest: frozenset[str] = frozenset()
        self.hashes: dict[str, list[str]] = {}

    def taken(self, name: str, indices: Iterable[int]) -> Taken:
        """Some items of a modality, ready for processing."""
        own = self.data[name]
        values, are_largest = [own.get(i) for i in indices], name in self.largest
        return Taken(values, isinstance(own, EmbedItems), len(own), are_largest)


class EmbedItems(vllm_parse.EmbeddingItems):
    """Precomputed embeddings, which vLLM tells from raw items by this class."""

    def __init__(self, embeddings: Sequence[Embedding], modality: str) -> None:
        super().__init__([own.rows for own in embeddings], modality)  # vLLM looks at these
        self.data: Any = list(embeddings)

    def get_item_for_hash(self, index: int) -> object:
        embedding = self.get(index)
        return dict(embedding) if len(embedding) > 1 else embedding.rows


class Parser(vllm_parse.MultiModalDataParser):
    """Turns callers' data into canonical items."""

    def __init__(self, plan: Plan, hidden_size: int | None) -> None:
        super().__init__()
        self.plan, self.hidden_size = plan, hidden_size

    @override
    def parse_mm_data(self, mm_data: Any) -> RequestItems:
        if isinstance(mm_data, Offloaded):
            if mm_data.parsed is None:
                mm_data.parsed = self.parse_mm_data(dict(mm_data))
                mm_data.parsed.offloaded = mm_data
            return mm_data.parsed
        self.plan.check_names(mm_data)
        modalities = self.plan.modalities
        return RequestItems(
            {name: self.parsed(modalities[name], own) for name, own in mm_data.items()}
        )

    def parsed(self, modality: BoundModality, data: Any) -> Items:
        """The items of one modality."""
        items, embeds, *_ = modality.parser.parse(data, self.hidden_size)
        kind = EmbedItems if embeds and items else vllm_parse.ProcessorBatchItems
        return kind(items, modality.name)


# -- processed fields ------------------------------------------------------------------------------


def vllm_fields(modality: BoundModality, with_rows: bool) -> dict[str, Any]:
    """vLLM's forms of the fields of a modality, by name: how it batches the parts of items.

    Args:
        modality: the modality.
        with_rows: whether the model compares the rows of its encoder with the layouts.
    """
    if (known := modality.adapted.get(with_rows)) is None:
        known = {key: _field(own) for key, own in modality.fields_and_embeds.items()}
        if with_rows and modality.sends_rows:
            known[rows_field(modality.name)] = vllm_inputs.MultiModalBatchedField(**_ON_CPU)
        modality.adapted[with_rows] = known
    return known


_ON_CPU = {"keep_on_cpu": True} if KEEPS_ON_CPU else {}


def _field(declared: Field) -> Any:
    options = _ON_CPU if declared.keep_on_cpu else {}
    if isinstance(declared, Flat):  # the slices are for what splits a field, and this one is split
        return vllm_inputs.MultiModalFlatField(slices=[], dim=declared.dim, **options)
    if isinstance(declared, Shared):
        return vllm_inputs.MultiModalSharedField(batch_size=1, **options)
    return vllm_inputs.MultiModalBatchedField(**options)


def kwargs_item(
    modality: BoundModality, fields: Mapping[str, Any], rows: int | None = None
) -> vllm_inputs.MultiModalKwargsItem:
    """vLLM's form of the processed fields of one item.

    Args:
        modality: that of the item.
        fields: hidden ones are left out.
        rows: the number of its encoder rows, where the model compares it.
    """
    forms = vllm_fields(modality, rows is not None)
    if rows is not None and (key := rows_field(modality.name)) in forms:
        fields = {**fields, key: torch.tensor(rows)}
    elements = {}
    for key, form in forms.items():
        if key in fields:
            names = (modality.name, key) if ELEMENTS_ARE_NAMED else ()
            elements[key] = vllm_inputs.MultiModalFieldElem(*names, packed(fields[key]), form)
    return vllm_inputs.MultiModalKwargsItem(elements)


# -- a request for the engine ----------------------------------------------------------------------


class Rendered(vllm_inputs.MultiModalKwargsItems):
    """The fields of a request that a processor of this copy of mmkit has made, or has checked."""


def is_rendered(prompt: Mapping[str, Any]) -> bool:
    """Whether a caller's prompt is a result of vLLM's renderer, with processed items."""
    return prompt.get("type") == "multimodal" and "mm_kwargs" in prompt


def engine_input(
    ids: list[int],
    items: Mapping[str, Sequence[vllm_inputs.MultiModalKwargsItem]],
    hashes: Mapping[str, Sequence[str]],
    placements: Sequence[Placement],
) -> dict[str, Any]:
    """A request in vLLM's form for its engine."""
    ranges: dict[str, list[vllm_inputs.PlaceholderRange]] = {}
    for at in placements:
        place = vllm_inputs.PlaceholderRange(at.start, len(at.tokens), at.tokens.is_embed)
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
