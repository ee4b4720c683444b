"""mmkit's items, fields and layouts as vLLM's objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, assert_never

import torch
from typing_extensions import override
from vllm.multimodal import inputs as vllm_inputs
from vllm.multimodal import parse as vllm_parse

from ..language.field import Batching, Field, compact
from ..plan.encoder_rows import row_count_field
from ..plan.item import Item, group_by_modality
from ..plan.modality import BoundModality
from ..plan.parsing import Embedding, ItemBatch
from ..plan.placement import Placement
from ..plan.plan import Plan
from .compat import ELEMENTS_ARE_NAMED, FILES_TELL_DECODING, KEEPS_ON_CPU

ModalityItems: TypeAlias = vllm_parse.ModalityDataItems[Any, Any]
"""vLLM's form of the items of one modality."""

# -- a caller's data -------------------------------------------------------------------------------


class Parser(vllm_parse.MultiModalDataParser):
    """Turns callers' data into canonical items."""

    def __init__(self, plan: Plan, hidden_size: int | None) -> None:
        super().__init__()
        self.plan = plan
        self.hidden_size = hidden_size

    @override
    def parse_mm_data(self, mm_data: Any) -> RequestItems:
        if not isinstance(mm_data, Offloaded):
            return self._parse_request(mm_data)
        if mm_data.parsed is None:
            mm_data.parsed = self._parse_request(dict(mm_data))
            mm_data.parsed.offloaded = mm_data
        return mm_data.parsed

    def _parse_request(self, data: Mapping[str, Any]) -> RequestItems:
        self.plan.check_names(data)
        items: dict[str, ModalityItems] = {}
        for name, data_of_modality in data.items():
            items[name] = self.parse_modality(self.plan.modalities[name], data_of_modality)
        return RequestItems(items)

    def parse_modality(self, modality: BoundModality, data: Any) -> ModalityItems:
        """Return the items of one modality."""
        batch: ItemBatch = modality.parser.parse(data, self.hidden_size)
        if batch.are_embeddings and batch.values:
            return EmbedItems(batch.values, modality.name)
        return vllm_parse.ProcessorBatchItems(batch.values, modality.name)


class RequestItems(vllm_parse.MultiModalDataItems):
    """vLLM's form of the items of a request.

    Attributes:
        offloaded: the request's data, where the items are processed in other processes.
        largest: the modalities whose items are the largest items of the spec. Only vLLM's dummy
            request has such, when the engine starts.
    """

    def __init__(self, items: Mapping[str, ModalityItems]) -> None:
        super().__init__()
        self.data: dict[str, ModalityItems] = dict(items)
        self.offloaded: Offloaded | None = None
        self.largest: frozenset[str] = frozenset()

    def make_items(self, uuids: Mapping[str, Sequence[str | None]]) -> list[Item]:
        """Return the items, modality by modality.

        Args:
            uuids: the names of items, by modality; None for an item without.
        """
        items: list[Item] = []
        for name, items_of_modality in self.data.items():
            count = len(items_of_modality)
            is_embedding = isinstance(items_of_modality, EmbedItems)
            is_largest = name in self.largest
            uuids_of_modality = uuids.get(name) or [None] * count
            for index in range(count):
                value = content = items_of_modality.get(index)
                if FILES_TELL_DECODING:
                    # the bytes of the file, which take less time to hash than the pixels
                    content = items_of_modality.get_item_for_hash(index)
                item = Item(
                    modality=name,
                    index=index,
                    count=count,
                    value=value,
                    content=content,
                    is_embedding=is_embedding,
                    is_largest=is_largest,
                    uuid=uuids_of_modality[index],
                )
                items.append(item)
        return items


class EmbedItems(vllm_parse.EmbeddingItems):
    """Precomputed embeddings, which vLLM tells from raw items by this class."""

    def __init__(self, embeddings: Sequence[Embedding], modality: str) -> None:
        rows = [embedding.rows for embedding in embeddings]
        super().__init__(rows, modality)  # vLLM looks at these
        self.data: Any = list(embeddings)

    def get_item_for_hash(self, index: int) -> object:
        embedding: Embedding = self.get(index)
        return embedding.content


# -- items that other processes process ------------------------------------------------------------


class ItemsPending(Exception):
    """Stops a request until other processes have processed some of its items.

    Attributes:
        items: the items.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        super().__init__()
        self.items = items


class Offloaded(dict[str, Any]):
    """A request's ``multi_modal_data``, whose items are processed in other processes.

    vLLM takes such a request through its steps several times, until all fields are here.

    Attributes:
        parsed: vLLM's form of the items, which are parsed once.
        hashes: the hashes of all items, which are hashed once; None before.
        fields: the fields of the items that are processed, by modality and index.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self.parsed: RequestItems | None = None
        self.hashes: list[str] | None = None
        self.fields: dict[tuple[str, int], dict[str, Any]] = {}

    def fill_in_fields(self, items: Sequence[Item]) -> None:
        """Fill in the fields of items that other processes have processed.

        Raises:
            ItemsPending: they have not.
        """
        for item in items:
            if (item.modality, item.index) not in self.fields:
                raise ItemsPending(items)
        for item in items:
            item.fields = self.fields[item.modality, item.index]

    def add_fields(self, items: Sequence[Item], fields: Mapping[str, Sequence[Any]]) -> None:
        """Keep the fields of processed items, which come by modality."""
        for name, items_of_modality in group_by_modality(items).items():
            for item, fields_of_item in zip(items_of_modality, fields[name], strict=True):
                self.fields[name, item.index] = fields_of_item


