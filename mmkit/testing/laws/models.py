"""Laws about the model that gets what a processor makes: its rows, its input, and its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import reject
from hypothesis import strategies as st

from ...errors import InputError
from ...plan.allowed_ids import AllowedIds
from ...plan.output import BoundOutput
from ...plan.plan import Plan
from ...plan.soundness import compute_largest_magnitude
from ..differences import brief, near
from ..law import Case, NotApplicable, Refused, law
from ..strategies import Request
from ..subject import Subject
from ..vllm_model import (
    compute_rows,
    fill_item,
    get_device,
    get_hidden_size,
    list_embedding_forms,
    merge_rows,
)
from ..vllm_path import Outcome, run

MAX_LOGPROB_DIFFERENCE = 1e-4
"""Of log probabilities in float32, which attention by other kernels changes in the last bits."""


@law(needs_model=True)
def counts(case: Case) -> None:
    """An item has as many encoder rows as its layout has placeholders.

    The rows have the width that the language model takes.
    """
    outcome = case.subject.run(case.draw_request())
    width = get_hidden_size(case.subject.processor)
    for name, ranges in outcome.ranges.items():
        outputs = compute_rows(case.model, outcome.items[name])
        if len(outputs) != len(ranges):
            case.fail(f"{len(outputs)} encoder outputs for {len(ranges)} items of {name}")
        for index, rows in enumerate(outputs):
            item = f"{name}[{index}]"
            positions = sum(ranges[index].mask)
            if len(rows) != positions:
                case.fail(f"{item} has {len(rows)} encoder rows and {positions} embed positions")
            shape = tuple(rows.shape[1:])
            if shape != (width,):
                case.fail(f"{item} has rows of shape {shape}, and the model takes ({width},)")


@law(needs_model=True)
def safety(case: Case) -> None:
    """Placeholders without data and unknown ids do not crash the model.

    The model does not sample a placeholder.
    """
    subject = case.subject
    model = case.model
    placeholders: list[int] = []
    if subject.plan is not None:
        placeholders = sorted(subject.plan.embed_ids)
    wrong = placeholders + [-1, subject.vocabulary_size, 2**31 - 1]
    with torch.inference_mode():
        ids = torch.tensor(wrong, device=get_device(model))
        embeds = case.attempt(model.embed_input_ids, ids)
        if isinstance(embeds, Refused):
            case.fail(f"ids {wrong} in a prompt: {embeds}")
        if not torch.isfinite(embeds).all():
            case.fail(f"ids {wrong} are embedded as NaN or infinities")
        logits = model.compute_logits(torch.zeros_like(embeds[:1]))
    if logits is None:
        return
    sampled = [token for token in placeholders if logits[0, token] != float("-inf")]
    if sampled:
        case.fail(f"placeholder ids {sampled} can be sampled")


@law(cost=3, needs_model=True, dtypes=("float32", "bfloat16", "float16"))
def containment(case: Case) -> None:
    """Whatever an item holds, the language model gets finite rows, and other items have theirs.

    The rows are not too large for the dtype of the language model. The other items of a batch have
    the rows that they have alone.
    """
    subject = case.subject
    model = case.model
    request = case.draw_request(most=2)
    dtype = subject.processor.info.ctx.model_config.dtype
    limit = torch.finfo(dtype).max
    # 65504 is the limit of float16, to which wider models may cast
    value = case.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf, limit, -limit, 65504.0]))
    where = f"in {dtype}, beside an item of {value:g}"
    outcome = subject.run(request)
    for name, items in outcome.items.items():
        alone = compute_rows(model, items)
        extreme = [fill_item(items[0], value)]
        if _takes_embeddings(subject, name):
            embedded = _replace_by_embeddings(subject, request, name, alone, outcome)
            extreme.append(fill_item(embedded[0], value))
        together = compute_rows(model, list(items) + extreme)
        _check_rows(case, alone, together, f"{where}, {name}[{{}}]")
        _check_input_of_language_model(case, merge_rows(model, together), dtype, where)


def _check_input_of_language_model(
    case: Case, embeds: torch.Tensor, dtype: torch.dtype, where: str
) -> None:
    if not torch.isfinite(embeds).all():
        case.fail(f"{where}, the language model gets NaN or infinities")
    if embeds.numel() == 0:
        return
    largest = float(embeds.abs().amax())
    bound = compute_largest_magnitude(dtype)
    if largest > bound:
        case.fail(f"{where}, the language model gets {largest:g} and can take {bound:g}")


@law(cost=2, needs_model=True)
def strangers(case: Case) -> None:
    """Items of different requests in one encoder batch have the rows that each has alone.

    The items may be raw or embeddings.
    """
    subject = case.subject
    first = case.draw_request(least=1, most=2)
    second = case.draw(subject.requests(least=1, most=2))
    case.before = f" beside {second!r}"
    first_outcome = subject.run(first)
    second_outcome = subject.run(second)
    for name in first_outcome.items.keys() & second_outcome.items.keys():
        first_rows = _compute_rows_alone(case, first_outcome, name)
        second_rows = _compute_rows_alone(case, second_outcome, name)
        first_forms = _list_item_forms(subject, first, name, first_rows, first_outcome)
        second_forms = _list_item_forms(subject, second, name, second_rows, second_outcome)
        alone = first_rows + second_rows
        for first_items in first_forms:
            for second_items in second_forms:
                _check_batch(case, name, first_items + second_items, alone)


def _compute_rows_alone(case: Case, outcome: Outcome, name: str) -> list[torch.Tensor]:
    """Return the rows of the items of a modality, each in a batch of its own."""
    alone = []
    for item in outcome.items[name]:
        alone.append(compute_rows(case.model, [item])[0])
    return alone


def _list_item_forms(
    subject: Subject, request: Request, name: str, rows: list[torch.Tensor], outcome: Outcome
) -> list[list[Any]]:
    """Return the items of a modality as raw items and, where it takes them, as embeddings."""
    forms = [outcome.items[name]]
    if _takes_embeddings(subject, name):
        forms.append(_replace_by_embeddings(subject, request, name, rows, outcome))
    return forms


def _check_batch(case: Case, name: str, items: list[Any], alone: Sequence[torch.Tensor]) -> None:
    """Check that items in one batch have the rows that each has alone."""
    what = f"{len(alone)} items of {name} of two requests in one batch"
    together = case.attempt(compute_rows, case.model, items)
    if isinstance(together, Refused):
        case.fail(f"{what}: {together}")
    if len(together) != len(alone):
        case.fail(f"{what}: {len(together)} encoder outputs")
    _check_rows(case, alone, together, f"{what}: number {{}}")


def _takes_embeddings(subject: Subject, name: str) -> bool:
    """Return whether a modality of a spec takes embeddings.

    Models with hand-written processors are not tried.
    """
    return subject.plan is not None and subject.plan.modalities[name].parser.takes_embeds


def _replace_by_embeddings(
    subject: Subject, request: Request, name: str, rows: list[torch.Tensor], outcome: Outcome
) -> list[Any]:
    """Return the items of a modality as they are if their rows are sent in their place."""
    (form,) = list_embedding_forms(subject, name, rows, outcome)
    data = {**request.data(), name: form}
    return run(subject.processor, request.prompt, data, request.kwargs).items[name]


def _check_rows(
    case: Case, alone: Sequence[torch.Tensor], together: Sequence[torch.Tensor], where: str
) -> None:
    """Check the rows of the first items of a batch.

    Args:
        case: the case.
        alone: the rows of these items alone.
        together: the rows of all items of the batch.
        where: the item, with ``{}`` for its index, for messages.
    """
    for index, (rows_alone, rows_together) in enumerate(zip(alone, together, strict=False)):
        if not near(rows_alone, rows_together):
            case.fail(f"{where.format(index)} has other rows than alone")


@law(cost=25, needs_model=True, needs_engine=True)
def logprobs(case: Case) -> None:
    """Tokens have the log probabilities that the class in transformers gives them.

    The class is one that vLLM runs as it is. The engine answers two prompts in one batch, several
    tokens each.
    """
    requests = [case.draw_request(), case.draw_request()]
    outcomes = [case.subject.run(request) for request in requests]
    for outcome in outcomes:
        if len(outcome.ids) > case.model.max_prompt_length:
            reject()
    answers = case.model.answer_by_vllm(requests)
    others = reversed(requests)
    for request, other, outcome, answer in zip(requests, others, outcomes, answers, strict=True):
        case.request = request
        case.before = f" beside {other!r}"
        of_class = case.model.compute_by_transformers(outcome, answer.ids)
        for step, of_vllm in enumerate(answer.logprobs):
            _check_logprobs(case, step, of_vllm, of_class[step].tolist())


def _check_logprobs(
    case: Case, step: int, of_vllm: dict[int, float], of_class: list[float]
) -> None:
    """Check the log probabilities of the likeliest tokens at a step of an answer."""
    differences = {token: abs(of_class[token] - value) for token, value in of_vllm.items()}
    token = max(differences, key=lambda token: differences[token])
    if not differences[token] <= MAX_LOGPROB_DIFFERENCE:
        values = f"{of_vllm[token]:.5f} in vLLM and {of_class[token]:.5f} in transformers"
        where = f"at step {step + 1} of the answer"
        case.fail(f"{where}, the token {token} has the log probability {values}")


# -- what comes out of it --------------------------------------------------------------------------


MAX_UNITS = 5
"""The most units of an output that are drawn."""

MAX_STEPS = 40
"""The most ids of an answer that are drawn one by one."""


@law()
def outputs(case: Case) -> None:
    """All ids that an output allows decode to arrays of one shape and dtype.

    Encoding and decoding an array changes nothing. Other ids are refused. Where an output stands in
    a text, sampling allows whole outputs, and nothing else behind their mark.
    """
    plan = case.subject.plan
    if plan is None or not plan.outputs:
        raise NotApplicable("no spec declares outputs")
    output = plan.outputs[case.draw(st.sampled_from(sorted(plan.outputs)))]
    num_units = 1
    if output.most > 1:
        num_units = case.draw(st.integers(1, min(output.most, MAX_UNITS)))
    ids = _draw_allowed_ids(case, output, num_units)
    other_ids = _draw_allowed_ids(case, output, num_units)
    what = f"{output.name} of the ids {brief(ids)}"
    decoded = output.decode(ids)
    array = decoded.copy()
    form = f"{array.dtype} {array.shape}"
    smallest = output.decode(output.list_smallest_ids(num_units))
    form_of_smallest = f"{smallest.dtype} {smallest.shape}"
    if form != form_of_smallest:
        case.fail(f"{what}: {form}, and of the smallest ids {form_of_smallest}")
    decoded = output.decode(ids)
    output.decode(other_ids)
    case.check_equal(array, decoded, f"{what}, before and after other ids are decoded", "array")
    if output.spec.encode is not None:
        again = output.decode(output.encode(array))
        if not output.spec.lossy:
            case.check_equal(array, again, f"{what}, before and after encode and decode", "array")
    _check_damaged_ids(case, output, ids)
    if output.after is not None:
        _check_sampling(case, plan, output)


def _draw_allowed_ids(case: Case, output: BoundOutput, num_units: int) -> list[int]:
    """Draw ids that the output allows: the smallest at each position, the largest, or any."""
    allowed = output.list_allowed(num_units)
    smallest = [ids.start for ids in allowed]
    stops = [ids.stop for ids in allowed]
    choice = case.draw(st.sampled_from(["smallest", "largest"]) | st.integers(0, 2**32 - 1))
    if choice == "smallest":
        return smallest
    if choice == "largest":
        return [stop - 1 for stop in stops]
    random = np.random.default_rng(choice)
    return random.integers(smallest, stops).tolist()  # type: ignore[no-any-return]


def _check_damaged_ids(case: Case, output: BoundOutput, ids: list[int]) -> None:
    """Check that an output refuses ids with a mistake at one position."""
    position = case.draw(st.integers(0, len(ids) - 1))
    ranges = _list_expected_ranges(output, position)
    first = min(allowed.start for allowed in ranges)
    stop = max(allowed.stop for allowed in ranges)
    other = case.draw(st.sampled_from([first - 1, stop]))
    before = ids[:position]
    after = ids[position + 1 :]
    damaged = {
        "one id less": before + after,
        "one id more": before + [ids[position], ids[position]] + after,
        f"the id {other} at position {position}": before + [other] + after,
    }
    for mistake, wrong_ids in damaged.items():
        # of an output of several units, another number of ids may be right
        if output.most > 1 and _is_output(output, wrong_ids):
            continue
        try:
            output.decode(wrong_ids)
        except InputError:
            continue
        case.fail(f"{output.name} with {mistake} is decoded: {brief(wrong_ids)}")


def _check_sampling(case: Case, plan: Plan, output: BoundOutput) -> None:
    """Check which ids sampling allows in an answer of text, id by id.

    Sampling must look at the last ids alone: those before the window of the output do not matter.
    """
    allowed_ids = AllowedIds(plan)
    number = torch.tensor([allowed_ids.get_output_number(output.name)])
    is_sampled = torch.ones(plan.vocab_size, dtype=torch.bool)
    is_sampled[sorted(plan.embed_ids)] = False
    ids: list[int] = []
    body: list[int] = []  # of the output that has begun, from its mark on
    for _ in range(min(output.window + 3, MAX_STEPS)):
        ranges = [range(plan.vocab_size)]
        if body:
            ranges = _list_expected_ranges(output, len(body))
        is_expected = torch.zeros_like(is_sampled)
        for allowed in ranges:
            is_expected[allowed.start : allowed.stop] = True
        is_expected &= is_sampled
        position = allowed_ids.find_position(int(number), ids[-output.window :], ())
        logits = torch.zeros(1, plan.vocab_size)
        allowed_ids.mask_placeholders(logits)
        allowed_ids.mask_outputs(logits, number, torch.tensor([position]))
        is_allowed = logits[0].isfinite()
        if not torch.equal(is_allowed, is_expected):
            wrong_ids = (is_allowed != is_expected).nonzero().flatten().tolist()
            case.fail(
                f"{output.name} behind the ids {brief(ids)}: sampling and the declaration differ "
                f"about the ids {brief(wrong_ids)}"
            )
        likely_ids = [output.after]
        if body:
            likely_ids = [ids[0] for ids in ranges]
        token = case.draw(st.sampled_from(likely_ids))
        ids.append(token)
        body.append(token)
        if _is_output(output, body):
            body = []


def _list_expected_ranges(output: BoundOutput, position: int) -> list[range]:
    """Return the ids that may stand at a position of an output, by the declaration."""
    if output.after is not None:
        if position == 0:
            return [range(output.after, output.after + 1)]
        position -= 1
    unit, position_in_unit = divmod(position, len(output.allowed))
    ranges: list[range] = []
    if unit < output.most:
        ranges.append(output.allowed[position_in_unit])
    if unit > 0 and position_in_unit == 0 and output.until is not None:
        ranges.append(range(output.until, output.until + 1))
    return ranges


def _is_output(output: BoundOutput, ids: Sequence[int]) -> bool:
    """Return whether ids are a whole output, by the declaration."""
    for position, token in enumerate(ids):
        ranges = _list_expected_ranges(output, position)
        if not any(token in allowed for allowed in ranges):
            return False
    if output.until is not None:
        return bool(ids) and ids[-1] == output.until
    num_marks = 0 if output.after is None else 1
    return len(ids) == num_marks + len(output.allowed)
