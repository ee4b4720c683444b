"""Laws about the model that gets what a processor makes: rows, what it does with them, and what
comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from ...errors import InputError
from ...plan.output import BoundOutput
from ...plan.soundness import compute_largest_magnitude
from ..differences import brief, near
from ..law import Case, NotApplicable, Refused, law
from ..strategies import Request
from ..subject import Subject
from ..vllm_model import device_of, embeddings, filled, hidden_size, merged, rows
from ..vllm_path import Outcome, run


@law(needs_model=True)
def counts(case: Case) -> None:
    """An item has as many encoder rows as its layout has embed positions, of the width that the
    language model takes."""
    outcome = case.subject.run(case.draw_request())
    width = hidden_size(case.subject.processor)
    for name, ranges in outcome.ranges.items():
        outputs = rows(case.model, outcome.items[name])
        if len(outputs) != len(ranges):
            case.fail(f"{len(outputs)} encoder outputs for {len(ranges)} items of {name}")
        for i, ((_, _, mask), own) in enumerate(zip(ranges, outputs, strict=True)):
            has, shape = f"{name}[{i}] has", tuple(own.shape[1:])
            if len(own) != sum(mask):
                case.fail(f"{has} {len(own)} encoder rows and {sum(mask)} embed positions")
            if shape != (width,):
                case.fail(f"{has} rows of shape {shape}, and the model takes ({width},)")


@law(needs_model=True)
def safety(case: Case) -> None:
    """A placeholder without data, or an id outside the vocabulary, cannot crash the model, and it
    never samples a placeholder id."""
    subject, model = case.subject, case.model
    placeholders = sorted(subject.plan.embed_ids) if subject.plan else []
    wrong = [*placeholders, -1, subject.vocabulary_size, 2**31 - 1]
    with torch.inference_mode():
        entering = case.attempt(model.embed_input_ids, torch.tensor(wrong, device=device_of(model)))
        if isinstance(entering, Refused):
            case.fail(f"ids {wrong} in a prompt: {entering}")
        if not torch.isfinite(entering).all():
            case.fail(f"ids {wrong} are embedded as NaN or infinities")
        logits = model.compute_logits(torch.zeros_like(entering[:1]))
    if logits is None:
        return
    sampled = [token for token in placeholders if logits[0, token] != float("-inf")]
    if sampled:
        case.fail(f"placeholder ids {sampled} can be sampled")


@law(cost=3, needs_model=True, dtypes=("float32", "bfloat16", "float16"))
def containment(case: Case) -> None:
    """Whatever an item holds and its encoder makes of it, what the language model gets is finite
    and not too large for its dtype, and the other items of a batch have the rows that they have
    alone."""
    subject, model = case.subject, case.model
    request = case.draw_request(most=2)
    dtype = subject.processor.info.ctx.model_config.dtype
    bound, limits = compute_largest_magnitude(dtype), torch.finfo(dtype)
    extremes = [torch.nan, torch.inf, -torch.inf, limits.max, -limits.max, 65504.0]
    value = case.draw(st.sampled_from(extremes))
    beside = f"in {dtype}, beside an item of {value:g}"
    outcome = subject.run(request)
    for name, items in outcome.items.items():
        alone, extreme = rows(model, items), [items[0]]
        if _takes_embeddings(subject, name):
            extreme += _embedded(subject, request, name, alone, outcome)[:1]
        together = rows(model, [*items, *(filled(item, value) for item in extreme)])
        _compare(case, alone, together, f"{beside}, {name}[{{}}]")
        entering = merged(model, together)
        if not torch.isfinite(entering).all():
            case.fail(f"{beside}, the language model gets NaN or infinities")
        largest = float(entering.abs().amax()) if entering.numel() else 0.0
        if largest > bound:
            case.fail(f"{beside}, the language model gets {largest:g} and can take {bound:g}")


@law(cost=2, needs_model=True)
def strangers(case: Case) -> None:
    """Items of different requests in one encoder batch have the rows that each has alone, raw items
    and embeddings."""
    subject, model = case.subject, case.model
    requests = [case.draw_request(least=1, most=2), case.draw(subject.requests(least=1, most=2))]
    case.before = f" beside {requests[1]!r}"
    outcomes = [subject.run(request) for request in requests]
    for name in outcomes[0].items.keys() & outcomes[1].items.keys():
        alone, batches = [], []
        for request, outcome in zip(requests, outcomes, strict=True):
            own = [rows(model, [item])[0] for item in outcome.items[name]]
            alone += own
            forms = [outcome.items[name]]
            if _takes_embeddings(subject, name):
                forms.append(_embedded(subject, request, name, own, outcome))
            batches.append(forms)
        for one, another in product(*batches):
            what = f"{len(alone)} items of {name} of two requests in one batch"
            together = case.attempt(rows, model, [*one, *another])
            if isinstance(together, Refused):
                case.fail(f"{what}: {together}")
            if len(together) != len(alone):
                case.fail(f"{what}: {len(together)} encoder outputs")
            _compare(case, alone, together, f"{what}: number {{}}")


def _takes_embeddings(subject: Subject, name: str) -> bool:
    """Whether a modality of a spec takes embeddings; another processor's are not tried."""
    return subject.plan is not None and subject.plan.modalities[name].parser.takes_embeds


