"""64 specs that are wrong or odd in one thing, each with what comes of it: refused when it is declared or bound, caught
by a law, or right, with the reason. None is wrong without a word."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from mmkit import (
    Modality,
    ModelSpec,
    SpecError,
    Tensor,
    batched,
    between,
    derived,
    embed,
    ending_with,
    fields,
    flat,
    insert,
    item,
    literal,
    replace,
    tok,
)
from mmkit.testing import NotDrawn, check_law, of_spec
from tests.path.planted.base import checkpoint
from tests.path.planted.bug import violation
from tests.profiles import scaled

PAIRS = Tensor((between(1, 4), 2))
"""Up to four pairs of numbers, with a placeholder each."""

NUM_REQUESTS = 30
"""Drawn requests for a law that catches a spec."""

RULES = ("ranges", "independence", "worst_case", "idempotence")
"""The laws that hold for a spec that is right."""

Maker = Callable[[], ModelSpec]


def make_first(name: str = "x", **changes: Any) -> Modality:
    """Return pairs in place of <frame>, with some changes."""
    options: dict[str, Any] = {
        "item": PAIRS,
        "layout": embed(tok["<pad>"]) * item.length,
        "update": replace(tok["<frame>"]),
        "fields": {name: batched()},
    }
    return Modality(name, **(options | changes))


def make_second(name: str = "s", **changes: Any) -> Modality:
    """Return pairs in place of <series>, with some changes."""
    options: dict[str, Any] = {
        "layout": embed(tok["<row>"]) * item.length,
        "update": replace(tok["<series>"]),
    }
    return make_first(name, **(options | changes))


def alone(**changes: Any) -> Maker:
    """Return what makes a spec of one modality with some changes."""

    def make() -> ModelSpec:
        return ModelSpec("w", make_first(**changes))

    return make


def of(compute: Callable[[Any], Any]) -> Maker:
    """Return what makes a spec whose field is a function of the items, and of nothing else."""

    def process(items: Any, scope: Any) -> dict[str, Any]:
        return {"x": compute(items)}

    return alone(process=process)


def two(first: dict[str, Any] | None = None, **changes: Any) -> Maker:
    """Return what makes a spec of two modalities with changes of either."""

    def make() -> ModelSpec:
        return ModelSpec("w", make_first(**(first or {})), make_second(**changes))

    return make


def prompt(rewrite: Any) -> Maker:
    def make() -> ModelSpec:
        return ModelSpec("w", make_first(), prompt=rewrite)

    return make


def with_derived(value: Any, **options: Any) -> Maker:
    return alone(fields={"x": batched(), "n": derived(value, **options)})


def make_model_named_class() -> ModelSpec:
    return ModelSpec("class", make_first())


# -- functions of items ------------------------------------------------------------------------------------------------

_calls: list[int] = []
_by_length: dict[int, Any] = {}
_before: list[Any] = []


def add_the_number_of_calls(items: Any) -> Any:
    _calls.append(0)
    return [value + len(_calls) for value in items]


def remember_by_length(items: Any) -> Any:
    return [_by_length.setdefault(len(value), value) for value in items]


def return_the_item_before(items: Any) -> Any:
    values = []
    for value in items:
        has_other = _before and _before[-1].shape == value.shape
        values.append(_before[-1] if has_other else value)
    _before.append(items[-1].clone())
    return values


def add_noise(items: Any) -> Any:
    return [value + torch.rand(1) for value in items]


def reverse(items: Any) -> Any:
    return list(items)[::-1]


def sort_by_length(items: Any) -> Any:
    return sorted(items, key=len)


def pad_to_longest(items: Any) -> Any:
    longest = max(len(value) for value in items)
    return [pad(value, (0, 0, 0, longest - len(value))) for value in items]


def divide_by_largest(items: Any) -> Any:
    largest = torch.cat(list(items)).abs().max().clamp(min=1e-3)
    return [value / largest for value in items]


def repeat_the_first(items: Any) -> Any:
    return [items[0]] * len(items)


def double_in_place(items: Any) -> Any:
    for value in items:
        value.mul_(2)
    return items


def generate(items: Any) -> Any:
    return (value for value in items)


def convert_to_arrays(items: Any) -> Any:
    return [value.numpy() for value in items]


def list_twice(items: Any) -> Any:
    return [[value, value] for value in items]


def return_the_first(items: Any) -> Any:
    return items[:1]


def convert_to_parameters(items: Any) -> Any:
    return [torch.nn.Parameter(value) for value in items]


def convert_to_float16(items: Any) -> Any:
    return [value.half() for value in items]


def divide_by_zero(items: Any) -> Any:
    return [value / 0 for value in items]


# -- functions of a scope ----------------------------------------------------------------------------------------------


def lay_out_at_random(scope: Any) -> Any:
    return embed(scope.tok["<pad>"]) * random.randint(1, 3)


def lay_out_two_rows_at_most(scope: Any) -> Any:
    return embed(scope.tok["<pad>"]) * min(scope.item.length, 2)


def reverse_prompt(scope: Any) -> Any:
    return scope.prompt[::-1]


def cut_prompt(scope: Any) -> Any:
    return scope.prompt[:1]


def add_target(scope: Any) -> Any:
    return list(scope.prompt) + [scope.tok["<frame>"]]


def add_word(scope: Any) -> Any:
    return [scope.tok["a"]] + list(scope.prompt)


# -- the table ---------------------------------------------------------------------------------------------------------

RIGHT = "right"
UNUSED = "unused"


@dataclass(frozen=True)
class Case:
    """One spec.

    Attributes:
        name: what is odd in it.
        make: makes it.
        verdict: words of the refusal; ``law NAME``; `RIGHT`: all laws of `RULES` hold, with the reason why that is
            right in `why`; `UNUSED`: it takes no items.
        why: for a spec that is right.
    """

    name: str
    make: Callable[[], ModelSpec]
    verdict: str
    why: str = ""


DIFFERS_BESIDE_OTHERS = "different values when other items were beside it"
DIFFERS_NEXT_TIME = "different values when it was processed again"
X = tok["<pad>"]
TARGET = tok["<frame>"]

CASES = [
    Case("counts its calls", of(add_the_number_of_calls), DIFFERS_NEXT_TIME),
    Case("adds noise", of(add_noise), DIFFERS_NEXT_TIME),
    Case("reverses the items", of(reverse), DIFFERS_BESIDE_OTHERS),
    Case("sorts the items", of(sort_by_length), DIFFERS_BESIDE_OTHERS),
    Case("pads to the batch", of(pad_to_longest), DIFFERS_BESIDE_OTHERS),
    Case("divides by the batch", of(divide_by_largest), DIFFERS_BESIDE_OTHERS),
    Case("the first for all", of(repeat_the_first), DIFFERS_BESIDE_OTHERS),
    Case("works in place", of(double_in_place), "leave the items as they are"),
    Case("returns a generator", of(generate), "got generator"),
    Case("returns arrays", of(convert_to_arrays), "got a numpy.ndarray"),
    Case(
        "returns lists of tensors",
        of(list_twice),
        RIGHT,
        "vLLM sends such lists",
    ),
    Case("returns one of several", of(return_the_first), "expected 3 items along the first dimension"),
    Case("returns parameters", of(convert_to_parameters), RIGHT, "vLLM sends the values"),
    Case("returns float16", of(convert_to_float16), RIGHT, "the spec states no dtype"),
    Case("returns no finite value", of(divide_by_zero), "finite values"),
    Case("keeps results by length", of(remember_by_length), "those of an earlier item of the same sizes"),
    Case("returns the item before", of(return_the_item_before), DIFFERS_NEXT_TIME),
    Case("a layout at random", alone(layout=lay_out_at_random), "the same layout"),
    Case(
        "a layout of two rows at most",
        alone(layout=lay_out_two_rows_at_most),
        RIGHT,
        "the encoder may return as few",
    ),
    Case("the target is another's placeholder", two(update=replace(X)), "no placeholder of another modality"),
    Case(
        "another's placeholder in the layout", two(layout=embed(tok["<row>"]) + X), "no placeholder of another modality"
    ),
    Case(
        "the target in its own layout",
        alone(layout=TARGET + embed(X) * item.length),
        RIGHT,
        "as in many models",
    ),
    Case(
        "another's target in the layout",
        two({"layout": tok["<series>"] + embed(X)}),
        RIGHT,
        "an expanded prompt tells it from an item",
    ),
    Case(
        "the target at both ends",
        alone(layout=TARGET + embed(X) * item.length + TARGET),
        RIGHT,
        "as in many models",
    ),
    Case(
        "a flat field of the item itself",
        alone(fields={"x": flat(item.length)}),
        RIGHT,
        "rows one after another",
    ),
    Case("a field derived of a shape", with_derived(fields.x.shape[0]), RIGHT, "the item's own"),
    Case("an integer of half a number", with_derived(item.length / 2, dtype="int64"), "numbers that int64 holds"),
    Case("an integer that overflows", with_derived(item.length * 200, dtype="uint8"), "numbers for a uint8 tensor"),
    Case(
        "rows by values",
        alone(item=Tensor((2,), "int64", bound=between(1, 4)), layout=embed(X) * fields.x[0]),
        "the most encoder rows for the largest item",
    ),
    Case("a prompt in reverse", prompt(reverse_prompt), "law idempotence"),
    Case("a prompt of one token", prompt(cut_prompt), "law ranges"),
    Case("a prompt with a target more", prompt(add_target), "law ranges"),
    Case("a prompt that grows", prompt(add_word), "law idempotence"),
    Case("an end that is a target", prompt(ending_with(TARGET)), "law ranges"),
    Case("an end that is a placeholder", prompt(ending_with(X)), "ids that are no placeholder"),
    Case("no items at all", alone(limit=0), UNUSED),
    Case("fewer items than none", alone(limit=-1), "a whole number >= 0"),
    Case("one and a half items", alone(limit=1.5), "a whole number >= 0"),
    Case("true items", alone(limit=True), "a whole number >= 0"),
    Case(
        "the target is the unknown token",
        alone(update=replace(tok["<unk>"])),
        "every word that the tokenizer does not know",
    ),
    Case("the target is the end", alone(update=replace(tok["</s>"])), RIGHT, "items stand where turns end"),
    Case("the target is the begin", alone(update=replace(tok["<s>"])), RIGHT, "the first item stands first"),
    Case("inserted after its placeholder", alone(update=insert(after=X)), "ids that are no placeholder"),
    Case(
        "inserted after a long text",
        alone(update=insert(after=tok.text("a b c A B C"))),
        RIGHT,
        "other prompts are refused",
    ),
    Case(
        "two at the start",
        two({"update": insert(at="start")}, update=insert(at="start")),
        RIGHT,
        "in the order of the spec",
    ),
    Case(
        "numbered by words",
        alone(update=replace(literal(20 + item.index)), limit=4),
        RIGHT,
        "an item stands at its word",
    ),
    Case(
        "a target that begins another",
        two({"update": replace(tok.text("a b"))}, update=replace(tok.text("a b c"))),
        "law ranges",
    ),
    Case("a target twice", two({"update": replace(tok.text("a"))}, update=replace(tok.text("a a"))), "law ranges"),
    Case("two fields of one name", two(fields={"x": batched()}), "one field named 'x'"),
    Case(
        "a field named as a modality's",
        two({"fields": {"s": batched()}}),
        "one field named 's'",
    ),
    Case("a model named class", make_model_named_class, RIGHT, "its classes have other names"),
    Case(
        "a modality named as embeddings",
        two({"embeds": True, "layout": embed(X) * 2}, name="x_embeds"),
        "x_embeds",
    ),
]

NAMES_OF_MODALITIES = [
    "self",
    "input_ids",
    "text",
    "class",
    "labels",
    "answer",
    "padding",
    "attention_mask",
    "placeholders",
]
"""Names that something else has where modalities are used."""

NAMES_OF_FIELDS = ["input_ids", "inputs_embeds"]
"""Names that something else has where fields are used."""


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_what_comes_of_a_spec(case: Case) -> None:
    if case.verdict in (RIGHT, UNUSED) or case.verdict.startswith("law "):
        _check_verdict(case)
        return
    with pytest.raises(SpecError) as refusal:
        of_spec(case.make(), checkpoint())
    assert case.verdict in str(refusal.value), str(refusal.value)


def _check_verdict(case: Case) -> None:
    """Check the verdict of a spec that binds."""
    subject = of_spec(case.make(), checkpoint())
    if case.verdict == UNUSED:
        with pytest.raises(NotDrawn):
            check_law("ranges", subject, examples=1)
    elif case.verdict == RIGHT:
        assert case.why
        for law in RULES:
            sentence = violation(law, subject, scaled(8))
            assert sentence is None, sentence
    else:
        law = case.verdict.removeprefix("law ")
        sentence = violation(law, subject, NUM_REQUESTS)
        assert sentence is not None, f"{law} does not see it"
        assert sentence.startswith(f"{law}: ")


@pytest.mark.parametrize("name", NAMES_OF_MODALITIES)
def test_names_of_modalities_that_something_else_has_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match="a name that nothing else has"):
        ModelSpec("w", make_first(name))


@pytest.mark.parametrize("name", NAMES_OF_FIELDS)
def test_names_of_fields_that_something_else_has_are_refused(name: str) -> None:
    def process(items: Any, scope: Any) -> dict[str, Any]:
        return {name: items}

    with pytest.raises(SpecError, match="a name that nothing else has"):
        ModelSpec("w", make_first(fields={name: batched()}, process=process))


def test_a_modality_may_be_named_positions() -> None:
    """The encoder gets its field by name; `forward` has no such argument of items with placeholders."""
    subject = of_spec(ModelSpec("w", make_first("positions")), checkpoint())
    assert violation("ranges", subject, scaled(8)) is None


def test_there_are_64_specs() -> None:
    assert len(CASES) + len(NAMES_OF_MODALITIES) + len(NAMES_OF_FIELDS) + 1 == 64
