"""Laws about the model's own Hugging Face classes: ids, fields and positions are theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st

from ...vllm_api import harness
from .. import reference
from ..strategies import Request
from .law import Case, NotApplicable, law


@law(
    "L17 reference",
    "a text with items has the ids that the model's own Hugging Face processor gives it, where "
    "that writes placeholders, and fields of one name and size have the same values",
    cost=2,
)
def processing(case: Case) -> None:
    processor = case.subject.processor
    tokenizer = processor.info.ctx.tokenizer
    if tokenizer is None:
        raise NotApplicable("the model has no tokenizer")
    request = case.draw_request(least=1)
    text = tokenizer.decode(request.prompt)
    # transformers takes an array of three rows for one of three channels
    plain = {name: [one.same()[0] for one in some] for name, some in request.items.items() if some}
    try:
        result = reference.processed(processor, text, plain, request.kwargs)
    except Exception as error:
        raise NotApplicable("the model has no Hugging Face processor") from error
    if result is None:
        reject()
    theirs = result["input_ids"]
    try:
        outcome = harness.run(processor, text, request.data(), request.kwargs)
    except Exception as error:  # decoding may change what the ids mean
        case.refused(error)
        reject()
    rows = {
        outcome.ids[start + i]
        for ranges in outcome.ranges.values()
        for start, _, mask in ranges
        for i in range(len(mask))
        if mask[i]
    }
    if rows.isdisjoint(theirs):
        raise NotApplicable("the Hugging Face processor writes no placeholders")
    where = f"the Hugging Face processor and vLLM, of {text!r}"
    case.same(theirs, outcome.ids, where, "ids")
    if field := reference.other_field(result, outcome):
        case.fail(f"{where}: the field {field!r} has other values")


@law(
    "L20 positions",
    "where tokens have positions of several dimensions, they are those of the model's own Hugging "
    "Face class, and generated tokens go on as there; what follows changes none of a prefix",
)
def positions(case: Case) -> None:
    subject = case.subject
    try:
        rope, model = subject.rope
    except harness.NotTaken as reason:
        raise NotApplicable(str(reason)) from reason
    request = case.request = _as_in_chat(case, rope.config, case.draw_request(least=1))
    try:
        outcome = subject.run(request)
    except Exception as error:  # what other laws are about
        case.refused(error)
        reject()
    ids, items = outcome.ids, harness.placed(outcome)
    try:
        ours, delta = rope.positions(ids, items)
    except harness.NotTaken as reason:
        raise NotApplicable(str(reason)) from reason
    if ours.ndim != 2 or ours.shape[1] != len(ids):
        case.fail(f"{len(ids)} tokens have positions of shape {tuple(ours.shape)}")
    _check_text(case, ours, items)
    for cut in sorted({end for item in items for end in _ends(item)}):
        before = [item for item in items if _ends(item)[1] <= cut]
        if cut and not any(start < cut < end for start, end in map(_ends, items)):
            alone, _ = rope.positions(ids[:cut], before)
            _compare(case, ours[:, :cut], alone, f"of the first {cut} alone")
    if model is None:
        return
    try:
        theirs, their_delta = reference.positions(model, subject.processor, outcome, request.kwargs)
    except Exception:  # each refuses in a way of its own
        reject()
    name = type(model).__name__
    _compare(case, ours, theirs, f"in {name}")
    if delta != their_delta:
        here, there = len(ids) + delta, len(ids) + their_delta
        case.fail(f"the token after the prompt is at {here}, and in {name} at {there}")


def _as_in_chat(case: Case, config: Any, request: Request) -> Request:
    """The items of a request between the tokens that stand around them in a chat, by which
    transformers finds them, and with a little text between."""
    pieces = {
        name: case.subject.pieces(name, samples, request.kwargs)
        for name, samples in request.items.items()
    }
    prompt = [*next(iter(pieces.values()))[0].prefix]
    text = case.subject.ordinary[1:3]
    for name, i in request.order:
        start, end = _around(config, name)
        written = pieces[name][i].written
        prompt += text[: case.draw(st.integers(0 if start else 1, 2))]
        prompt += written if {*start} & {*written} else [*start, *written, *end]
    prompt += text[: case.draw(st.integers(0, 2))]
    return replace(request, prompt=prompt)


def _around(config: Any, name: str) -> tuple[list[int], list[int]]:
    """The ids before and after an item, by a config of transformers."""
    for kind in (name, "vision"):
        start = getattr(config, f"{kind}_start_token_id", None)
        end = getattr(config, f"{kind}_end_token_id", None)
        if start is not None and end is not None:
            return [start], [end]
    return [], []


def _ends(item: Any) -> tuple[int, int]:
    place = item.mm_position
    return place.offset, place.offset + place.length


def _check_text(case: Case, positions: torch.Tensor, items: Sequence[Any]) -> None:
    """Between items a token is one further than that before, in all dimensions alike."""
    in_items = {token for start, end in map(_ends, items) for token in range(start, end)}
    for token in range(positions.shape[1]):
        here = positions[:, token].tolist()
        if token in in_items:
            continue
        if len({*here}) > 1:
            case.fail(f"token {token}, of the text, is at {here}")
        if token == 0 or token - 1 not in in_items:
            expected = 0 if token == 0 else int(positions[0, token - 1]) + 1
            if here[0] != expected:
                case.fail(f"token {token}, of the text, is at {here[0]} and not at {expected}")


def _compare(case: Case, ours: torch.Tensor, theirs: torch.Tensor, where: str) -> None:
    if ours.shape != theirs.shape:
        case.fail(f"positions are {tuple(ours.shape)} and {where} {tuple(theirs.shape)}")
    for token in (ours != theirs).any(dim=0).nonzero().flatten().tolist()[:1]:
        here, there = ours[:, token].tolist(), theirs[:, token].tolist()
        case.fail(f"token {token} is at {here}, and {where} at {there}")
