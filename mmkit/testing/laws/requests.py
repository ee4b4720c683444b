"""Laws about what requests become: ids, ranges and fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from ...language.layout import make_id_string
from ...plan.merging import MergedRuns
from .. import vllm_path
from ..differences import brief, near
from ..law import Case, NotApplicable, law
from ..strategies import Request
from ..updates import ItemUpdate, split_and_batch
from ..vllm_path import ItemRange, Outcome

RequestUpdates = Mapping[str, Sequence[ItemUpdate]]


# -- ranges ----------------------------------------------------------------------------------------


@law()
def ranges(case: Case) -> None:
    """Ranges are in bounds, disjoint, in the order of the items, and hold their layouts.

    Everything outside the ranges is the caller's prompt. Numbered targets in another order are
    refused, or get the items of their numbers.
    """
    request = case.draw_request()
    updates = case.subject.find_request_updates(request)
    _check_ranges(case, request, updates)
    for name, of_modality in updates.items():
        if _has_numbered_targets(of_modality):
            permuted = _draw_permuted_request(case, request, name, of_modality)
            _check_numbers(case, permuted)


@dataclass(frozen=True)
class _PlacedItem:
    """An item with its place in the expanded prompt.

    Attributes:
        name: of the item, for messages: ``frames[1]``.
        range: its place.
        update: its prompt update.
    """

    name: str
    range: ItemRange
    update: ItemUpdate

    @property
    def sort_key(self) -> tuple[int, int]:
        """The position in the prompt; an empty range stands before the range that begins there."""
        return self.range.offset, self.range.length


def _check_ranges(case: Case, request: Request, updates: RequestUpdates) -> None:
    """Check each range, and that the prompt without the items is the caller's prompt.

    The caller's prompt is rebuilt from the expanded one: the ids between the ranges are copied, and
    in place of each range comes the target of its item. Both prompts are compared with their merged
    tokens split (see `_find_split_range`); for most models this leaves them as they are.
    """
    runs = case.subject.runs
    outcome = _add_ranges_of_ids(case, case.subject.run(request), updates)
    placed = _find_placed_items(case, outcome, updates)
    placed.sort(key=_get_sort_key)

    split_ids = runs.split(outcome.ids)
    rebuilt_prompt: list[int] = []
    end_of_item = 0  # after the item before, in the ids
    num_copied = 0  # of the split ids
    for item in placed:
        surplus = _check_place(case, outcome.ids, item, end_of_item)
        split_range = _find_split_range(runs, outcome.ids, item.range, surplus)
        rebuilt_prompt += split_ids[num_copied : split_range.start]
        if not item.update.is_inserted:
            rebuilt_prompt += runs.split(item.update.target)
        num_copied = split_range.stop
        end_of_item = item.range.end
    rebuilt_prompt += split_ids[num_copied:]

    split_prompt = runs.split(case.subject.rewrite_prompt(request))
    if rebuilt_prompt != split_prompt:
        here = brief(rebuilt_prompt)
        there = brief(split_prompt)
        case.fail(f"outside the ranges the prompt is {here}, the caller's {there}")


def _add_ranges_of_ids(case: Case, outcome: Outcome, updates: RequestUpdates) -> Outcome:
    """Return an outcome with ranges of the items that become ids only, for which vLLM gets none.

    They are where the ids of their layouts stand outside the ranges of other items, in order.
    """
    ranges = dict(outcome.ranges)
    for name in case.subject.ids_only.intersection(updates):
        if name in outcome.ranges:
            case.fail(f"vLLM gets ranges for {name}, whose items become ids only")
        ranges[name] = []
        end = 0
        for index, update in enumerate(updates[name]):
            start = make_id_string(outcome.ids).find(make_id_string(update.ids), end)
            if start < 0:
                case.fail(
                    f"the layout of {name}[{index}], {brief(update.ids)}, is not in the prompt"
                )
            ranges[name].append(ItemRange(start, len(update.ids), update.mask))
            end = start + len(update.ids)
    return replace(outcome, ranges=ranges)


def _find_placed_items(case: Case, outcome: Outcome, updates: RequestUpdates) -> list[_PlacedItem]:
    """Return the items with their ranges; fail where there are not as many, or out of order."""
    placed = []
    for name, of_modality in updates.items():
        takes_positions = any(update.ids for update in of_modality)
        if case.subject.plan is None and not takes_positions:
            raise NotApplicable(f"no position of the prompt stands for {name}")
        item_ranges = outcome.ranges.get(name, [])
        if len(item_ranges) != len(of_modality):
            case.fail(f"{len(item_ranges)} ranges for {len(of_modality)} items of {name}")
        offsets = [item_range.offset for item_range in item_ranges]
        if offsets != sorted(offsets):
            case.fail(f"the ranges of {name} are not in order")
        for index, update in enumerate(of_modality):
            placed.append(_PlacedItem(f"{name}[{index}]", item_ranges[index], update))
    return placed


def _get_sort_key(item: _PlacedItem) -> tuple[int, int]:
    return item.sort_key


@dataclass(frozen=True)
class _Surplus:
    """The characters of merged tokens that a range has beyond its layout.

    Attributes:
        before: their number at its beginning.
        after: their number at its end.
    """

    before: int
    after: int


def _find_split_range(
    runs: MergedRuns, ids: list[int], item_range: ItemRange, surplus: _Surplus
) -> range:
    """Return the positions of a layout once the merged tokens of a prompt are split.

    Say a layout begins and ends with a line break, and two line breaks are one token. Between two
    such layouts that follow one another stands that token, which both share. It is in the range of
    the first layout, which so has a character too many: its surplus. Split, the token is two line
    breaks, and each layout has its own.

    Args:
        runs: the tokens that merge.
        ids: the expanded prompt.
        item_range: the range of the layout in these ids.
        surplus: the characters of the range that are none of the layout.
    """
    start = len(runs.split(ids[: item_range.offset])) + surplus.before
    stop = len(runs.split(ids[: item_range.end])) - surplus.after
    return range(start, stop)


def _check_place(case: Case, ids: list[int], item: _PlacedItem, end_of_item: int) -> _Surplus:
    """Check that the range of an item is in bounds and has its layout and its mask.

    Args:
        case: the case.
        ids: the expanded prompt.
        item: the item.
        end_of_item: the end of the range before.
    """
    offset, length, mask = item.range
    layout = item.update.ids
    if offset < end_of_item:
        before = f"the range before it, which ends at {end_of_item}"
        case.fail(f"{item.name} at {offset} begins inside {before}")
    if item.range.end > len(ids):
        case.fail(f"{item.name} ends at {item.range.end}, past {len(ids)} ids")
    in_range = ids[offset : item.range.end]
    surplus = _find_surplus(case.subject.runs, in_range, layout)
    if surplus is None:
        case.fail(f"the ids at {item.name} are {brief(in_range)}, its layout is {brief(layout)}")
    # the first token of a layout may be in the range of the item before
    if mask != item.update.mask[len(item.update.mask) - length :]:
        case.fail(f"the mask of {item.name} is not that of its layout")
    return surplus


def _find_surplus(runs: MergedRuns, ids: list[int], layout: list[int]) -> _Surplus | None:
    """Return the merged characters that a range has beyond its layout.

    Returns:
        None where the range differs from the layout in other tokens, too.
    """
    in_range = _split_at_edges(runs, ids)
    in_layout = _split_at_edges(runs, layout)
    if in_range.core != in_layout.core:
        return None
    return _Surplus(in_range.before - in_layout.before, in_range.after - in_layout.after)


@dataclass(frozen=True)
class _Edges:
    """A sequence of ids, split at its edges.

    Attributes:
        before: the number of merged characters at its beginning.
        core: the ids between, as a text of `make_id_string`.
        after: the number of merged characters at its end.
    """

    before: int
    core: str
    after: int


def _split_at_edges(runs: MergedRuns, ids: list[int]) -> _Edges:
    merged = make_id_string(list(runs.tokens_by_length.values()))
    text = make_id_string(runs.split(ids))
    without_start = text.lstrip(merged)
    core = without_start.rstrip(merged)
    return _Edges(len(text) - len(without_start), core, len(without_start) - len(core))


def _has_numbered_targets(of_modality: Sequence[ItemUpdate]) -> bool:
    """Return whether each of several items has its own target, as ``<|image_1|>``."""
    targets = set()
    for update in of_modality:
        if update.target != update.ids:
            targets.add(tuple(update.target))
    return len(of_modality) > 1 and len(targets) == len(of_modality)


def _draw_permuted_request(
    case: Case, request: Request, name: str, of_modality: Sequence[ItemUpdate]
) -> Request:
    """Draw a request of the same items whose numbered targets are in another order."""
    numbers = list(range(len(of_modality)))

    def is_another_order(order: list[int]) -> bool:
        return order != numbers

    order = case.draw(st.permutations(numbers).filter(is_another_order))
    prompt = list(of_modality[0].prefix)
    for number in order:
        prompt += of_modality[number].target
        prompt.append(case.subject.ordinary_ids[0])
    in_prompt = tuple((name, number) for number in order)
    return Request(prompt, {name: request.items[name]}, request.kwargs, in_prompt)


def _check_numbers(case: Case, request: Request) -> None:
    """Check that targets with a number get the item of this number, if they are accepted."""
    case.request = request
    outcome = case.attempt(case.subject.run, request)
    if not outcome:
        return
    order = list(request.order)
    offsets = {}
    for name, index in order:
        offsets[name, index] = outcome.ranges[name][index].offset
    placed = sorted(order, key=offsets.__getitem__)
    if placed != order:
        case.fail(f"placeholders of {order} get the items {placed}")


# -- text ------------------------------------------------------------------------------------------


@law()
def text(case: Case) -> None:
    """A text prompt and its token ids give the same result.

    The tokens outside its items are the tokens of the text.
    """
    processor = case.subject.processor
    tokenizer = processor.info.ctx.tokenizer
    if tokenizer is None:
        raise NotApplicable("the model has no tokenizer")
    request = case.draw_request()
    text = _draw_without_spaces(case, tokenizer.decode(request.prompt), request)
    ids = vllm_path.encode_text(processor, text)

    of_ids = _attempt_prompt(case, request, ids)
    if not of_ids:
        # decoding may change what the ids mean
        assume(_attempt_prompt(case, request, text))
    if of_ids and case.subject.plan is not None:
        # hand-written processors are left out: vLLM's own search in the text changes their ids
        updates = case.subject.find_request_updates(request)
        with_ranges = _add_ranges_of_ids(case, of_ids, updates)
        _check_outside(case, replace(request, prompt=ids), with_ranges)
    for route in ("renderer", "processor"):
        of_text = _attempt_prompt(case, request, text, direct=route == "processor")
        case.check_equal(
            of_ids, of_text, f"the ids of a text and, by the {route}, the text {text!r}"
        )


def _attempt_prompt(
    case: Case, request: Request, prompt: str | list[int], *, direct: bool = False
) -> Any:
    """Run a request with another prompt; return a `Refused` where it is refused."""
    return case.attempt(
        vllm_path.run,
        case.subject.processor,
        prompt,
        request.data(),
        request.kwargs,
        direct=direct,
    )


def _draw_without_spaces(case: Case, text: str, request: Request) -> str:
    """Draw targets of several tokens, and remove the space before them in a text.

    A target then stands directly behind a word, where the tokenizer may split it otherwise.
    """
    if case.subject.plan is None:
        return text
    tokenizer = case.subject.processor.info.ctx.tokenizer
    targets = set()
    for of_modality in case.subject.find_request_updates(request).values():
        for update in of_modality:
            if len(update.target) > 1:
                targets.add(tuple(update.target))
    for target in sorted(targets):
        spelling = tokenizer.decode(list(target)).strip()
        if spelling and case.draw(st.booleans()):
            text = text.replace(f" {spelling}", spelling)
    return text


def _check_outside(case: Case, request: Request, outcome: Outcome) -> None:
    """Check that the stretches of ids outside the items are in the prompt, in their order.

    The first stretch begins the prompt, and the last one ends it. Where a stretch meets an item,
    its token there is not compared: it may be a part of a token that reaches across the edge of a
    target.
    """
    runs = case.subject.runs
    ids = outcome.ids
    prompt = make_id_string(runs.split(case.subject.rewrite_prompt(request)))
    edges = []
    for of_modality in outcome.ranges.values():
        for item_range in of_modality:
            edges.append((item_range.offset, item_range.end))
    edges.sort()
    edges.append((len(ids), len(ids)))
    searched = 0  # the position in `prompt` up to which stretches are found
    start = 0  # of the stretch, in `ids`
    for number, (offset, end) in enumerate(edges):
        is_first = number == 0
        is_last = number == len(edges) - 1
        stretch = runs.split(ids[start:offset])
        if not is_first:
            stretch = stretch[1:]
        if not is_last:
            stretch = stretch[:-1]
        inner = make_id_string(stretch)
        position = prompt.find(inner, searched)
        if is_last:
            position = _find_suffix(prompt, inner, searched)
        if position < 0 or (is_first and position > 0):
            got = brief(ids[start:offset])
            expected = brief(request.prompt)
            case.fail(
                f"outside its items the prompt has {got}, and the ids of the text are {expected}"
            )
        searched = position + len(inner)
        start = end


def _find_suffix(text: str, suffix: str, start: int) -> int:
    """Return the position of a suffix of a text that begins at `start` or later; -1 for none."""
    if text[start:].endswith(suffix):
        return len(text) - len(suffix)
    return -1


# -- fields ----------------------------------------------------------------------------------------


@law()
def independence(case: Case) -> None:
    """The fields and the layout of an item do not depend on the other items of the request.

    Floating-point values may differ by 64 units in the last place of the largest one.
    """
    subject = case.subject
    request = case.draw_request(least=2)
    if subject.plan is not None:
        for name, count in request.counts.items():
            # a spec may declare that the items of a request are processed together
            assume(subject.plan.modalities[name].are_independent(count))
    together = subject.run(request)
    updates = subject.find_request_updates(request)
    for name, samples in request.items.items():
        for index, sample in enumerate(samples):
            item = f"{name}[{index}]"
            alone = subject.run(subject.make_minimal_request(name, sample, request.kwargs))
            case.check_equal(
                alone.values(name, 0),
                together.values(name, index),
                f"{item} alone and in this request",
                alike=near,
            )
            (update_alone,) = subject.find_updates(name, [sample], request.kwargs)
            if name in subject.ids_only and update_alone.ids != updates[name][index].ids:
                ids = f"{brief(update_alone.ids)} alone and {brief(updates[name][index].ids)}"
                case.fail(f"{item} becomes {ids} in this request")
            rows_alone = sum(alone.mask(name, 0))
            rows_together = sum(together.mask(name, index))
            if rows_alone != rows_together:
                counts = f"{rows_alone} embed positions alone and {rows_together} in this request"
                case.fail(f"{item} has {counts}")


@law()
def round_trip(case: Case) -> None:
    """Splitting the processed fields into items and batching these again changes nothing.

    No declared field is left out.
    """
    request = case.draw_request()
    outcome = case.subject.run(request)
    for name, samples in request.items.items():
        if name in case.subject.ids_only:
            continue
        _check_declared_fields(case, name, len(samples), outcome.fields.get(name, []))
    if case.subject.plan is None:
        _check_round_trip(case, request)


def _check_declared_fields(
    case: Case, name: str, count: int, items: Sequence[Mapping[str, Any]]
) -> None:
    """Check that each item of a modality has fields, and all those that a spec declares."""
    if len(items) != count or not all(items):
        case.fail(f"{name} has items without fields")
    plan = case.subject.plan
    if plan is None:
        return
    declared = sorted(plan.modalities[name].fields)
    for index, fields in enumerate(items):
        if sorted(fields) != declared:
            case.fail(f"{name}[{index}] has {sorted(fields)}, declared are {declared}")


def _check_round_trip(case: Case, request: Request) -> None:
    """Check the fields of a hand-written processor before and after they are split into items.

    A spec's processor is left out: it splits and batches as the spec declares.
    """
    fields = split_and_batch(case.subject.processor, request.data(), request.kwargs)
    for field, values in fields.items():
        if values.batched is None:
            case.fail(f"the field {field!r} was processed and reaches no item")
        before = _list_rows(values.processed)
        after = _list_rows(values.batched)
        was_list = isinstance(values.processed, list)
        is_stacked = isinstance(values.batched, torch.Tensor)
        if was_list and is_stacked and len(before) == len(after):
            after = _cut_padding(before, after)
        case.check_equal(before, after, f"the field {field!r} before and after")


def _list_rows(value: Any) -> Any:
    """Return a stacked tensor as the list of its rows, and any other value as it is."""
    if isinstance(value, torch.Tensor) and value.ndim > 0:
        return list(value)
    return value


def _cut_padding(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> list[Any]:
    """Return rows without padding: vLLM pads the rows of a flat field to the largest one."""
    rows = []
    for row, padded in zip(before, after, strict=True):
        size = tuple(slice(length) for length in row.shape)
        rows.append(padded[size])
    return rows


@law()
def idempotence(case: Case) -> None:
    """A prompt that is expanded already is not expanded again."""
    subject = case.subject
    request = case.draw_request()
    outcome = subject.run(request)
    expanded = replace(request, prompt=outcome.ids)
    case.request = expanded
    second = case.attempt(subject.run, expanded)
    if not second:
        case.fail(f"refused with {second}")
    expected = [outcome.ids]
    if subject.plan is None:
        # vLLM's own classes may put something around every prompt
        expected.append(subject.rewrite_prompt(expanded))
    if second.ids not in expected:
        case.fail(f"{len(outcome.ids)} ids became {len(second.ids)}")
    for name, first_ranges in outcome.ranges.items():
        second_ranges = second.ranges.get(name, [])
        if _list_lengths_and_masks(first_ranges) != _list_lengths_and_masks(second_ranges):
            case.fail(f"the ranges of {name} have other lengths or masks")


@law(cost=2)
def ids_only(case: Case) -> None:
    """Of an item that becomes ids only, nothing but these ids reaches the engine.

    An expanded prompt without such items is the same request: the same ids, and the same ranges,
    hashes and fields of the other items.
    """
    subject = case.subject
    if not subject.ids_only:
        raise NotApplicable("every item has placeholders")
    request = case.draw_request()
    absent = subject.ids_only.intersection(request.items)
    assume(absent)
    outcome = subject.run(request)
    for name in absent:
        if name in outcome.hashes or name in outcome.fields or name in outcome.ranges:
            case.fail(f"{name} reaches the engine")
    items = {name: samples for name, samples in request.items.items() if name not in absent}
    if not items:
        assert subject.plan is not None  # which alone says what becomes ids only
        ids = case.attempt(subject.plan.expand, outcome.ids, {})
        case.check_equal(outcome.ids, ids, "the expanded prompt with its items and without", "ids")
        return
    order = tuple(item for item in request.order if item[0] not in absent)
    case.request = Request(outcome.ids, items, request.kwargs, order)
    without = case.attempt(subject.run, case.request)
    case.check_equal(outcome, without, f"the expanded prompt with {sorted(absent)} and without")


def _list_lengths_and_masks(item_ranges: Sequence[ItemRange]) -> list[Any]:
    return [(item_range.length, item_range.mask) for item_range in item_ranges]
