"""A modality, described for clients that have not read its spec."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from ..language.items import ItemType
from ..language.layout import Target
from ..plan.item import Item
from ..plan.modality import BoundModality
from ..wire.items import encode_value
from .protocol import ModalityInfo

MAX_EXAMPLE_ELEMENTS = 32
"""Elements of an example that is shown as nested lists. A larger one is shown in base64."""


def describe_modality(modality: BoundModality, limit: int | None) -> ModalityInfo:
    """Describe a modality for clients that have not read its spec.

    Args:
        modality: which processes its largest item for this.
        limit: the most items in one request; None for any number.
    """
    from ..document.convert import describe_item  # imports pydantic, which a client need not have

    item_type = modality.item
    largest_tokens = None
    if not modality.needs_hf:
        largest_tokens = modality.most_rows
    embeds = None
    if modality.parser.takes_embeds:
        embeds = modality.parser.embeds_field
    info = {
        "name": modality.name,
        "limit": limit,
        "largest_tokens": largest_tokens,
        "placeholder": _find_fixed_target(modality),
        "embeds": embeds,
        "example": _make_example(item_type),
        "expected": item_type.expected,
        "item": describe_item(item_type),
    }
    return msgspec.convert(info | item_type.schema(), ModalityInfo)


def _find_fixed_target(modality: BoundModality) -> list[int] | None:
    """Return the ids that a caller writes for an item; None if they depend on the item."""
    if modality.needs_hf or modality.layout_evaluator.depends_on_index:
        return None
    targets: set[Target] = set()
    values = list(modality.item.candidates())
    values.extend(modality.item.smallest())
    for value in values:
        item = Item(modality=modality.name, index=0, count=1, value=value)
        for caller_ids in modality.list_caller_ids([item]):
            targets.add(caller_ids.ids)
    if len(targets) != 1:
        return None
    return list(targets.pop())


def _make_example(item_type: ItemType) -> Any:
    """Return a small item in JSON; for an item that comes as a file, how the JSON begins."""
    if item_type.mime_type:
        return {f"{item_type.vllm_modality}_url": {"url": f"data:{item_type.mime_type};base64,..."}}
    items = item_type.small()
    example = items[-1] if items else None
    if isinstance(example, torch.Tensor) and example.numel() <= MAX_EXAMPLE_ELEMENTS:
        return example.tolist()
    return encode_value(example, "item")
