"""The law about requests that must be refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from ...errors import InputError
from ...language.items.base import get_ends
from ...language.layout import as_text
from ...plan.plan import Plan
from .. import vllm_path
from ..law import Case, Refused, law
from ..strategies import PlainSample, Request, can_spell
from ..subject import Subject, special_texts


@law(cost=4)
def refusal(case: Case) -> None:
    """Missing, surplus and malformed items and unknown modalities are refused.

    The message names the modality. A text in an item that spells a placeholder is refused, too; no
    other special token comes out of a text.
    """
    subject = case.subject
    request = case.draw_request()
    data = request.data()
    for mistake in _find_mistakes(subject, request, data):
        changed = {**data, **mistake.change}
        outcome = case.attempt(
            vllm_path.run, subject.processor, request.prompt, changed, request.kwargs
        )
        if outcome:
            case.fail(f"{mistake.description}: accepted")
        if subject.plan is not None:
            _check_message(case, mistake.description, outcome)
    if subject.plan is not None:
        for name in request.items:
            _check_special_tokens_in_texts(case, subject.plan, request, name)


def _check_message(case: Case, description: str, refused: Refused) -> None:
    """Check that a spec's processor refuses a mistake with an InputError that names its place."""
    if not isinstance(refused.error, InputError):
        case.fail(f"{description}: refused with {refused}")
    places = list(case.subject.samples) + ["prompt", "multi_modal_data"]
    if not any(place in str(refused.error) for place in places):
        case.fail(f"{description}: the message names no modality: {refused.error}")


# -- mistakes in a request -------------------------------------------------------------------------


class _Mistake(NamedTuple):
    """A change of a well-formed request that must be refused.

    Attributes:
        change: the items of the modalities that are changed.
        description: what is wrong, for messages.
    """

    change: dict[str, list[Any]]
    description: str


def _find_mistakes(
    subject: Subject, request: Request, data: Mapping[str, list[Any]]
) -> Iterator[_Mistake]:
    yield _Mistake({"no_such_modality": [1]}, "an unknown modality")
    for name, values in data.items():
        yield from _find_wrong_counts(subject, request, name, values)
        yield from _find_wrong_items(subject, name, values)


def _find_wrong_counts(
    subject: Subject, request: Request, name: str, values: list[Any]
) -> Iterator[_Mistake]:
    """Yield the changes after which the number of items is not that of the targets."""
    if not any(modality == name for modality, _ in request.order):
        return
    yield _Mistake({name: values + values[:1]}, f"one item of {name} too many")
    if len(values) > 1 and not _has_later_layout(subject, request, name):
        yield _Mistake({name: values[1:]}, f"one item of {name} too few")


def _has_later_layout(subject: Subject, request: Request, name: str) -> bool:
    """Return whether the prompt has the layout of an item other than the first one.

    The prompt may then be the expanded prompt of fewer items.
    """
    prompt = as_text(subject.rewrite_prompt(request))
    for update in subject.find_request_updates(request)[name][1:]:
        if len(update.ids) > len(update.target) and as_text(update.ids) in prompt:
            return True
    return False


def _find_wrong_items(subject: Subject, name: str, values: list[Any]) -> Iterator[_Mistake]:
    """Yield malformed items in place of the last one."""
    before = values[:-1]
    last = values[-1]

    def replace_last(item: Any, description: str) -> _Mistake:
        return _Mistake({name: [*before, item]}, description)

    # elsewhere vLLM's renderer refuses None, before any processor sees it
    if subject.plan is not None:
        yield replace_last(None, f"None as an item of {name}")
    if not isinstance(last, str):
        yield replace_last("text", f"a text as an item of {name}")
    if isinstance(last, dict):
        part = next(iter(last))
        without_part = dict(last)
        del without_part[part]
        yield replace_last(without_part, f"an item of {name} without {part}")
        yield replace_last({**last, part: None}, f"None as {part} of {name}")
        yield replace_last({**last, "no_such_part": 1}, f"an unknown part in {name}")
    yield replace_last(object(), f"an object as an item of {name}")
    kind: Any = None
    if subject.plan is not None:
        kind = subject.plan.modalities[name].item
    if isinstance(last, dict):
        for part, value in last.items():
            part_kind = None
            if kind is not None and isinstance(value, torch.Tensor):
                part_kind = kind.part(part, kind.canonical(last, part))
            for wrong in _find_wrong_tensors(part_kind, value):
                item = {**last, part: wrong.tensor}
                yield replace_last(item, f"{wrong.description} in {part} of {name}")
    else:
        for wrong in _find_wrong_tensors(kind, last):
            yield replace_last(wrong.tensor, f"{wrong.description} in an item of {name}")


class _WrongTensor(NamedTuple):
    tensor: torch.Tensor
    description: str


def _find_wrong_tensors(kind: Any, value: Any) -> Iterator[_WrongTensor]:
    """Yield tensors in place of a well-formed one; none in place of another value.

    Args:
        kind: the item type of the value; None for an item of a hand-written processor.
        value: the well-formed value.
    """
    if not isinstance(value, torch.Tensor):
        return
    yield _WrongTensor(torch.stack([value, value])[None], "a wrong shape")
    wrong_numbers: dict[str, float] = {}
    if value.is_floating_point():
        wrong_numbers["NaN"] = torch.nan
    bound = getattr(kind, "bound", None)
    if bound is not None:
        _, most = get_ends(bound)
        wrong_numbers["a value beyond the bound"] = 2 * abs(most) + 1
    if value.numel() == 0:
        return
    for description, number in wrong_numbers.items():
        # a float keeps its dtype, as callers send it; an integer type may lack the number
        if value.is_floating_point():
            tensor = value.clone()
        else:
            tensor = value.double()
        tensor.view(-1)[0] = number
        yield _WrongTensor(tensor, description)


# -- special tokens in texts -----------------------------------------------------------------------


def _check_special_tokens_in_texts(case: Case, plan: Plan, request: Request, name: str) -> None:
    """Spell a special token in each text of an item, and check the layout of the item.

    A text that spells a placeholder is refused. With any other special token, the layout has no
    more of this token than that of the drawn item.
    """
    modality = plan.modalities[name]
    kind: Any = modality.item
    special = special_texts(plan)
    value = kind.canonical(request.items[name][0].value(), name)
    for place, drawn_text in kind.texts(value):
        part = place.removeprefix(".")
        text_kind = kind
        if part:
            text_kind = kind.part(part, value)
        fitting = [word for word in special if can_spell(text_kind, word, len(drawn_text))]
        if not fitting:
            continue
        word = case.draw(st.sampled_from(sorted(fitting)))
        item: Any = word + drawn_text[len(word) :]
        if part:
            item = {**value, part: item}
        description = f"{word!r} in {part or 'a text'} of {name}"
        ids = case.attempt(_find_layout, case.subject, request, name, item)
        if isinstance(ids, Refused):
            continue
        if word in modality.parser.placeholder_texts:
            case.fail(f"{description}: accepted")
        count = ids.count(special[word])
        count_before = _find_layout(case.subject, request, name, value).count(special[word])
        if count > count_before:
            tokens = f"{count} of this token, and {count_before}"
            case.fail(f"{description}: the layout has {tokens} with another text")


def _find_layout(subject: Subject, request: Request, name: str, item: Any) -> list[int]:
    """Return the ids of the layout of an item."""
    (update,) = subject.find_updates(name, [PlainSample(0, item)], request.kwargs)
    return update.ids