def _embedded(
    subject: Subject, request: Request, name: str, rows: list[torch.Tensor], outcome: Outcome
) -> list[Any]:
    """The items of a modality as they are if their rows are sent in their place."""
    (sent,) = embeddings(subject, name, rows, outcome)
    data = {**request.data(), name: sent}
    return run(subject.processor, request.prompt, data, request.kwargs).items[name]


def _compare(
    case: Case, alone: Sequence[torch.Tensor], together: Sequence[torch.Tensor], where: str
) -> None:
    for i, (one, beside) in enumerate(zip(alone, together, strict=False)):
        if not near(one, beside):
            case.fail(f"{where.format(i)} has other rows than alone")


# -- what comes out of it --------------------------------------------------------------------------


@law()
def outputs(case: Case) -> None:
    """Whatever ids an output allows are an array of one shape, and the same one after encode and
    decode; other ids are refused."""
    plan = case.subject.plan
    if plan is None or not plan.outputs:
        raise NotApplicable("no spec declares outputs")
    output = plan.outputs[case.draw(st.sampled_from(sorted(plan.outputs)))]
    ids, other = _ids(case, output), _ids(case, output)
    said = f"{output.name} of the ids {brief(ids)}"
    decoded = output.decode(ids)
    array = decoded.copy()
    form, smallest = f"{array.dtype} {array.shape}", f"{output.dtype} {output.shape}"
    if form != smallest:
        case.fail(f"{said}: {form}, and of the smallest ids {smallest}")
    output.decode(other)
    case.same(array, decoded, f"{said}, before and after other ids are decoded", "array")
    if output.spec.encode is not None:
        again = output.decode(output.encode(array))
        if not output.spec.lossy:
            case.same(array, again, f"{said}, before and after encode and decode", "array")
    _refuses(case, output, ids)


def _ids(case: Case, output: BoundOutput) -> list[int]:
    """Ids that may stand there: the smallest or the largest ones, or any."""
    start, stop = np.array([(ids.start, ids.stop) for ids in output.allowed]).T
    drawn = case.draw(st.sampled_from(["smallest", "largest"]) | st.integers(0, 2**32 - 1))
    ends = {"smallest": start, "largest": stop - 1}
    ids = ends[drawn] if drawn in ends else np.random.default_rng(drawn).integers(start, stop)
    return ids.tolist()  # type: ignore[no-any-return]


def _refuses(case: Case, output: BoundOutput, ids: list[int]) -> None:
    at = case.draw(st.integers(0, len(ids) - 1))
    allowed = output.allowed[at]
    other = case.draw(st.sampled_from([allowed.start - 1, allowed.stop]))
    damaged = {
        "one id less": ids[:at] + ids[at + 1 :],
        "one id more": ids[: at + 1] + ids[at:],
        f"the id {other} at position {at}": [*ids[:at], other, *ids[at + 1 :]],
    }
    for what, wrong in damaged.items():
        try:
            output.decode(wrong)
        except InputError:
            continue
        case.fail(f"{output.name} with {what} is decoded: {brief(wrong)}")