# -- processed fields ------------------------------------------------------------------------------


def make_vllm_fields(modality: BoundModality, *, sends_row_counts: bool) -> dict[str, Any]:
    """Return vLLM's fields of a modality, by name: how vLLM batches the parts of items.

    Args:
        modality: the modality, which keeps the result.
        sends_row_counts: whether the model receives the number of encoder rows of each item.
    """
    vllm_fields: dict[str, Any] | None = modality.adapter_memo.get(sends_row_counts)
    if vllm_fields is None:
        vllm_fields = {}
        for key, field in modality.fields_and_embeds.items():
            vllm_fields[key] = _make_vllm_field(field)
        if sends_row_counts and modality.needs_row_count:
            key = row_count_field(modality.name)
            vllm_fields[key] = vllm_inputs.MultiModalBatchedField(**_ON_CPU)
        modality.adapter_memo[sends_row_counts] = vllm_fields
    return vllm_fields


_ON_CPU = {"keep_on_cpu": True} if KEEPS_ON_CPU else {}


def _make_vllm_field(field: Field) -> Any:
    """Return vLLM's field for one of the spec, by the batching that its kind states."""
    options = _ON_CPU if field.keep_on_cpu else {}
    match field.batching:
        case Batching.STACKED:
            return vllm_inputs.MultiModalBatchedField(**options)
        case Batching.JOINED:
            # slices are for a field that is to be split; this one is split
            return vllm_inputs.MultiModalFlatField(slices=[], dim=field.dim, **options)
        case Batching.SHARED:
            return vllm_inputs.MultiModalSharedField(batch_size=1, **options)
        case unknown:
            assert_never(unknown)


def make_kwargs_item(
    modality: BoundModality, fields: Mapping[str, Any], row_count: int | None = None
) -> vllm_inputs.MultiModalKwargsItem:
    """Return vLLM's form of the processed fields of one item.

    Args:
        modality: the modality of the item.
        fields: hidden ones are left out.
        row_count: the number of its encoder rows, where the model receives it.
    """
    vllm_fields = make_vllm_fields(modality, sends_row_counts=row_count is not None)
    if row_count is not None:
        row_count_key = row_count_field(modality.name)
        if row_count_key in vllm_fields:
            fields = {**fields, row_count_key: _make_row_count(row_count)}
    elements = {}
    for key, vllm_field in vllm_fields.items():
        if key not in fields:
            continue
        data = compact(fields[key])
        if ELEMENTS_ARE_NAMED:
            element = vllm_inputs.MultiModalFieldElem(modality.name, key, data, vllm_field)
        else:
            element = vllm_inputs.MultiModalFieldElem(data, vllm_field)
        elements[key] = element
    return vllm_inputs.MultiModalKwargsItem(elements)


@lru_cache
def _make_row_count(count: int) -> torch.Tensor:
    """Return a number of encoder rows as a field; items of one number share it."""
    return torch.tensor(count)


# -- a request for the engine ----------------------------------------------------------------------


class CheckedKwargsItems(vllm_inputs.MultiModalKwargsItems):
    """The fields of a request that a processor of this copy of mmkit has made.

    `mmkit.vllm_api.admission` knows them by this class, and checks all others.
    """


def has_processed_items(prompt: Mapping[str, Any]) -> bool:
    """Return whether a caller's prompt is a result of vLLM's renderer, with processed items."""
    return prompt.get("type") == "multimodal" and "mm_kwargs" in prompt


def make_engine_input(
    ids: list[int], items: Sequence[Item], placements: Sequence[Placement]
) -> dict[str, Any]:
    """Return a request in vLLM's form for its engine.

    Args:
        ids: the prompt with the layouts of all items.
        items: the items whose fields go to the engine, with hashes and fields in vLLM's form.
        placements: where the layouts of these items, and of those that become ids only, stand in
            the prompt.
    """
    items_by_modality = group_by_modality(items)
    ranges: dict[str, list[vllm_inputs.PlaceholderRange]] = {}
    for placement in placements:
        if placement.modality not in items_by_modality:
            continue
        tokens = placement.tokens
        placeholders = vllm_inputs.PlaceholderRange(placement.start, len(tokens), tokens.is_embed)
        ranges.setdefault(placement.modality, []).append(placeholders)
    hashes: dict[str, list[str]] = {}
    fields: dict[str, list[Any]] = {}
    for name, items_of_modality in items_by_modality.items():
        hashes[name] = [item.hash for item in items_of_modality]
        fields[name] = [item.engine_fields for item in items_of_modality]
    kwargs_items = CheckedKwargsItems()
    kwargs_items.data = fields
    return {
        "type": "multimodal",
        "prompt_token_ids": ids,
        "mm_kwargs": kwargs_items,
        "mm_hashes": hashes,
        "mm_placeholders": ranges,
    }


def get_embeds_size(model_config: Any) -> int:
    """Return the width of the language model's rows."""
    # 0.11 has no projections
    size = getattr(model_config, "get_inputs_embeds_size", model_config.get_hidden_size)
    return int(size())
