"""Laws about items: their limits, their hashes, what is refused, precomputed embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st

from ...bound.placeholders import TooManyRows
from ...errors import InputError
from ...vllm_api import harness
from ..strategies import ImageSample, Request
from ..subject import Subject
from .law import Case, NotApplicable, differences, law


@law(
    "L6 worst case",
    "no item has more encoder rows than stated, and the dummy item has as many as stated",
)
def worst_case(case: Case) -> None:
    subject = case.subject
    name = case.draw(st.sampled_from(sorted(subject.samples)))
    assume(subject.limits.get(name, 0) != 0)
    stated, reached = subject.most_rows(name)
    sample = case.draw(subject.samples[name])
    if stated != reached:
        case.fail(f"{stated} rows are stated for {name}, and the dummy item has {reached}")
    try:
        subject.pieces(name, [sample])
    except Exception as error:  # others are refused for other reasons
        if isinstance(error, TooManyRows):
            case.fail(f"{sample!r} is refused: {error}")
    case.request = subject.minimal(name, sample)
    rows = sum(subject.run(case.request).mask(name, 0))
    if rows > stated:
        case.fail(f"{name} has an item of {rows} rows, and at most {stated} are stated")


@law(
    "L7 identity",
    "items of equal content have equal hashes whatever their container; other content, kwargs "
    "that change what it becomes, or options of decoding that do, have another hash",
)
def identity(case: Case) -> None:
    subject = case.subject
    request = case.draw_request(most=1)
    name = next(iter(request.items))
    (sample,) = request.items[name]

    def outcome(value: Any, kwargs: Any = request.kwargs, uuids: Any = None) -> harness.Outcome:
        data = {**request.data(), name: [value]}
        return harness.run(subject.processor, request.prompt, data, kwargs, uuids=uuids)

    def hash_of(value: Any) -> str:
        return outcome(value).hashes[name][0]

    # one hash for two contents makes an answer wrong, two for one content only cost a miss: the
    # former first
    here = outcome(sample.value())
    first = here.hashes[name][0]
    other = sample.other()
    if differences(_content(sample), _content(other)) and hash_of(other.value()) == first:
        case.fail(f"{other!r} has the same hash")
    if isinstance(sample, ImageSample):
        # with a list of uuids, as from its chat, vLLM hashes files
        images = harness.decoded(sample.transparent())
        try:
            hashes = {outcome(one, uuids={name: [None]}).hashes[name][0] for one in images}
        except Exception as error:  # a processor may take pixels alone
            case.refused(error)
        else:
            if len(hashes) == 1:
                case.fail("a file decoded on white and on black (rgba_background_color): one hash")
    kwargs = case.draw(subject.kwargs)
    if kwargs != request.kwargs:
        try:
            there = outcome(sample.value(), kwargs)
        except Exception as error:  # the prompt may not fit under other kwargs
            case.refused(error)
        else:
            # options that change nothing of an item need not change its hash
            has_one_hash = there.hashes[name][0] == first
            if has_one_hash and differences(_becomes(here, name), _becomes(there, name)):
                case.fail(f"kwargs {kwargs!r} have the same hash")
    for value in sample.same():
        container = type(value).__name__
        try:
            of_equal = hash_of(value)
        except Exception as error:
            case.refused(error)
            if subject.plan is None:  # a container that is refused has no hash
                continue
            case.fail(f"the same content as {container} is refused: {error}")
        if of_equal != first:
            case.fail(f"the same content as {container} has another hash")


def _becomes(outcome: harness.Outcome, name: str) -> list[Any]:
    """The fields of a modality's first item, and its ids with their mask."""
    places = [
        (outcome.ids[start : start + length], mask)
        for start, length, mask in outcome.ranges.get(name, [])[:1]
    ]
    return [outcome.values(name, 0), places]


def _content(sample: Any) -> Any:
    value = sample.same()[0]
    value = value[0] if isinstance(value, tuple) else value
    is_known = isinstance(value, (torch.Tensor, dict, str))
    return value if is_known else torch.as_tensor(np.array(value))


@law(
    "L9 refusal",
    "missing, surplus or malformed items, and placeholder counts that do not match, are refused "
    "in a message that names the modality",
    cost=4,
)
def refusal(case: Case) -> None:
    subject = case.subject
    request = case.draw_request()
    named = (*subject.samples, "prompt", "multi_modal_data")
    data = request.data()
    for change, mistake in _mistakes(subject, request, data):
        try:
            harness.run(subject.processor, request.prompt, {**data, **change}, request.kwargs)
        except Exception as error:
            case.refused(error)
            if subject.plan is None:
                continue
            if not isinstance(error, InputError):
                case.fail(f"{mistake}: refused with {type(error).__name__}: {error}")
            if not any(name in str(error) for name in named):
                case.fail(f"{mistake}: the message names no modality: {error}")
        else:
            case.fail(f"{mistake}: accepted")


