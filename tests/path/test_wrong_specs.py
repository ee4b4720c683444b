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

FEW = 30
"""Drawn requests for a law that catches a spec."""

RULES = ("ranges", "independence", "worst_case", "idempotence")
"""The laws that hold for a spec that is right."""


def part(name: str = "x", target: str = "<frame>", placeholder: str = "<pad>", **changes: Any) -> Modality:
    options: dict[str, Any] = {
        "item": PAIRS,
        "layout": embed(tok[placeholder]) * item.length,
        "update": replace(tok[target]),
        "fields": {name: batched()},
        **changes,
    }
    return Modality(name, **options)


def other(**changes: Any) -> Modality:
    return part(**{"name": "s", "target": "<series>", "placeholder": "<row>", **changes})


def one(**changes: Any) -> Callable[[], ModelSpec]:
    """A spec of one modality with some changes."""
    return lambda: ModelSpec("w", part(**changes))


def of(process: Callable[..., Any]) -> Callable[[], ModelSpec]:
    """A spec with a function of the items alone."""
    return one(process=lambda items, scope: {"x": process(items)})


def two(first: dict[str, Any] | None = None, **changes: Any) -> Callable[[], ModelSpec]:
    """A spec of two modalities with changes of either."""
    return lambda: ModelSpec("w", part(**(first or {})), other(**changes))


def prompt(rewrite: Any) -> Callable[[], ModelSpec]:
    return lambda: ModelSpec("w", part(), prompt=rewrite)


def with_derived(value: Any, **options: Any) -> Callable[[], ModelSpec]:
    return one(fields={"x": batched(), "n": derived(value, **options)})


# -- functions with a memory -------------------------------------------------------------------------------------------

_calls: list[int] = []
_by_length: dict[int, Any] = {}
_before: list[Any] = []


def with_the_number_of_calls(items: Any) -> Any:
    _calls.append(0)
    return [value + len(_calls) for value in items]


def kept_by_length(items: Any) -> Any:
    return [_by_length.setdefault(len(value), value) for value in items]


def of_the_call_before(items: Any) -> Any:
    made = [_before[-1] if _before and _before[-1].shape == value.shape else value for value in items]
    _before.append(items[-1].clone())
    return made


def in_place(items: Any) -> Any:
    for value in items:
        value.mul_(2)
    return items


def padded(items: Any) -> Any:
    most = max(map(len, items))
    return [pad(value, (0, 0, 0, most - len(value))) for value in items]


def divided(items: Any) -> Any:
    return [value / torch.cat(list(items)).abs().max().clamp(min=1e-3) for value in items]


# -- the table ---------------------------------------------------------------------------------------------------------

RIGHT, UNUSED = "right", "unused"


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


OTHERS = "different values when other items were beside it"
AGAIN = "different values when it was processed again"
X, TARGET = tok["<pad>"], tok["<frame>"]

