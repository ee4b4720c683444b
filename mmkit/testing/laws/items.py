"""Laws about items: their limits, their hashes, what is refused, precomputed embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from ...bound.placeholders import TooManyRows
from ...errors import InputError
from ..differences import differences
from ..law import Case, NotApplicable, Refused, law
from ..strategies import ImageSample, Request
from ..subject import Subject
from ..vllm_model import embeddings, hidden_size, parsed_embeddings
from ..vllm_path import Outcome, decoded, most_rows, run


@law()
def worst_case(case: Case) -> None:
    """No item has more encoder rows than stated, and the dummy item has as many as stated."""
    subject = case.subject
    name = case.draw(st.sampled_from(sorted(subject.limits)))
    stated, reached = most_rows(subject.processor, name)
    sample = case.draw(subject.samples[name])
    if stated != reached:
        case.fail(f"{stated} rows are stated for {name}, and the dummy item has {reached}")
    done = case.attempt(subject.pieces, name, [sample])
    if isinstance(done, Refused) and isinstance(done.error, TooManyRows):
        case.fail(f"{sample!r} is refused: {done.error}")
    case.request = subject.minimal(name, sample)
    rows = sum(subject.run(case.request).mask(name, 0))
    if rows > stated:
        case.fail(f"{name} has an item of {rows} rows, and at most {stated} are stated")


@law()
def identity(case: Case) -> None:
    """Items of equal content have equal hashes whatever their container; other content, kwargs that
    change what it becomes, or options of decoding that do, have another hash."""
    subject = case.subject
    request = case.draw_request(most=1)
    name = next(iter(request.items))
    (sample,) = request.items[name]

    def outcome(value: Any, kwargs: Any = request.kwargs, uuids: Any = None) -> Any:
        data = {**request.data(), name: [value]}
        return case.attempt(run, subject.processor, request.prompt, data, kwargs, uuids=uuids)

    # one hash for two contents makes an answer wrong, two for one content only cost a miss: the
    # former first
    here = subject.run(request)
    first, other = here.hashes[name], sample.other()
    if differences(sample.same()[0], other.same()[0]):
        there = outcome(other.value())
        if there and there.hashes[name] == first:
            case.fail(f"{other!r} has the same hash")
    if isinstance(sample, ImageSample):
        # with a list of uuids, as from its chat, vLLM hashes files
        shown = [outcome(one, uuids={name: [None]}) for one in decoded(sample.transparent())]
        if all(shown) and shown[0].hashes[name] == shown[1].hashes[name]:
            case.fail("a file decoded on white and on black (rgba_background_color): one hash")
    kwargs = case.draw(subject.kwargs)
    there = outcome(sample.value(), kwargs)
    # options that change nothing of an item need not change its hash
    same_hash = there and there.hashes[name] == first
    if same_hash and differences(_becomes(here, name), _becomes(there, name)):
        case.fail(f"kwargs {kwargs!r} have the same hash")
    for value in sample.same():
        container, there = type(value).__name__, outcome(value)
        if not there and subject.plan is not None:
            case.fail(f"the same content as {container} is refused: {there.error}")
        # a container that is refused has no hash
        if there and there.hashes[name] != first:
            case.fail(f"the same content as {container} has another hash")


def _becomes(outcome: Outcome, name: str) -> list[Any]:
    """The fields of a modality's first item, and its ids with their mask."""
    places = outcome.ranges.get(name, [])[:1]
    return [outcome.values(name, 0), [(outcome.ids[at : at + n], mask) for at, n, mask in places]]


@law(cost=4)
def refusal(case: Case) -> None:
    """Missing, surplus or malformed items, and placeholder counts that do not match, are refused in
    a message that names the modality."""
    subject = case.subject
    request = case.draw_request()
    named = (*subject.samples, "prompt", "multi_modal_data")
    data = request.data()
    for change, mistake in _mistakes(subject, request, data):
        sent = request.prompt, {**data, **change}, request.kwargs
        if done := case.attempt(run, subject.processor, *sent):
            case.fail(f"{mistake}: accepted")
        if subject.plan is None:
            continue
        if not isinstance(done.error, InputError):
            case.fail(f"{mistake}: refused with {done}")
        if not any(name in str(done.error) for name in named):
            case.fail(f"{mistake}: the message names no modality: {done.error}")


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


@law()
def embeds(case: Case) -> None:
    """Precomputed embeddings get the ranges of the item that they were computed from."""
    subject, plan = case.subject, case.subject.plan
    accepting = {*subject.samples}
    if plan is not None:
        accepting = {name for name, own in plan.modalities.items() if own.intake.takes_embeds}
    if not accepting:
        raise NotApplicable("no modality takes embeddings")
    request = case.draw_request()
    present = sorted({*request.items} & accepting)
    assume(present)
    name = case.draw(st.sampled_from(present))
    outcome = subject.run(request)
    if not outcome.ranges.get(name):
        raise NotApplicable(f"no position of the prompt stands for {name}")
    width = hidden_size(subject.processor)
    rows = [torch.ones(sum(mask), width) for _, _, mask in outcome.ranges[name]]
    refusals: list[str] = []
    forms = embeddings(subject, name, rows, outcome)
    for form in forms:
        read = case.attempt(parsed_embeddings, subject.processor, name, form)
        request_of = request.prompt, {**request.data(), name: form}, request.kwargs
        done = read and case.attempt(run, subject.processor, *request_of)
        if done:
            case.same(outcome.ranges, done.ranges, "the raw item and its embeddings", "ranges")
            continue
        reason = "taken for something else" if done is None else str(done.error)
        if plan is not None and not read:
            case.fail(f"the spec takes embeddings of {name}, and the parser refuses them: {reason}")
        # a refusal that says so is one, whoever gives it; that of a generated class comes from its
        # parser
        if plan is not None or (read and not any(word in str(done).lower() for word in _SAYING_SO)):
            sent = f"(sent as a {type(form).__name__})"
            case.fail(f"embeddings of {name} pass the parser, then {done} {sent}")
        refusals.append(reason)
    if len(refusals) == len(forms) and len(accepting) == 1:  # another modality may take them
        raise NotApplicable(f"embeddings are refused: {refusals[0]}")


_SAYING_SO = ("embedding", "--enable-mm-embeds")
