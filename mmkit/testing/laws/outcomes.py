"""Laws about what requests become: ids, ranges, fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import itemgetter, ne
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from ...layout import as_text
from ...runs import Runs
from .. import vllm_path
from ..differences import brief, differences, near
from ..law import Case, NotApplicable, law
from ..strategies import Request
from ..vllm_path import LEAST_CACHE_GIB, Caches, Miss, Outcome, Piece


@law()
def ranges(case: Case) -> None:
    """Placeholder ranges are in bounds, disjoint and in the order of their items; the ids at a
    range are the layout of its item; everything outside is the caller's prompt; numbered
    placeholders in another order are refused, or get the items of their numbers."""
    request = case.draw_request()
    pieces = case.subject.pieces_of(request)
    _check_ranges(case, request, pieces)
    for permuted in _permuted(case, request, pieces):
        case.request, order = permuted, [*permuted.order]
        if done := case.attempt(case.subject.run, permuted):
            starts = {(name, i): done.ranges[name][i][0] for name, i in order}
            placed = sorted(order, key=starts.__getitem__)
            if placed != order:
                case.fail(f"placeholders of {order} get the items {placed}")


def _permuted(
    case: Case, request: Request, pieces: Mapping[str, Sequence[Piece]]
) -> Iterator[Request]:
    """The same items, with the numbered placeholders of a modality (``<|image_1|>``) in another
    order."""
    for name, own in pieces.items():
        targets = {tuple(piece.written) for piece in own if piece.written != piece.ids}
        if 1 < len(own) == len(targets):
            numbers = list(range(len(own)))
            order = case.draw(st.permutations(numbers).filter(partial(ne, numbers)))
            prompt = [*own[0].prefix]
            for number in order:
                prompt += [*own[number].written, case.subject.ordinary[0]]
            places = tuple((name, number) for number in order)
            yield Request(prompt, {name: request.items[name]}, request.kwargs, places)


def _check_ranges(case: Case, request: Request, pieces: Mapping[str, Sequence[Piece]]) -> None:
    subject, runs = case.subject, case.subject.runs
    outcome = subject.run(request)
    ids, placed = outcome.ids, []
    for name, own in pieces.items():
        if subject.plan is None and not any(piece.ids for piece in own):
            raise NotApplicable(f"no position of the prompt stands for {name}")
        places = outcome.ranges.get(name, [])
        if len(places) != len(own):
            case.fail(f"{len(places)} ranges for {len(own)} items of {name}")
        if places != sorted(places, key=itemgetter(0)):
            case.fail(f"the ranges of {name} are not in order")
        numbered = enumerate(zip(places, own, strict=True))
        placed += [(*place, piece, f"{name}[{i}]") for i, (place, piece) in numbered]
    # with one token for each character of a run
    text, prompt = runs.apart(ids), runs.apart(subject.postprocessed(request))
    rebuilt: list[int] = []
    position = copied = 0
    for offset, length, mask, piece, item in sorted(placed, key=itemgetter(0, 1)):
        end = offset + length
        if offset < position:
            before = f"the range before it, which ends at {position}"
            case.fail(f"{item} at {offset} begins inside {before}")
        if end > len(ids):
            case.fail(f"{item} ends at {end}, past {len(ids)} ids")
        surplus = _surplus(runs, ids[offset:end], piece.ids)
        if surplus is None:
            here, layout = brief(ids[offset:end]), brief(piece.ids)
            case.fail(f"the ids at {item} are {here}, its layout is {layout}")
        if mask != piece.mask[len(piece.mask) - length :]:
            case.fail(f"the mask of {item} is not that of its layout")
        # the token that two layouts share is in the range of the first
        rebuilt += text[copied : len(runs.apart(ids[:offset])) + surplus[0]]
        rebuilt += [] if piece.inserted else runs.apart(piece.written)
        position, copied = end, len(runs.apart(ids[:end])) - surplus[1]
    rebuilt += text[copied:]
    if rebuilt != prompt:
        here, there = brief(rebuilt), brief(prompt)
        case.fail(f"outside the ranges the prompt is {here}, the caller's {there}")


def _surplus(runs: Runs, ids: list[int], layout: list[int]) -> tuple[int, int] | None:
    """The numbers of merged characters that a range has at its beginning and at its end beyond
    those of its layout; None where it differs otherwise."""
    run = as_text([*runs.tokens.values()])

    def edges(ids: list[int]) -> tuple[int, str, int]:
        text = as_text(runs.apart(ids))
        rest = text.lstrip(run)
        return len(text) - len(rest), rest.rstrip(run), len(rest) - len(rest.rstrip(run))

    (before, core, after), (lead, own, tail) = edges(ids), edges(layout)
    return (before - lead, after - tail) if core == own else None


@law()
def text(case: Case) -> None:
    """A text prompt and its token ids give the same result."""
    processor = case.subject.processor
    tokenizer = processor.info.ctx.tokenizer
    if tokenizer is None:
        raise NotApplicable("the model has no tokenizer")
    request = case.draw_request()
    text = tokenizer.decode(request.prompt)

    def outcome(prompt: Any, *, direct: bool = False) -> Any:
        sent = prompt, request.data(), request.kwargs
        return case.attempt(vllm_path.run, processor, *sent, direct=direct)

    # decoding may change what the ids mean
    of_ids = outcome(vllm_path.encoded(processor, text))
    assume(of_ids or outcome(text))
    for route in ("renderer", "processor"):
        of_text = outcome(text, direct=route == "processor")
        case.same(of_ids, of_text, f"the ids of a text and, by the {route}, the text {text!r}")


@law()
def independence(case: Case) -> None:
    """The fields and the layout of an item do not depend on the other items of the request:
    integers not at all, floating pixels by 64 units in the last place of the largest."""
    subject = case.subject
    request = case.draw_request(least=2)
    if subject.plan is not None:
        modalities = subject.plan.modalities
        assume(all(modalities[name].may_cache(n) for name, n in request.counts.items()))
    together = subject.run(request)
    for name, samples in request.items.items():
        for i, sample in enumerate(samples):
            alone = subject.run(subject.minimal(name, sample, request.kwargs))
            fields = alone.values(name, 0), together.values(name, i)
            case.same(*fields, f"{name}[{i}] alone and in this request", alike=near)
            rows, beside = sum(alone.mask(name, 0)), sum(together.mask(name, i))
            if rows != beside:
                counts = f"{rows} embed positions alone and {beside} in this request"
                case.fail(f"{name}[{i}] has {counts}")


@law()
def round_trip(case: Case) -> None:
    """Splitting the processed fields into items and batching these again changes nothing, and no
    declared field is left out."""
    subject, plan = case.subject, case.subject.plan
    request = case.draw_request()
    outcome = subject.run(request)
    for name, samples in request.items.items():
        items = outcome.fields.get(name, [])
        if len(items) != len(samples) or not all(items):
            case.fail(f"{name} has items without fields")
        declared = sorted(plan.modalities[name].fields) if plan else []
        for i, fields in enumerate(items):
            if plan is not None and sorted(fields) != declared:
                case.fail(f"{name}[{i}] has {sorted(fields)}, declared are {declared}")
    if plan is not None:  # which splits and batches as it declares
        return
    sent = request.data(), request.kwargs
    for field, (raw, joined) in vllm_path.round_trip(subject.processor, *sent).items():
        if joined is None:
            case.fail(f"the field {field!r} was processed and reaches no item")
        before, after = _as_list(raw), _as_list(joined)
        if isinstance(raw, list) and isinstance(joined, torch.Tensor) and len(raw) == len(joined):
            # rows of a flat field that vLLM pads with zeros to the largest
            after = [row[tuple(map(slice, own.shape))] for own, row in zip(raw, after, strict=True)]
        case.same(before, after, f"the field {field!r} before and after")


def _as_list(value: Any) -> Any:
    """A stacked tensor and the list of its parts are the same field."""
    return list(value) if isinstance(value, torch.Tensor) and value.ndim else value


@law()
def idempotence(case: Case) -> None:
    """A prompt that is expanded already is not expanded again."""
    subject = case.subject
    request = case.draw_request()
    outcome = subject.run(request)
    case.request = again = replace(request, prompt=outcome.ids)
    second = case.attempt(subject.run, again)
    if not second:
        case.fail(f"refused with {second}")
    expected = [outcome.ids]
    if subject.plan is None:  # vLLM's own classes may put something around every prompt
        expected.append(subject.postprocessed(again))
    if second.ids not in expected:
        case.fail(f"{len(outcome.ids)} ids became {len(second.ids)}")
    for name, ranges in outcome.ranges.items():
        here, there = ([own[1:] for own in some] for some in (ranges, second.ranges.get(name, [])))
        if here != there:
            case.fail(f"the ranges of {name} have other lengths or masks")


# -- sequences of requests -------------------------------------------------------------------------

# what a request of the sequence is; one that is refused before lacks its placeholders
STEPS = ("new", "seen before", "refused before")

_TRIES = 4  # of a request whose items the engine's half of a cache lacks


@law(cost=2)
def cache(case: Case) -> None:
    """Any sequence of requests gives the same outputs with and without vLLM's processor caches,
    however small.

    Requests are of a few items, so that some of a request are cached, and at other positions. Each
    is sent without a cache, with vLLM's cache in one process, and with its pair of sender and
    receiver. Shrinks towards few requests, a large cache, and no refused request."""
    subject = case.subject
    # in GiB: of all items, or hardly any
    capacity = case.draw(st.sampled_from([1.0, LEAST_CACHE_GIB]))
    few = subject.of_few(case.draw)
    pairs = {"in one process": False, "in two processes": True}
    caches = {how: Caches(subject.processor, capacity, pair=pair) for how, pair in pairs.items()}
    seen: list[Request] = []
    drifts = False
    for step in case.draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=6)):
        again = step == "seen before" and seen
        request = case.request = case.draw(st.sampled_from(seen) if again else few)
        case.before = f" after {seen!r}" if seen else ""
        when = ""
        if step == "refused before" and request.order:
            when = ", refused without a prompt before"
            for some in caches.values():
                with suppress(Exception):
                    subject.run(replace(request, prompt=[]), some)
        expected = subject.run(request)
        # where one request fills them, the two halves evict in different orders, and vLLM asks for
        # the items again that the engine then lacks
        drifts = drifts or expected.gib > capacity
        for how, some in caches.items():
            outcome = case.attempt(_run, case, request, some, _TRIES if drifts and Miss else 0)
            if not outcome:
                case.fail(f"with a cache {how}: {outcome}{when}")
            if difference := differences(expected, outcome):
                case.fail(f"without a cache and with one {how}: {difference}{when}")
        seen.append(request)


def _run(case: Case, request: Request, caches: Caches, tries: int) -> Outcome:
    for _ in range(tries):
        try:
            return case.subject.run(request, caches)
        except Miss as error:
            caches.forget(error.mm_hashes)
    return case.subject.run(request, caches)
