"""How a law says that it was asked about nothing, and that it broke. What laws find is in test_planted_bugs.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, find, reject, settings
from hypothesis import strategies as st

from examples.terra import CHECKPOINT
from examples.terra.spec import TERRA
from mmkit import (
    Audio,
    Image,
    Modality,
    ModelSpec,
    Record,
    Tensor,
    Text,
    Video,
    batched,
    between,
    derived,
    embed,
    fields,
    flat,
    item,
    literal,
    replace,
    testing,
    tok,
    where,
)
from mmkit.expr import Scope
from mmkit.items import ItemType
from mmkit.testing import (
    LAWS,
    Case,
    KitError,
    Law,
    NotApplicable,
    NotDrawn,
    Violation,
    check_law,
    of_spec,
    strategies,
)
from tests import random_specs
from tests.profiles import scaled

ALPHA = Modality(
    "alpha",
    item=Tensor(shape=(2, 3)),
    layout=embed(tok["<alpha_embed>"]) * 2,
    update=replace(tok["<alpha>"]),
    fields={"alpha_data": batched()},
)


def bundled(items: Any, scope: Any) -> dict[str, Any]:
    """A function gets records as dicts, and texts. The sensor that began first comes first."""
    return {
        "beta_data": torch.cat([one["motion"] for one in items]),
        "force": [one["force"] for one in items],
        "name": [torch.tensor([ord(letter) for letter in one["name"]]) for one in items],
        "order": torch.stack([one["begin"].argsort(stable=True) for one in items]),
    }


MOTION = literal(tok["<beta_close>"]) + embed(tok["<beta_embed>"]) * item.motion.length
FORCE = embed(tok["<beta_embed>"]) * item.force.length

PARTS = ModelSpec(  # a graph with a value per node, a bundle of sensors by time
    "parts",
    Modality(
        "alpha",
        item=Record(
            nodes=Tensor((between(1, 5),), "int64"),
            values=Tensor((item.nodes.length, 2)),
            edges=Tensor((between(0, 6), 2), "int64", bound=between(0, item.nodes.length - 1)),
        ),
        layout=embed(tok["<alpha_embed>"]) * item.nodes.length,
        update=replace(tok["<alpha>"]),
        fields={
            "nodes": flat(item.nodes.length),
            "values": batched(),
            "edges": batched(),
            "count": derived(item.nodes.length, dtype="int64"),
        },
        embeds=embed(tok["<alpha_embed>"]) * item.rows,
    ),
    Modality(
        "beta",
        item=Record(
            begin=Tensor((2,), "int64", bound=between(0, 9)),
            motion=Tensor((between(1, 4), 3)),
            force=Tensor((between(1, 3),)),
            name=Text(most=6),
        ),
        layout=tok["<beta_open>"] + where(fields.order[0] == 0, MOTION + FORCE, FORCE + MOTION),
        update=replace(tok["<beta>"]),
        fields={
            "beta_data": flat(item.motion.length),
            "force": batched(),
            "name": batched(dtype="int64"),
            "order": batched(shape=(2,), dtype="int64"),
            "length": derived(item.motion.length, dtype="int64"),
        },
        process=bundled,
    ),
)


ABOUT_OTHERS = ("reference", "positions", "outputs")


@pytest.mark.parametrize("number", [n for n, law in LAWS.items() if not law.needs_model and n not in ABOUT_OTHERS])
def test_items_of_parts(number: str) -> None:
    check_law(number, of_spec(PARTS, random_specs.checkpoint()), examples=scaled(25))


UNSHRUNK = settings(phases=[Phase.generate], max_examples=2000, database=None)
"""Whether there is an example is the question."""


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        (Image(largest=(200, 100)), {"width": 200, "height": 100}),
        (Video(largest=(4, 28, 28)), {"frames": 4, "width": 28, "height": 28}),
        (Audio(largest=1600, most=3200, rate=16000), {"length": 3200}),
    ],
)
def test_drawn_sizes_reach_both_ends(kind: Any, most: dict[str, int]) -> None:
    bound = kind.bind(Scope())
    drawn = strategies.items(bound)

    def size(sample: Any, name: str) -> int:
        return getattr(bound.facts(bound.canonical(sample.value(), "item"), 0), name)

    for name, last in most.items():
        for end in (1, 2, last - 1, last):
            assert find(drawn, lambda sample, name=name, end=end: size(sample, name) == end, settings=UNSHRUNK)


def nothing_to_say(case: Case) -> None:
    case.draw_request()
    reject()


def rarely(case: Case) -> None:
    assume(case.draw(st.integers(0, 10**6)) % 97 == 5)


def breaking(case: Case) -> None:
    raise RuntimeError("broken")


def of_the_processor(case: Case) -> None:
    case.draw_request()
    case.subject.processor.apply(None, None)


@pytest.mark.parametrize(
    ("check", "kind", "sentence"),
    [
        (nothing_to_say, NotDrawn, r"none of \d+ drawn requests is one about which this law says anything"),
        (rarely, NotDrawn, r"(holds on \d|none) of \d+ drawn requests"),
        (breaking, KitError, "none: RuntimeError: broken"),
        (of_the_processor, Violation, r"none: AttributeError: 'NoneType' object.*\n    in Request\("),
    ],
)
def test_a_law(check: Any, kind: type[Exception], sentence: str) -> None:
    subject = testing.of_spec(ModelSpec("one", ALPHA), random_specs.checkpoint())
    with pytest.raises(kind) as verdict:
        testing.check_law(Law("none", "", check), subject, examples=5, database=False)
    assert re.match(sentence, str(verdict.value))


def test_a_field_that_an_option_contradicts() -> None:
    """The spec is at fault, not the request: such a request is no refused one."""

    def cut(items: Any, scope: Any) -> dict[str, Any]:
        return {"alpha_data": torch.stack(items)[..., : scope.kwargs.get("length")]}

    alpha = ALPHA.model_copy(update={"fields": {"alpha_data": batched(shape=(2, 3))}, "process": cut})
    options = st.sampled_from([{}, {"length": 2}])
    subject = testing.of_spec(ModelSpec("one", alpha), random_specs.checkpoint(), kwargs=options)
    with pytest.raises(Violation) as verdict:
        testing.check_law("cache", subject, examples=20, database=False)
    assert re.fullmatch(
        r"cache: SpecError: one\.alpha, fields\['alpha_data'\]: item 0: expected shape \(2, 3\) per item, "
        r"got \(2, 2\)\.\n    in the processing of alpha: .*, mm_processor_kwargs \{'length': 2\}",
        str(verdict.value),
    )


def test_embeddings_that_a_registered_processor_refuses() -> None:
    samples = {"actions": strategies.items(testing.of_spec(TERRA, CHECKPOINT).plan.modalities["actions"].item)}
    with pytest.raises(NotApplicable, match=r"^embeddings are refused: terra\.actions\[0\]: expected a \(6, 3\) "):
        testing.check_law("embeds", testing.of_registered(CHECKPOINT, samples=samples), examples=5, database=False)


def test_items_without_a_strategy() -> None:
    class Odd(ItemType):
        expected = "something odd"

    with pytest.raises(TypeError) as refused:
        strategies.items(Odd())
    assert str(refused.value) == (
        "items(): expected one of mmkit's item types, got Odd. Give samples= a strategy for its modality."
    )
