"""One item of a request, from a caller's data to the prompt of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .parsing import ItemBatch
from .placement import ItemLayout

# `Any`, so that a step may use what an earlier step has filled in without asking whether it did
_NOT_YET: Any = None


@dataclass(slots=True, eq=False)
class Item:
    """One item of a request. Each step of the request fills in an attribute.

    An item lives as long as its request is rendered. No cache keeps one: a cache may return what it
    has for another request, in which the item has another index. Other processes do not receive one
    either, but the values of several items (`make_batch`).

    An attribute may be filled in twice: where a cache has an item but no room for all items of the
    request, that item is processed and laid out again.

    ================== ========================= ===================================================
    step               reads                     fills in
    ================== ========================= ===================================================
    1 parse                                      the attributes up to `uuid`
    2 check            `uuid`
    3 hash             `content`, `uuid`         `hash`
    4 look up          `hash`                    `layout`, `cache_entry` and perhaps `engine_fields`
                                                 of items that a cache has. A `layout` that is None
                                                 from here on: no cache has the item
    5 process          `value`                   `fields` of the items that step 4 returns: those
                                                 that no cache has, and those that depend on them
    6 lay out          `value`, `fields`         `layout`, `engine_fields`, `cache_entry`, as in 5
    7 place            `layout`
    8 prepare the      `hash`, `engine_fields`,  `engine_fields`
    exchange           `cache_entry`
    ================== ========================= ===================================================

    Attributes:
        modality: the name of its modality.
        index: its position among the items of its modality in the request.
        count: the number of items of its modality in the request.
        value: the canonical item, or an `Embedding`; None for an item that only its uuid names.
        content: what its hash covers: the value, or the file from which the value was decoded.
        is_embedding: whether the value is precomputed embeddings.
        is_largest: whether it is the largest item of the spec.
        uuid: the name that the caller gives it, or None.
        hash: its key in vLLM's caches.
        fields: its processed fields by name; None for an item that a cache has.
        layout: what it becomes in the prompt.
        engine_fields: its fields in vLLM's form; None where only a cache has them. Step 8 puts an
            `UnsentItem` in their place, which has them or knows where they are: from then on it is
            never None, if the engine has a half of the cache.
        cache_entry: what a cache keeps of it beside the fields.
    """

    modality: str
    index: int
    count: int
    value: Any
    content: Any = None
    is_embedding: bool = False
    is_largest: bool = False
    uuid: str | None = None
    hash: str = ""
    fields: dict[str, Any] = _NOT_YET
    layout: ItemLayout = _NOT_YET
    engine_fields: Any = None
    cache_entry: Any = None

    def copy_unprocessed(self) -> Item:
        """Return the item as it was before any step but the hash."""
        return Item(
            modality=self.modality,
            index=self.index,
            count=self.count,
            value=self.value,
            content=self.content,
            is_embedding=self.is_embedding,
            is_largest=self.is_largest,
            uuid=self.uuid,
            hash=self.hash,
        )


def group_by_modality(items: Iterable[Item]) -> dict[str, list[Item]]:
    """Return the items of each modality, in their order."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        group = groups.get(item.modality)
        if group is None:
            groups[item.modality] = [item]
        else:
            group.append(item)
    return groups


def make_items(modality: str, batch: ItemBatch) -> list[Item]:
    """Return the items of a batch.

    Args:
        modality: the name of their modality.
        batch: the items.
    """
    items: list[Item] = []
    for position, value in enumerate(batch.values):
        item = Item(
            modality=modality,
            index=batch.index_of(position),
            count=batch.total,
            value=value,
            is_embedding=batch.are_embeddings,
            is_largest=batch.are_largest,
        )
        items.append(item)
    return items


def make_batches(items: Iterable[Item]) -> dict[str, ItemBatch]:
    """Return the items of a request as one batch for each modality."""
    batches: dict[str, ItemBatch] = {}
    for name, items_of_modality in group_by_modality(items).items():
        batches[name] = make_batch(items_of_modality)
    return batches


def make_batch(items: Sequence[Item]) -> ItemBatch:
    """Return the items of one modality in the form in which they are processed."""
    first = items[0]
    return ItemBatch(
        values=[item.value for item in items],
        are_embeddings=first.is_embedding,
        total=first.count,
        are_largest=first.is_largest,
        indices=[item.index for item in items],
    )