def _mistakes(
    subject: Subject, request: Request, data: Mapping[str, list[Any]]
) -> Iterator[tuple[dict[str, list[Any]], str]]:
    """Changes of its data that must be refused with the prompt of a request, and what is wrong with
    them."""
    yield {"no_such_modality": [1]}, "an unknown modality"
    for name, values in data.items():
        *before, last = values
        if any(written == name for written, _ in request.order):
            yield {name: [*values, values[0]]}, f"one item of {name} too many"
            if before:
                yield {name: values[1:]}, f"one item of {name} too few"
        # elsewhere vLLM's renderer refuses it, before any processor sees it
        if subject.plan is not None:
            yield {name: [*before, None]}, f"None as an item of {name}"
        if not isinstance(last, str):
            yield {name: [*before, "text"]}, f"a text as an item of {name}"
        if isinstance(last, dict):
            part, *others = last
            rest = {other: last[other] for other in others}
            yield {name: [*before, rest]}, f"an item of {name} without {part}"
            yield {name: [*before, {**last, part: None}]}, f"None as {part} of {name}"
            yield {name: [*before, {**last, "no_such_part": 1}]}, f"an unknown part in {name}"
        yield {name: [*before, object()]}, f"an object as an item of {name}"
        if not isinstance(last, torch.Tensor) or not last.numel() or not last.is_floating_point():
            continue
        if subject.plan is None or getattr(subject.plan.modalities[name].item, "finite", True):
            not_finite = last.clone()
            not_finite.view(-1)[0] = float("nan")
            yield {name: [*before, not_finite]}, f"NaN in an item of {name}"
        yield {name: [*before, torch.stack([last, last])[None]]}, f"a wrong shape in {name}"


def embeddings(modality: Any, rows: Sequence[torch.Tensor], outcome: Any) -> dict[str, Any]:
    """Precomputed embeddings in place of a modality's items: their rows, and the fields beside them
    that their layout reads."""
    fields = outcome.fields[modality.name]
    companions = {key: [own[key] for own in fields] for key in modality.intake.companions}
    return {modality.intake.embeds_field: list(rows), **companions}


@law(
    "L21 names",
    "a caller's name for an item (its uuid) changes nothing of what becomes of it, and brings back "
    "neither what was sent under that name before nor what other kwargs made of it",
    cost=3,
)
def names(case: Case) -> None:
    subject = case.subject
    request = case.draw_request()
    # another modality has the same names
    uuids = {name: [*map(str, range(len(samples)))] for name, samples in request.items.items()}
    caches = harness.Caches(subject.processor, 1.0, pair=case.draw(st.booleans()))
    others = {
        name: [case.draw(subject.samples[name]) for _ in samples]
        for name, samples in request.items.items()
    }
    requests = {
        "without names and with them": request,
        "without names and under those that other items had": replace(request, items=others),
        "without names and under those that it had with other kwargs": replace(
            request, items=others, kwargs=case.draw(subject.kwargs)
        ),
    }
    for what, case.request in requests.items():
        sent = case.request.prompt, case.request.data(), case.request.kwargs
        try:
            alone = harness.run(subject.processor, *sent)
            named = harness.run(subject.processor, *sent, caches, uuids=uuids)
        except Exception as error:  # other items, or other kwargs, may not fit the prompt
            case.refused(error)
            continue
        case.same(replace(alone, hashes={}), replace(named, hashes={}), what)


@law("L11 embeds", "precomputed embeddings get the ranges of the item that they were computed from")
def embeds(case: Case) -> None:
    subject = case.subject
    processor, plan = subject.processor, subject.plan
    accepting = [
        name
        for name in subject.samples
        if plan is None or plan.modalities[name].intake.takes_embeds
    ]
    if not accepting and plan is not None:
        raise NotApplicable("no modality takes embeddings")
    hidden = harness.hidden_size(processor)
    request = case.draw_request()
    present = [name for name in request.items if name in accepting]
    name = case.draw(st.sampled_from(present or accepting))
    assume(name in request.items)
    outcome = subject.run(request)
    if not outcome.ranges.get(name):
        raise NotApplicable(f"no position of the prompt stands for {name}")
    rows = [torch.ones(sum(mask), hidden) for _, _, mask in outcome.ranges[name]]
    forms: list[Any] = []
    try:
        if plan is None:
            forms = harness.embeddings(processor, name, rows, outcome.fields[name])
        else:
            forms = [embeddings(plan.modalities[name], rows, outcome)]
            harness.parsed(processor, {**request.data(), name: forms[0]})
    except Exception as error:
        case.refused(error)
        if plan is not None:
            case.fail(f"the spec takes embeddings of {name}, and the parser refuses them: {error}")
        return _embeddings_refused(accepting, error)
    refusals: list[Exception] = []
    for form in forms:
        data = {**request.data(), name: form}
        try:
            embedded = harness.run(processor, request.prompt, data, request.kwargs)
        except Exception as error:
            case.refused(error)
            # a refusal that says so is one, whoever gives it; that of a generated class comes
            # from its parser
            said = str(error).lower()
            if plan is None and ("embedding" in said or "--enable-mm-embeds" in said):
                refusals.append(error)
                continue
            case.fail(
                f"embeddings of {name} pass the parser, then {type(error).__name__}: {error} "
                f"(sent as a {type(form).__name__})"
            )
        case.same(outcome.ranges, embedded.ranges, "the raw item and its embeddings", "ranges")
    if len(refusals) == len(forms):
        _embeddings_refused(accepting, refusals[0])


def _embeddings_refused(accepting: Sequence[str], error: Exception) -> None:
    """The law has nothing to say, unless another modality may take them."""
    if len(accepting) == 1:
        raise NotApplicable(f"embeddings are refused: {error}") from error
