"""What a processor does with single items: their prompt updates, and the splitting of fields."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from vllm.multimodal.inputs import MultiModalKwargsItems
from vllm.multimodal.processing import BaseMultiModalProcessor

from ..language.layout import Insert
from ..plan.placement import ItemLayout
from ..vllm_api import compat
from ..vllm_api.compat import find
from ..vllm_api.pipeline import ProcessorRequest, has_pipeline
from .vllm_path import Data, apply_inputs, collect_outcome, mask_flags, parse_items

_PromptIndex = find(
    "multimodal.processing.processor:PromptIndex", "multimodal.processing:PromptIndex"
)

# Up to 0.28 a prompt passes a hand-written processor with the items, and may be a text.
_TAKES_TEXT_PROMPTS = (
    "prompt" in inspect.signature(BaseMultiModalProcessor._apply_hf_processor_main).parameters
)


@dataclass(frozen=True)
class ItemUpdate:
    """The prompt update of one item, by its first alternative.

    Attributes:
        target: the ids that a caller writes for the item; none where it is inserted at an anchor.
        ids: the layout of the item.
        mask: which of these ids receive encoder rows.
        is_inserted: the layout goes after the target instead of in its place.
        prefix: the ids with which a prompt must start.
        all_targets: the targets of all alternatives.
    """

    target: list[int]
    ids: list[int]
    mask: tuple[bool, ...]
    is_inserted: bool
    prefix: list[int]
    all_targets: list[list[int]]


def find_updates(
    processor: Any, name: str, values: list[Any], kwargs: Data | None = None
) -> list[ItemUpdate]:
    """Return the updates of a processor for items of one modality.

    An item for which the processor has no update has no ids.

    Args:
        processor: vLLM's processor object.
        name: the modality.
        values: the items, as a caller sends them.
        kwargs: `mm_processor_kwargs`.
    """
    data = {name: values}
    kwargs = kwargs or {}
    if has_pipeline(processor):
        return _find_updates_of_spec(processor, data, kwargs)
    processed = process_items(processor, data, kwargs)
    updates = processor._get_mm_prompt_updates(processed.items, kwargs, processed.kwargs_items)
    if name not in updates:
        return [_NO_UPDATE for _ in values]
    return [_convert_update(processor, alternatives) for alternatives in updates[name]]


_NO_UPDATE = ItemUpdate([], [], (), True, [], [])


# -- generated processors --------------------------------------------------------------------------


def _find_updates_of_spec(
    processor: Any, data: dict[str, list[Any]], kwargs: Data
) -> list[ItemUpdate]:
    items = parse_items(processor, data).make_items({})
    processor.pipeline.process_and_lay_out(ProcessorRequest([], items, options=kwargs), items)
    return [_convert_update_of_spec(item.layout) for item in items]


def _convert_update_of_spec(layout: ItemLayout) -> ItemUpdate:
    update, target = layout.updates[0]
    is_inserted = isinstance(update, Insert)
    prefix: list[int] = []
    if is_inserted:
        prefix = list(target)
    all_targets = []
    for ids in layout.caller_ids:
        if ids:
            all_targets.append(list(ids))
    return ItemUpdate(
        target=list(layout.caller_ids[0]),
        ids=list(layout.tokens.ids),
        mask=tuple(bool(flag) for flag in layout.tokens.mask),
        is_inserted=is_inserted,
        prefix=prefix,
        all_targets=all_targets,
    )


# -- hand-written processors -----------------------------------------------------------------------


class ProcessedItems(NamedTuple):
    """What a hand-written processor makes of items before it places them.

    Attributes:
        fields: the processed fields of all items.
        config: the field configs.
        kwargs_items: the fields, split into items (MultiModalKwargsItems).
        items: the parsed items.
    """

    fields: Any
    config: Any
    kwargs_items: Any
    items: Any


def process_items(processor: Any, data: Data, kwargs: Data) -> ProcessedItems:
    """Process items by a hand-written processor, without a prompt and without placing them."""
    items = parse_items(processor, data)
    options = deepcopy(dict(kwargs))
    if _TAKES_TEXT_PROMPTS:
        result = processor._apply_hf_processor_main(
            [], items, options, {}, enable_hf_prompt_update=False
        )
        fields = result[1]
    else:
        fields = processor._apply_hf_processor_main(items, options)
    config = processor._get_mm_fields_config(fields, kwargs)
    kwargs_items = MultiModalKwargsItems.from_hf_inputs(fields, config)
    return ProcessedItems(fields, config, kwargs_items, items)


def _convert_update(processor: Any, alternatives: Sequence[Any]) -> ItemUpdate:
    """Read vLLM's resolved updates of one item."""
    first = alternatives[0]
    layout = _encode_sequence(processor, first.content.full)
    mask = None
    if first.content.is_embed is not None:
        if _TAKES_TEXT_PROMPTS:
            mask = first.content.is_embed(processor.info.ctx.tokenizer, first.content.full)
        else:
            mask = first.content.is_embed(first.content.full)
    all_targets = []
    for alternative in alternatives:
        if not isinstance(alternative.target, _PromptIndex):
            all_targets.append(_encode_sequence(processor, alternative.target))
    target: list[int] = []
    prefix: list[int] = []
    if isinstance(first.target, _PromptIndex):
        prefix = _find_prefix(first.target)
    else:
        target = all_targets[0]
    return ItemUpdate(
        target=target,
        ids=layout,
        mask=mask_flags(mask, len(layout)),
        is_inserted=first.mode.name == "INSERT",
        prefix=prefix,
        all_targets=all_targets,
    )


