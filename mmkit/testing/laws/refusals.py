"""The law about requests that must be refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from ...errors import InputError
from ...language.items.base import get_ends
from ...language.items.lists import List
from ...language.items.optional import OptionalPart
from ...language.layout import make_id_string
from ...plan.plan import Plan
from .. import vllm_path
from ..law import Case, Refused, law
from ..strategies import PlainSample, Request, can_spell
from ..subject import Subject, special_texts

_KEY = re.compile(r"\.(\w+)|\[(\d+)\]")
"""One step of a path in an item: ``.name`` or ``[0]``."""

_MOST_ELEMENTS = 64
"""Elements of the longest list that is made too long."""


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
    """Check that a spec's processor refuses a mistake with an InputError that says where it is."""
    if not isinstance(refused.error, InputError):
        case.fail(f"{description}: refused with {refused}")
    names = list(case.subject.samples) + ["prompt", "multi_modal_data"]
    if not any(name in str(refused.error) for name in names):
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
    prompt = make_id_string(subject.rewrite_prompt(request))
    for update in subject.find_request_updates(request)[name][1:]:
        if len(update.ids) > len(update.target) and make_id_string(update.ids) in prompt:
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
    yield replace_last(object(), f"an object as an item of {name}")
    kind: Any = None
    if subject.plan is not None:
        kind = subject.plan.modalities[name].item
    for wrong in _find_wrong_values(kind, last):
        path = wrong.path.removeprefix(".") or "an item"
        yield replace_last(wrong.value, f"{wrong.description} in {path} of {name}")


class _WrongValue(NamedTuple):
    """A malformed value in place of a well-formed one.

    Attributes:
        value: the whole value.
        description: what is wrong.
        path: the path of what is wrong in it, as `ItemType.texts` has it; empty for itself.
    """

    value: Any
    description: str
    path: str = ""


def _find_wrong_values(kind: Any, value: Any) -> Iterator[_WrongValue]:
    """Yield malformed values in place of a well-formed one.

    Args:
        kind: the item type of the value; None for an item of a hand-written processor.
        value: the well-formed value.
    """
    if isinstance(kind, OptionalPart):
        kind = kind.item
    if isinstance(value, dict):
        yield from _find_wrong_records(kind, value)
    elif isinstance(value, list) and isinstance(kind, List):
        yield from _find_wrong_lists(kind, value)
    elif isinstance(value, torch.Tensor):
        yield from _find_wrong_tensors(kind, value)


def _find_wrong_records(kind: Any, value: dict[str, Any]) -> Iterator[_WrongValue]:
    for part in value:
        if kind is None or not kind.parts[part].is_optional:
            without_part = dict(value)
            del without_part[part]
            yield _WrongValue(without_part, f"no {part}")
            yield _WrongValue({**value, part: None}, f"None as {part}")
            break
    yield _WrongValue({**value, "no_such_part": 1}, "an unknown part")
    for part, part_value in value.items():
        part_kind = None
        if kind is not None:
            part_kind = kind.part(part, kind.canonical(value, part))
        for wrong in _find_wrong_values(part_kind, part_value):
            item = {**value, part: wrong.value}
            yield _WrongValue(item, wrong.description, f".{part}{wrong.path}")


def _find_wrong_lists(kind: List, value: list[Any]) -> Iterator[_WrongValue]:
    if value:
        last_path = f"[{len(value) - 1}]"
        yield _WrongValue([*value[:-1], None], "None as an element")
        for wrong in _find_wrong_values(kind.element, value[-1]):
            item = [*value[:-1], wrong.value]
            yield _WrongValue(item, wrong.description, last_path + wrong.path)
        if kind.most < _MOST_ELEMENTS:
            yield _WrongValue(value[:1] * (kind.most + 1), "too many elements")
    if kind.least > 0:
        yield _WrongValue(value[: kind.least - 1], "too few elements")


def _find_wrong_tensors(kind: Any, value: torch.Tensor) -> Iterator[_WrongValue]:
    yield _WrongValue(torch.stack([value, value])[None], "a wrong shape")
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
        yield _WrongValue(tensor, description)


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
    for path, drawn_text in kind.texts(value):
        text_kind, replace_text = _find_text(kind, value, path)
        fitting = [word for word in special if can_spell(text_kind, word, len(drawn_text))]
        if not fitting:
            continue
        word = case.draw(st.sampled_from(sorted(fitting)))
        item = replace_text(word + drawn_text[len(word) :])
        description = f"{word!r} in {path.removeprefix('.') or 'a text'} of {name}"
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


def _find_text(kind: Any, value: Any, path: str) -> tuple[Any, Callable[[str], Any]]:
    """Return the item type of a text in an item, and a function that puts another text there.

    Args:
        kind: the item type.
        value: the canonical item.
        path: the path of the text, as `ItemType.texts` has it.
    """

    def replace_text(text: str) -> Any:
        return _replace_at(value, keys, text)

    keys: list[Any] = []
    inner_kind, inner_value = kind, value
    for name, position in _KEY.findall(path):
        if name:
            keys.append(name)
            inner_kind = inner_kind.part(name, inner_value)
        else:
            keys.append(int(position))
            inner_kind = inner_kind.element
        inner_value = inner_value[keys[-1]]
        if isinstance(inner_kind, OptionalPart):
            inner_kind = inner_kind.item
    return inner_kind, replace_text


def _replace_at(value: Any, keys: Sequence[Any], new: Any) -> Any:
    """Return a copy of nested dicts and lists with another value at a path."""
    if not keys:
        return new
    changed = copy(value)
    changed[keys[0]] = _replace_at(value[keys[0]], keys[1:], new)
    return changed


def _find_layout(subject: Subject, request: Request, name: str, item: Any) -> list[int]:
    """Return the ids of the layout of an item."""
    (update,) = subject.find_updates(name, [PlainSample(0, item)], request.kwargs)
    return update.ids
