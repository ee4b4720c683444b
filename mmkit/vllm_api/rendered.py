"""Requests whose items were processed elsewhere: one host renders, another one generates.

vLLM hands such fields to the model as they come, and keeps them under the hashes that the request
gives them. So they are compared with the spec as far as it says what they are, built again from
their data alone, and named by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..bound.modality import BoundModality
from ..bound.placeholders import rows_field
from ..errors import InputError, SpecError, VllmApiError
from ..expr import COUNT, INDEX, Leaf, leaves
from ..field import Flat
from ..items import ItemType
from ..items.values import strided
from ..placement import Alternatives, Placement
from ..plan import Plan
from ..process import Identity
from ..spec import Modality
from .items import engine_input
from .moved import find
from .processor import CommonProcessor

REMEDY = "Send the items themselves."
_STATE = "Where items differ, state the field's shape in the spec."

try:
    find(
        "multimodal.cache.base:MultiModalCacheMissError",
        "multimodal.cache:MultiModalCacheMissError",
    )
    TAKEN = True
except VllmApiError:
    # items that pass no processor put others out of the engine's cache, which was no request's
    # mistake before
    TAKEN = False


class UnsaidError(InputError):
    """Fields of which the spec does not say enough to take them from elsewhere."""


class _Item(NamedTuple):
    """One item: the data of its fields, and its alternatives."""

    fields: dict[str, Any]
    alternatives: Alternatives
    embeds: bool


def checked(processor: CommonProcessor, prompt: Mapping[str, Any]) -> dict[str, Any]:
    """A rendered request as the engine may have it.

    Args:
        processor: that of the model.
        prompt: vLLM's `MultiModalInput`; its ids have been checked.

    Raises:
        InputError: the fields, or where the items stand, are not what the spec says.
        UnsaidError: it does not say enough.
    """
    plan, ids = processor.plan, prompt["prompt_token_ids"]
    sent, ranges = (
        _by_modality(processor, prompt, part) for part in ("mm_kwargs", "mm_placeholders")
    )
    plan.check_names([*sent, *ranges])
    plan.check_bare(ids, [name for name, items in sent.items() if items])
    counts = {name: len(own) for name, own in sent.items()}
    rewritten = plan.rewrite("prompt", list(ids), counts)
    items: dict[str, list[_Item]] = {}
    for name in sent.keys() | ranges.keys():
        modality, parts, places = plan.modalities[name], sent.get(name, ()), ranges.get(name, ())
        if len(parts) != len(places):
            raise InputError(
                modality.where,
                f"a placeholder for each of {len(parts)} items",
                str(len(places)),
                REMEDY,
            )
        modality.intake.check_count(len(parts), processor.info.allowed_mm_limits[name])
        items[name] = [
            _item(processor, modality, part, i, len(parts)) for i, part in enumerate(parts)
        ]
    hashes = {
        name: [processor.hash_of_fields(name, item.fields) for item in known]
        for name, known in items.items()
    }
    fields = {
        name: [
            processor.item(plan.modalities[name], one.fields, one.alternatives, one.embeds)
            for one in known
        ]
        for name, known in items.items()
    }
    placements = _placements(plan, list(ids), rewritten, items, ranges)
    return {**prompt, **engine_input(ids, fields, hashes, placements)}


def _by_modality(
    processor: CommonProcessor, prompt: Mapping[str, Any], part: str
) -> Mapping[str, Sequence[Any]]:
    sent = prompt.get(part)
    if not isinstance(sent, Mapping) or not all(
        isinstance(items, Sequence) for items in sent.values()
    ):
        raise InputError(
            f"{processor.plan.spec.name}.{part}", "lists by modality", type(sent).__name__, REMEDY
        )
    return sent


def _item(
    processor: CommonProcessor, modality: BoundModality, sent: Any, index: int, count: int
) -> _Item:
    """One item as it was sent, not placed yet."""
    where = f"{modality.where}[{index}]"
    if not isinstance(sent, Mapping):
        remedy = "Send them: what another process has kept of an item is not known here."
        raise InputError(where, "processed fields", type(sent).__name__, remedy)
    fields = {key: getattr(element, "data", None) for key, element in sent.items()}
    fields.pop(rows_field(modality.name), None)  # counted again
    for key, part in fields.items():
        if isinstance(part, torch.Tensor):
            fields[key] = strided(part, f"{where}, {key}", "a plain tensor")
    intake = modality.intake
    embeds = intake.takes_embeds and intake.embeds_field in fields
    item: Any = SimpleNamespace(index=index)
    if embeds:
        if not processor.takes_embeds:
            remedy = "Start vLLM with --enable-mm-embeds."
            raise InputError(where, modality.item.expected, intake.embeds_field, remedy)
        width = processor.data_parser.hidden_size
        ((item,), _) = intake.take({key: [part] for key, part in fields.items()}, width)
    elif set(fields) != set(modality.fields):
        raise InputError(
            where, f"the fields {sorted(modality.fields)}", str(sorted(fields)), REMEDY
        )
    scope = modality.scope(item, index, fields, count)
    if not embeds:
        _compare(processor, modality, fields, scope, index)
    with _refusing(modality, where):
        alternatives = modality.placeholders.alternatives(scope, embeds=embeds)
        placeholder = alternatives[0].placeholder
        modality.check_positions(fields, alternatives)
    if embeds:
        rows, given = placeholder.num_embeds, len(item.rows)
        modality.placeholders.check_rows(index, rows, sent=given, most=None)
    return _Item(fields, alternatives, embeds)


@contextmanager
def _refusing(modality: BoundModality, where: str) -> Iterator[None]:
    """A context for checks against the spec: a contradiction is a mistake of the caller, and the
    spec may also read values that are missing here."""
    try:
        yield
    except SpecError as error:
        kind = UnsaidError if _reads_more(modality) else InputError
        raise kind(where, "what the spec says", str(error).rstrip("."), REMEDY) from error


def compared(spec: Modality) -> frozenset[Leaf]:
    """The leaves of the layout, the targets and the fields of a modality."""
    sent = [field for field in spec.fields.values() if not field.hidden]
    return leaves([spec.layout, *(update.target for update in spec.update), *sent])


def _reads_more(modality: BoundModality) -> bool:
    """Whether this is more than the fields that are sent: the raw item, hidden fields, or what a
    function reads."""
    return any(
        leaf.root == "function"
        or (leaf.root == "item" and leaf not in (INDEX, COUNT))
        or (leaf.root == "fields" and leaf.keys[0] not in modality.fields)
        for leaf in compared(modality.spec)
    )


def _compare(
    processor: CommonProcessor,
    modality: BoundModality,
    fields: Mapping[str, Any],
    scope: Any,
    index: int,
) -> None:
    """Compare the fields of an item with what is stated of them; where nothing is, with those of
    another item."""
    sample = processor.sample(modality.name)
    is_item = isinstance(modality.spec.process, Identity)
    for name, declared in modality.fields.items():
        part, like, where = fields[name], sample[name], f"{modality.where}[{index}], {name}"
        if type(part) is not type(like):
            raise InputError(where, f"a {type(like).__name__}", f"a {type(part).__name__}", REMEDY)
        with _refusing(modality, where):
            value = declared.derive(scope) if declared.is_derived else part
            sizes = declared.sizes_of([scope])
            declared.check(part, scope, index)
        if not _equal(part, value):
            raise InputError(where, f"{value}, as the spec derives it", str(part), REMEDY)
        if not isinstance(part, torch.Tensor):
            continue
        if part.dtype != like.dtype:
            raise InputError(where, f"dtype {like.dtype}", str(part.dtype), REMEDY)
        # that of an item is compared below
        known = declared.shape is not None or (is_item and not declared.is_derived)
        shape = list(part.shape if known else like.shape)
        if isinstance(declared, Flat) and sizes:
            shape[declared.dim] = sizes[0]
        if list(part.shape) != shape:
            raise UnsaidError(
                where, f"shape {tuple(shape)}", str(tuple(part.shape)), f"{REMEDY} {_STATE}"
            )
        # a spec that makes others itself, as a mask of infinities, has them in the sample
        if not part.isfinite().all() and like.isfinite().all() and not _takes_any(modality.item):
            raise InputError(where, "finite values", "NaN or an infinity", REMEDY)
    if is_item:
        processed = [name for name, field in modality.fields.items() if not field.is_derived]
        sent = {name: fields[name] for name in processed}
        value = sent if modality.item.part_names else next(iter(sent.values()))
        modality.item.canonical(value, f"{modality.where}[{index}]")


def _takes_any(item: ItemType) -> bool:
    """Whether an item, or a part of one, may hold NaN or infinities."""
    parts = getattr(item, "parts", {}).values()
    return any(not getattr(part, "finite", True) for part in (item, *parts))


def _equal(part: Any, value: Any) -> bool:
    if part is value:
        return True
    if isinstance(part, torch.Tensor):
        return part.shape == torch.as_tensor(value).shape and bool(
            (part == torch.as_tensor(value)).all()
        )
    return bool(part == value)


def _placements(
    plan: Plan,
    ids: list[int],
    rewritten: list[int],
    items: Mapping[str, list[_Item]],
    ranges: Mapping[str, Sequence[Any]],
) -> list[Placement]:
    """Where the layouts stand in the prompt, which is where the request says. The mask of a range
    is lost on vLLM's wire."""
    alternatives = {name: [item.alternatives for item in known] for name, known in items.items()}
    where = f"{plan.spec.name}.prompt"
    refusal = InputError(where, "the layouts of its items", "others, or one too many", REMEDY)
    if rewritten != ids:
        expected = f"{rewritten}, as the spec rewrites it"
        refusal = InputError(where, expected, str(ids), REMEDY)
    try:
        # a prompt that is written again may hold the targets in place of the layouts
        expanded, placements = plan.place(rewritten, alternatives)
    except InputError as error:
        raise refusal from error
    if expanded != ids:
        raise refusal
    for at in placements:
        place, placeholder = ranges[at.modality][at.index], at.placeholder
        stated = getattr(place, "offset", None), getattr(place, "length", None)
        mask = getattr(place, "is_embed", None)
        same_mask = mask is None or [*map(bool, mask)] == [*map(bool, placeholder.mask)]
        if stated != (at.start, len(placeholder)) or not same_mask:
            where = f"{plan.modalities[at.modality].where}[{at.index}]"
            rows = f"{placeholder.num_embeds} of them embed()"
            expected = f"a placeholder of {len(placeholder)} ids at {at.start}, {rows}"
            raise InputError(where, expected, repr(place), REMEDY)
    return placements