def _encode_sequence(processor: Any, sequence: Any) -> list[int]:
    """Return the ids of a target or a layout of a hand-written processor: a text or ids."""
    if isinstance(sequence, str):
        sequence = processor.info.get_tokenizer().encode(sequence, add_special_tokens=False)
    return list(sequence)


def _find_prefix(index: Any) -> list[int]:
    """Return the ids after which a PromptIndex of vLLM inserts; none where it needs no such ids.

    vLLM's `PromptIndexTargets.prefix(ids)` keeps the ids only as a variable of its function, so
    they are looked up there. Without them, drawn prompts would lack the prefix, and all of them be
    refused.
    """
    cells = getattr(index.get_match_index, "__closure__", None) or ()
    for cell in cells:
        if isinstance(cell.cell_contents, list):
            return cell.cell_contents
    return []


class FieldRoundTrip(NamedTuple):
    """A field before and after it is split into items.

    Attributes:
        processed: the value that was processed.
        batched: the value that batching its items again gives; None where no item has the field.
    """

    processed: Any
    batched: Any


def split_and_batch(processor: Any, data: Data, kwargs: Data) -> dict[str, FieldRoundTrip]:
    """Split the fields of a hand-written processor into items, and batch these again.

    Returns:
        The declared fields of the modalities in `data`, by name.
    """
    processed = process_items(processor, data, kwargs)
    batched = {}
    for items in processed.kwargs_items.values():
        for key, element in items[0].items():
            batched[key] = element.field.reduce_data([item[key] for item in items])
    # fields of modalities without items have no items to go to
    absent = set(processor.info.get_supported_mm_limits()) - set(data)
    results = {}
    for key, field_config in processed.config.items():
        if key in processed.fields and field_config.modality not in absent:
            results[key] = FieldRoundTrip(processed.fields[key], batched.get(key))
    return results


# -- the largest items -----------------------------------------------------------------------------


class MostRows(NamedTuple):
    """The most encoder rows of an item.

    Attributes:
        scheduled: as the processing info states it.
        dummy: the updates of the dummy item.
    """

    scheduled: int
    dummy: int


@cache
def find_most_rows(processor: Any, name: str) -> MostRows:
    """Return the most encoder rows of an item of a modality."""
    info = processor.info
    seq_len = info.ctx.model_config.max_model_len
    counts = {name: 1}
    if hasattr(processor, "get_dummy_mm_inputs"):
        result = processor.get_dummy_mm_inputs(counts)
    else:
        inputs = processor.dummy_inputs.get_dummy_processor_inputs(seq_len, counts, {})
        if compat.TAKES_PARTS:
            items = getattr(inputs, compat.ITEMS, None)
            result = processor.apply(inputs.prompt, items, inputs.hf_processor_mm_kwargs)
        else:
            result = apply_inputs(processor, inputs)
    dummy = 0
    for item_range in collect_outcome(result).ranges.get(name, []):
        dummy += sum(item_range.mask)
    by_modality = info.get_mm_max_tokens_per_item(seq_len, counts) or {}
    scheduled = by_modality.get(name)
    if scheduled is None:
        scheduled = dummy
    return MostRows(scheduled, dummy)
