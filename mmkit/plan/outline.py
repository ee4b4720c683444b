"""The outline of a request: what follows from the facts of its items, without their content.

Routers and planners need the ids, the ranges and the sizes of a request, and the keys of its items
in vLLM's caches, and no pixels. A layout over `item.*`, and over fields that are derived from it,
tells them: nothing is processed, and no Hugging Face processor is called. `Plan.outline` makes an
outline of these steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ..errors import InputError, MmkitError
from ..language.items.facts import AudioFacts as AudioFacts
from ..language.items.facts import Facts
from ..language.items.facts import ImageFacts as ImageFacts
from ..language.items.facts import ListFacts as ListFacts
from ..language.items.facts import RecordFacts as RecordFacts
from ..language.items.facts import TensorFacts as TensorFacts
from ..language.items.facts import TextFacts as TextFacts
from ..language.items.facts import VideoFacts as VideoFacts
from .files import ImageFile
from .files import decode_audio_file as decode_audio_file
from .files import inspect_image_file as inspect_image_file
from .hashes import ItemHasher as ItemHasher
from .hashes import salt_uuid
from .item import Item, make_batch, make_items
from .modality import BoundModality
from .parsing import Embedding, ItemBatch
from .placement import Placement
from .processing import NeedsProcessing as NeedsProcessing
from .processing import ProcessedFields, make_needs_processing


@dataclass(frozen=True)
class Outline:
    """A request, as far as the facts of its items tell.

    Attributes:
        prompt_token_ids: the prompt with the layouts in it; of an encoder-decoder model, the
            encoder's.
        placements: the place of each item's layout, in prompt order.
        rows: per modality and item, the number of its encoder rows.
        hashes: per modality and item, its key in vLLM's caches; None where its content is not here
            and the caller has not named it, where it becomes ids only, and where there is no
            hasher.
        fields: per modality and item, the fields that follow from its facts.
        uncomputed_fields: per modality, the names of the fields that a model receives beside these.
    """

    prompt_token_ids: list[int]
    placements: list[Placement]
    rows: dict[str, list[int]]
    hashes: dict[str, list[str | None]]
    fields: dict[str, ProcessedFields]
    uncomputed_fields: dict[str, list[str]]


def parse_modality(modality: BoundModality, data: Any, hidden_size: int | None) -> list[Item]:
    """Return the items of one modality, of which only facts may be known.

    Args:
        modality: the modality.
        data: as a caller writes it into ``multi_modal_data``, or `Facts`, or a list of these.
        hidden_size: width of the language model's rows; None if it is not known.

    Raises:
        InputError: the items are malformed, or more than the spec's limit; the facts are those of
            no item of the modality; or facts stand beside items.
    """
    facts = _list_facts(data, modality.where)
    if facts is None:
        batch = modality.parser.parse(data, hidden_size)
        modality.parser.check_present(batch, "None")
        contents = [_find_content(value) for value in batch.values]
    else:
        batch = ItemBatch.whole(_check_facts(modality, facts))
        contents = [_find_content_of_facts(facts_of_item) for facts_of_item in facts]
    modality.parser.check_count(batch.total, modality.limit)
    items = make_items(modality.name, batch)
    for item, content in zip(items, contents, strict=True):
        item.content = content
    return items


def _list_facts(data: Any, where: str) -> list[Facts] | None:
    """Return the facts in the data of a modality, as a list; None where it holds items.

    Raises:
        InputError: facts stand beside items.
    """
    if isinstance(data, Facts):
        return [data]
    if not isinstance(data, (list, tuple)):
        return None
    is_facts = [isinstance(element, Facts) for element in data]
    if not any(is_facts):
        return None
    if not all(is_facts):
        index = is_facts.index(False)
        remedy = "Send facts of all items of a modality, or all items."
        raise InputError(f"{where}[{index}]", "facts", type(data[index]).__name__, remedy)
    return list(data)


def _check_facts(modality: BoundModality, facts: Sequence[Facts]) -> list[SimpleNamespace]:
    """Return the facts of items as scopes have them.

    Raises:
        InputError: no item of the modality has such facts.
    """
    values = []
    for index, facts_of_item in enumerate(facts):
        value = modality.item.check_facts(facts_of_item, f"{modality.where}[{index}]")
        value.index = index
        values.append(value)
    return values


def _find_content(value: Any) -> Any:
    """Return what the hash of a canonical item, or of precomputed embeddings, covers."""
    return value.content if isinstance(value, Embedding) else value


def _find_content_of_facts(facts: Facts) -> Any:
    """Return what the hash of an item covers; None where only its facts are known."""
    return facts if isinstance(facts, ImageFile) else None


def name_items(
    modality: BoundModality,
    items: Sequence[Item],
    uuids: Sequence[str | None],
    cache_salt: str | None,
) -> None:
    """Fill in the uuids of the items of one modality.

    Raises:
        InputError: another number of hashes, or a hash that is no string.
    """
    where = f"{modality.where}, multi_modal_uuids"
    if len(uuids) != len(items):
        raise InputError(where, f"{len(items)} uuid(s)", str(len(uuids)))
    for item, uuid in zip(items, uuids, strict=True):
        item.uuid = salt_uuid(uuid, cache_salt)
        check_uuid(item, modality)


def check_uuid(item: Item, modality: BoundModality) -> None:
    """Refuse a uuid that is no string.

    Raises:
        InputError: names the item.
    """
    if item.uuid is not None and not isinstance(item.uuid, str):
        where = f"{modality.where}[{item.index}]"
        got = f"{type(item.uuid).__name__} {item.uuid!r}"
        raise InputError(where, "a string in multi_modal_uuids", got)


def find_unknown_reads(modality: BoundModality) -> list[str]:
    """Return the source of what keeps the layouts of a modality from following from facts.

    Where a function makes the layout, it is tried on the largest item.
    """
    reads = _list_unknown_reads(modality)
    if reads or not modality.layout_evaluator.is_opaque:
        return reads
    largest = modality.item.candidates()[0]
    (item,) = make_items(modality.name, ItemBatch.whole([largest]))
    try:
        lay_out([item], modality, may_be_larger=True)
    except NeedsProcessing as error:
        return error.reads
    except MmkitError:
        pass  # the item itself is refused, and not for what is read
    return []


def check_reads(items: Sequence[Item], modality: BoundModality) -> None:
    """Refuse raw items of a modality whose layout, by declaration, does not follow from facts.

    Raises:
        NeedsProcessing: names the expressions.
    """
    reads = _list_unknown_reads(modality)
    if reads and not items[0].is_embedding:
        raise make_needs_processing(f"{modality.where}, layout", reads)


def _list_unknown_reads(modality: BoundModality) -> list[str]:
    """Return the source of what the layouts read, by declaration, beyond facts."""
    processor = modality.field_processor
    evaluator = modality.layout_evaluator
    return evaluator.find_unknown_reads(processor.from_facts, processor.with_known_shapes)


def lay_out(items: Sequence[Item], modality: BoundModality, *, may_be_larger: bool) -> None:
    """Fill in the layouts of items of one modality, and the fields that follow from their facts.

    Items with more encoder rows than the largest one are not refused where only the Hugging Face
    processor knows its rows: where a function makes the layouts, and of embeddings.

    Args:
        items: at least one; an item is canonical, or its facts, as scopes have them.
        modality: the modality.
        may_be_larger: whether they may have more encoder rows than the largest item.

    Raises:
        NeedsProcessing: a function reads what only processing tells.
        InputError: the spec refuses an item.
    """
    batch = make_batch(items)
    fields: ProcessedFields = batch.values
    if not batch.are_embeddings:
        fields = modality.field_processor.derive_from_facts(batch)
    may_be_larger = may_be_larger or modality.needs_hf
    for item, fields_of_item in zip(items, fields, strict=True):
        item.fields = fields_of_item
        item.layout = modality.lay_out(item, may_be_larger=may_be_larger)


def hash_items(
    items: Sequence[Item],
    modality: BoundModality,
    hasher: ItemHasher | None,
    options: Mapping[str, Any],
) -> list[str | None]:
    """Return the keys of items of one modality in vLLM's caches; None where one is not known.

    Args:
        items: at least one.
        modality: the modality.
        hasher: makes the hashes; None leaves them out.
        options: on which the hashes depend.
    """
    if hasher is None or modality.is_never_kept or modality.is_ids_only:
        return [None] * len(items)
    are_known = [item.content is not None or item.uuid is not None for item in items]
    if not modality.are_independent(len(items)) and not all(are_known):
        return [None] * len(items)  # each depends on all of them
    hashes: list[str | None] = []
    for key, is_known in zip(hasher.hash_items(modality, items, options), are_known, strict=True):
        hashes.append(key if is_known else None)
    return hashes


def select_fields(items: Sequence[Item], modality: BoundModality) -> ProcessedFields:
    """Return the fields of each item that follow from its facts; of embeddings, those sent."""
    if items[0].is_embedding:
        return [item.fields for item in items]
    fields = []
    for item in items:
        computed = {name: item.fields[name] for name in modality.field_processor.from_facts}
        fields.append(computed)
    return fields


def list_uncomputed_fields(items: Sequence[Item], modality: BoundModality) -> list[str]:
    """Return the names of the fields that a model receives and that do not follow from facts."""
    if items[0].is_embedding:
        return []
    computed = modality.field_processor.from_facts
    return [name for name in modality.fields if name not in computed]