CASES = [
    Case("counts its calls", of(with_the_number_of_calls), AGAIN),
    Case("adds noise", of(lambda items: [value + torch.rand(1) for value in items]), AGAIN),
    Case("reverses the items", of(lambda items: list(items)[::-1]), OTHERS),
    Case("sorts the items", of(lambda items: sorted(items, key=len)), OTHERS),
    Case("pads to the batch", of(padded), OTHERS),
    Case("divides by the batch", of(divided), OTHERS),
    Case("the first for all", of(lambda items: [items[0]] * len(items)), OTHERS),
    Case("works in place", of(in_place), "leave the items as they are"),
    Case("returns a generator", of(lambda items: (value for value in items)), "got generator"),
    Case("returns arrays", of(lambda items: [value.numpy() for value in items]), "got a numpy.ndarray"),
    Case(
        "returns lists of tensors",
        of(lambda items: [[value, value] for value in items]),
        RIGHT,
        "vLLM sends such lists",
    ),
    Case("returns one of several", of(lambda items: items[:1]), "expected 3 items along the first dimension"),
    Case(
        "returns parameters", of(lambda items: [torch.nn.Parameter(v) for v in items]), RIGHT, "vLLM sends the values"
    ),
    Case("returns float16", of(lambda items: [value.half() for value in items]), RIGHT, "the spec states no dtype"),
    Case("returns no finite value", of(lambda items: [value / 0 for value in items]), "finite values"),
    Case("keeps results by length", of(kept_by_length), "those of an earlier item of the same sizes"),
    Case("returns the item before", of(of_the_call_before), AGAIN),
    Case("a layout at random", one(layout=lambda s: embed(s.tok["<pad>"]) * random.randint(1, 3)), "the same layout"),
    Case(
        "a layout of two rows at most",
        one(layout=lambda s: embed(s.tok["<pad>"]) * min(s.item.length, 2)),
        RIGHT,
        "the encoder may return as few",
    ),
    Case("the target is another's placeholder", two(update=replace(X)), "no placeholder of another modality"),
    Case(
        "another's placeholder in the layout", two(layout=embed(tok["<row>"]) + X), "no placeholder of another modality"
    ),
    Case("the target in its own layout", one(layout=TARGET + embed(X) * item.length), RIGHT, "as in many models"),
    Case(
        "another's target in the layout",
        two({"layout": tok["<series>"] + embed(X)}),
        RIGHT,
        "an expanded prompt tells it from an item",
    ),
    Case("the target at both ends", one(layout=TARGET + embed(X) * item.length + TARGET), RIGHT, "as in many models"),
    Case("a flat field of the item itself", one(fields={"x": flat(item.length)}), RIGHT, "rows one after another"),
    Case("a field derived of a shape", with_derived(fields.x.shape[0]), RIGHT, "the item's own"),
    Case("an integer of half a number", with_derived(item.length / 2, dtype="int64"), "numbers that int64 holds"),
    Case("an integer that overflows", with_derived(item.length * 200, dtype="uint8"), "numbers for a uint8 tensor"),
    Case(
        "rows by values",
        one(item=Tensor((2,), "int64", bound=between(1, 4)), layout=embed(X) * fields.x[0]),
        "the most encoder rows for the largest item",
    ),
    Case("a prompt in reverse", prompt(lambda s: s.prompt[::-1]), "law idempotence"),
    Case("a prompt of one token", prompt(lambda s: s.prompt[:1]), "law ranges"),
    Case("a prompt with a target more", prompt(lambda s: [*s.prompt, s.tok["<frame>"]]), "law ranges"),
    Case("a prompt that grows", prompt(lambda s: [s.tok["a"], *s.prompt]), "law idempotence"),
    Case("an end that is a target", prompt(ending_with(TARGET)), "law ranges"),
    Case("an end that is a placeholder", prompt(ending_with(X)), "ids that are no placeholder"),
    Case("no items at all", one(limit=0), UNUSED),
    Case("fewer items than none", one(limit=-1), "a whole number >= 0"),
    Case("one and a half items", one(limit=1.5), "a whole number >= 0"),
    Case("true items", one(limit=True), "a whole number >= 0"),
    Case(
        "the target is the unknown token",
        one(update=replace(tok["<unk>"])),
        "every word that the tokenizer does not know",
    ),
    Case("the target is the end", one(update=replace(tok["</s>"])), RIGHT, "items stand where turns end"),
    Case("the target is the begin", one(update=replace(tok["<s>"])), RIGHT, "the first item stands first"),
    Case("inserted after its placeholder", one(update=insert(after=X)), "ids that are no placeholder"),
    Case(
        "inserted after a long text",
        one(update=insert(after=tok.text("a b c A B C"))),
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
        "numbered by words", one(update=replace(literal(20 + item.index)), limit=4), RIGHT, "an item stands at its word"
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
        lambda: ModelSpec("w", part(fields={"s": batched()}), other()),
        "one field named 's'",
    ),
    Case("a model named class", lambda: ModelSpec("class", part()), RIGHT, "its classes have other names"),
    Case(
        "a modality named as embeddings",
        lambda: ModelSpec("w", part(embeds=True, layout=embed(X) * 2), other(name="x_embeds")),
        "x_embeds",
    ),
]

NAMES = [
    *("self", "input_ids", "text", "class", "labels", "answer", "padding", "attention_mask", "placeholders"),
    *("fields input_ids", "fields inputs_embeds"),
]
"""Of modalities, and of fields: names that something else has where they are used."""


def named(name: str) -> ModelSpec:
    *is_field, name = name.split()
    if not is_field:
        return ModelSpec("w", part(name))
    return ModelSpec("w", part(fields={name: batched()}, process=lambda items, scope: {name: items}))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_comes_of_a_spec(case: Case) -> None:
    if case.verdict in (RIGHT, UNUSED) or case.verdict.startswith("law "):
        _check_verdict(case)
        return
    with pytest.raises(SpecError) as refusal:
        of_spec(case.make(), checkpoint())
    assert case.verdict in str(refusal.value), str(refusal.value)


def _check_verdict(case: Case) -> None:
    """That of a spec that binds."""
    subject = of_spec(case.make(), checkpoint())
    if case.verdict == UNUSED:
        with pytest.raises(NotDrawn):
            check_law("ranges", subject, examples=1)
    elif case.verdict == RIGHT:
        assert case.why
        for law in RULES:
            said = violation(law, subject, scaled(8))
            assert said is None, said
    else:
        law = case.verdict.removeprefix("law ")
        said = violation(law, subject, FEW)
        assert said is not None, f"{law} does not see it"
        assert said.startswith(f"{law}: ")


@pytest.mark.parametrize("name", NAMES)
def test_names_that_something_else_has_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match="a name that nothing else has"):
        named(name)


def test_a_modality_may_be_named_positions() -> None:
    """The encoder gets its field by name; `forward` has no such argument of items with placeholders."""
    subject = of_spec(named("positions"), checkpoint())
    assert violation("ranges", subject, scaled(8)) is None


def test_there_are_64_specs() -> None:
    assert len(CASES) + len(NAMES) + 1 == 64
