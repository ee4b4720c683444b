"""Requests whose items were processed elsewhere: one host renders, another one generates.

vLLM hands such fields to the model as they come, and keeps them under the hashes that the request
gives them. So they are compared with the spec as far as it says what they are, built again from
their data alone, and named by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers.feature_extraction_utils import BatchFeature
from vllm.multimodal.inputs import MultiModalKwargsItems

from ..bound.modality import BoundModality
from ..bound.processing import Processed
from ..errors import InputError, SpecError, VllmApiError
from ..field import Flat
from ..layout import Placeholder
from ..process import Identity
from .common import field_configs
from .moved import PlaceholderFeaturesInfo, find
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


class _Item(NamedTuple):
    """One item: the data of its fields, whether these are precomputed embeddings, its evaluated
    layout, and where that starts in the prompt."""

    fields: dict[str, Any]
    embeds: bool
    placeholder: Placeholder
    start: int = 0


def checked(processor: CommonProcessor, prompt: Mapping[str, Any]) -> dict[str, Any]:
    """A rendered request as the engine may have it.

    Args:
        processor: that of the model.
        prompt: vLLM's `MultiModalInput`; its ids have been checked.

    Raises:
        InputError: the fields, or where the items stand, are not what the spec says, or it does not
            say enough.
    """
    plan, ids = processor.plan, prompt["prompt_token_ids"]
    sent, ranges = (
        _by_modality(processor, prompt, part) for part in ("mm_kwargs", "mm_placeholders")
    )
    plan.check_names([*sent, *ranges])
    plan.check_bare(ids, [name for name, items in sent.items() if items])
    counts = {name: len(own) for name, own in sent.items()}
    if (rewritten := plan.rewrite("prompt", list(ids), counts)) != list(ids):
        where, expected = f"{plan.spec.name}.prompt", f"{rewritten}, as the spec rewrites it"
        raise InputError(where, expected, str(list(ids)), REMEDY)
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
        known = [_item(processor, modality, part, i, len(parts)) for i, part in enumerate(parts)]
        items[name] = [_placed(modality, item, places[i], i, ids) for i, item in enumerate(known)]
    _apart(processor, items)
    return {
        **prompt,
        "mm_kwargs": _built(processor, items),
        "mm_hashes": {
            name: [processor.hash_of_fields(name, item.fields) for item in known]
            for name, known in items.items()
        },
        "mm_placeholders": {
            name: [
                PlaceholderFeaturesInfo(
                    name, i, item.start, item.placeholder.ids, item.placeholder.is_embed
                ).to_range()
                for i, item in enumerate(known)
            ]
            for name, known in items.items()
        },
    }


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
    with _refusing(where):
        placeholder = modality.placeholders.preferred(scope, embeds=embeds)
        if modality.positions is not None:
            modality.positions.grids(fields, list(placeholder.mask))
    return _Item(fields, embeds, placeholder)


@contextmanager
def _refusing(where: str) -> Iterator[None]:
    """What contradicts the spec, or what it derives from facts of the item that are not here, is
    the caller's."""
    try:
        yield
    except SpecError as error:
        raise InputError(where, "what the spec says", str(error).rstrip("."), REMEDY) from error


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
    for name, declared in modality.fields.items():
        part, like, where = fields[name], sample[name], f"{modality.where}[{index}], {name}"
        if type(part) is not type(like):
            raise InputError(where, f"a {type(like).__name__}", f"a {type(part).__name__}", REMEDY)
        with _refusing(where):
            value = declared.derive(scope) if declared.is_derived else part
            sizes = declared.sizes_of([scope])
            declared.check(part, scope, index)
        if not _equal(part, value):
            raise InputError(where, f"{value}, as the spec derives it", str(part), REMEDY)
        if not isinstance(part, torch.Tensor):
            continue
        if part.dtype != like.dtype:
            raise InputError(where, f"dtype {like.dtype}", str(part.dtype), REMEDY)
        shape = list(part.shape if declared.shape is not None else like.shape)
        if isinstance(declared, Flat) and sizes:
            shape[declared.dim] = sizes[0]
        if list(part.shape) != shape:
            raise InputError(
                where, f"shape {tuple(shape)}", str(tuple(part.shape)), f"{REMEDY} {_STATE}"
            )
    if isinstance(modality.spec.process, Identity):
        processed = [name for name, field in modality.fields.items() if not field.is_derived]
        sent = {name: fields[name] for name in processed}
        value = sent if modality.item.part_names else next(iter(sent.values()))
        modality.item.canonical(value, f"{modality.where}[{index}]")


def _equal(part: Any, value: Any) -> bool:
    if part is value:
        return True
    if isinstance(part, torch.Tensor):
        return part.shape == torch.as_tensor(value).shape and bool(
            (part == torch.as_tensor(value)).all()
        )
    return bool(part == value)


def _placed(modality: BoundModality, item: _Item, place: Any, index: int, ids: Any) -> _Item:
    """One item with the start of its layout; the mask, which is lost on vLLM's wire, is that of the
    layout."""
    where, start = f"{modality.where}[{index}]", getattr(place, "offset", None)
    placeholder, length, rows = item.placeholder, len(item.placeholder), item.placeholder.num_embeds
    if item.embeds:
        sent = len(item.fields[modality.intake.embeds_field])
        modality.placeholders.check_rows(index, rows, sent=sent, most=None)
    if (
        not isinstance(start, int)
        or start < 0
        or list(ids[start : start + length]) != placeholder.ids
    ):
        raise InputError(
            where, f"the {length} ids of its layout at the offset {start}", "others", REMEDY
        )
    mask = getattr(place, "is_embed", None)
    same_mask = mask is None or [*map(bool, mask)] == [*map(bool, placeholder.mask)]
    if getattr(place, "length", None) != length or not same_mask:
        raise InputError(
            where, f"a placeholder of {length} ids, {rows} of them embed()", repr(place), REMEDY
        )
    return item._replace(start=start)


def _apart(processor: CommonProcessor, items: Mapping[str, list[_Item]]) -> None:
    """Refuse items that stand in one another."""
    spans = sorted(
        (item.start, item.start + len(item.placeholder))
        for known in items.values()
        for item in known
    )
    for (_, end), (start, _) in pairwise(spans):
        if start < end:
            where = f"{processor.plan.spec.name}.mm_placeholders"
            raise InputError(where, "items beside one another", f"two at {start}", REMEDY)


def _built(processor: CommonProcessor, items: Mapping[str, list[_Item]]) -> Any:
    """The fields of all items as vLLM's processing builds them."""
    modalities: dict[str, list[Any]] = {}
    for name, known in items.items():
        modality = processor.plan.modalities[name]
        modalities[name] = []
        for item in known:  # one by one: an item of embeddings may stand beside others
            data, sizes = {}, {}
            for key, part in item.fields.items():
                declared = modality.fields_and_embeds[key]
                data[key] = declared.gathered([part], part)
                if isinstance(declared, Flat):
                    sizes[key] = [
                        part.shape[declared.dim] if isinstance(part, torch.Tensor) else len(part)
                    ]
            configs = field_configs(modality, Processed(data, sizes, [item.fields]))
            built = MultiModalKwargsItems.from_hf_inputs(BatchFeature(data), configs)
            modalities[name] += built[name]
    return MultiModalKwargsItems(modalities)
