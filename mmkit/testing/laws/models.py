"""Laws about the model that gets what a processor makes: rows, and what it does with them."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from hypothesis import strategies as st

from ...model.sound import largest_magnitude
from ..differences import near
from ..law import Case, Refused, law
from ..strategies import Request
from ..subject import Subject
from ..vllm_model import embedded, filled, hidden_size, merged, rows
from ..vllm_path import run
from .items import embeddings


@law(
    "an item has as many encoder rows as its layout has embed positions, of the width that the "
    "language model takes",
    needs_model=True,
)
def counts(case: Case) -> None:
    outcome = case.subject.run(case.draw_request())
    width = hidden_size(case.subject.processor)
    encoded = {name: rows(case.model, items) for name, items in outcome.items.items()}
    for name, ranges in outcome.ranges.items():
        outputs = encoded[name]
        if len(outputs) != len(ranges):
            case.fail(f"{len(outputs)} encoder outputs for {len(ranges)} items of {name}")
        for i, ((_, _, mask), own) in enumerate(zip(ranges, outputs, strict=True)):
            if len(own) != sum(mask):
                case.fail(
                    f"{name}[{i}] has {len(own)} encoder rows and {sum(mask)} embed positions"
                )
            shape = tuple(own.shape[1:])
            if shape != (width,):
                case.fail(f"{name}[{i}] has rows of shape {shape}, and the model takes ({width},)")


@law(
    "a placeholder without data, or an id outside the vocabulary, cannot crash the model, and it "
    "never samples a placeholder id",
    needs_model=True,
)
def safety(case: Case) -> None:
    subject, model = case.subject, case.model
    placeholders = sorted(subject.plan.embed_ids) if subject.plan else []
    wrong = [*placeholders, -1, subject.vocabulary_size, 2**31 - 1]
    with torch.inference_mode():
        entering = case.attempt(model.embed_input_ids, torch.tensor(wrong))
        if isinstance(entering, Refused):
            case.fail(f"ids {wrong} in a prompt: {entering}")
        if not torch.isfinite(entering).all():
            case.fail(f"ids {wrong} are embedded as NaN or infinities")
        logits = model.compute_logits(torch.zeros(1, entering.shape[-1], dtype=entering.dtype))
    if logits is None:
        return
    sampled = [token for token in placeholders if logits[0, token] != float("-inf")]
    if sampled:
        case.fail(f"placeholder ids {sampled} can be sampled")


@law(
    "whatever an item holds and its encoder makes of it, what the language model gets is finite "
    "and not too large for its dtype, and the other items of a batch have the rows that they "
    "have alone",
    cost=3,
    needs_model=True,
    dtypes=("float32", "bfloat16", "float16"),
)
def containment(case: Case) -> None:
    subject, model = case.subject, case.model
    request = case.draw_request(most=2)
    dtype = subject.processor.info.ctx.model_config.dtype
    bound, limits = largest_magnitude(dtype), torch.finfo(dtype)
    extremes = [torch.nan, torch.inf, -torch.inf, limits.max, -limits.max, 65504.0]
    value = case.draw(st.sampled_from(extremes))
    outcome = subject.run(request)
    beside = f"in {dtype}, beside an item of {value:g}"
    for name, items in outcome.items.items():
        alone = rows(model, items)
        together = rows(model, [*items, filled(items[0], value)])
        for i, (one, other) in enumerate(zip(alone, together, strict=False)):
            if not near(one, other):
                case.fail(f"{beside}, {name}[{i}] has other rows than alone")
        if modality := _taking_embeddings(subject, name):
            together += embedded(model, modality, items[0], torch.full_like(alone[0], value))
        entering = merged(model, together)
        if not torch.isfinite(entering).all():
            case.fail(f"{beside}, the language model gets NaN or infinities")
        largest = float(entering.abs().amax()) if entering.numel() else 0.0
        if largest > bound:
            case.fail(f"{beside}, the language model gets {largest:g} and can take {bound:g}")


@law(
    "items of different requests in one encoder batch have the rows that each has alone, raw items "
    "and embeddings",
    cost=2,
    needs_model=True,
)
def strangers(case: Case) -> None:
    subject, model = case.subject, case.model
    request = case.draw_request(least=1, most=2)
    other = case.draw(subject.requests(least=1, most=2))
    case.before = f" beside {other!r}"
    here, there = subject.run(request), subject.run(other)
    for name in here.items.keys() & there.items.keys():
        alone = [
            [rows(model, [item])[0] for item in outcome.items[name]] for outcome in (here, there)
        ]
        ours, theirs = [here.items[name]], [there.items[name]]
        if modality := _taking_embeddings(subject, name):
            ours.append(_embedded(subject, request, modality, alone[0], here))
            theirs.append(_embedded(subject, other, modality, alone[1], there))
        for one, another in product(ours, theirs):
            _check_together(case, name, [*one, *another], [*alone[0], *alone[1]])


def _taking_embeddings(subject: Subject, name: str) -> Any:
    """A modality of a spec that takes embeddings, else None."""
    modality = subject.plan.modalities[name] if subject.plan else None
    return modality if modality is not None and modality.intake.takes_embeds else None


def _embedded(
    subject: Subject, request: Request, modality: Any, rows: list[torch.Tensor], outcome: Any
) -> list[Any]:
    """The items of a modality as they are if their rows are sent in their place."""
    data = {**request.data(), modality.name: embeddings(modality, rows, outcome)}
    return run(subject.processor, request.prompt, data, request.kwargs).items[modality.name]


def _check_together(case: Case, name: str, items: list[Any], alone: list[torch.Tensor]) -> None:
    what = f"{len(items)} items of {name} of two requests in one batch"
    together = case.attempt(rows, case.model, items)
    if isinstance(together, Refused):
        case.fail(f"{what}: {together}")
    if len(together) != len(items):
        case.fail(f"{what}: {len(together)} encoder outputs")
    for i, (one, beside) in enumerate(zip(alone, together, strict=True)):
        if not near(one, beside):
            case.fail(f"{what}: number {i} has other rows than alone")
