"""Lists of items, records in records, and parts that may be absent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage

from mmkit import (
    Image,
    InputError,
    List,
    ModelSpec,
    Record,
    SpecError,
    Tensor,
    Text,
    Video,
    batched,
    between,
    each,
    embed,
    item,
    optional,
    replace,
    tok,
    where,
)
from mmkit.language.expr import Scope
from mmkit.plan.hashes import ItemHasher
from mmkit.plan.outline import ListFacts, RecordFacts, TensorFacts, TextFacts
from mmkit.serve.description import describe_modality
from mmkit.testing import items
from mmkit.testing.strategies import RecordSample
from mmkit.wire.items import Decoder, Media, encode_value
from mmkit.wire.limits import Limits, TooLarge
from tests.profiles import scaled

from .common import CONFIG, Tokenizer, expect_refusal, get_outcome, make_modality

SCOPE = Scope(cfg=CONFIG)
PLACE = "spec.m[3]"
TARGET = 7

NOTE = Record(text=Text(8, alphabet="abcd"), weights=Tensor((between(1, 3),)), scale=optional(Tensor((), bound=2.0)))
"""A text, some weights, and perhaps their scale."""

CASE = Record(
    age=Tensor((), "int64", bound=between(0, 9)),
    notes=List(NOTE, most=3, least=0),
    doctor=optional(Record(name=Text(5, alphabet="Eve"), codes=Tensor((between(1, 2),), "int64"))),
)

LAYOUT = (
    embed(5)
    + each(
        item.notes.elements,
        lambda x: tok.text("{}", x.text.text) + embed(5) * x.weights.length + where(x.scale, 99, []),
    )
    + where(item.doctor, tok.text("({})", item.doctor.name.text), embed(5))
)


def sum_up(values: Any, scope: Scope) -> dict[str, Any]:
    """Return a number for each encoder row of a case."""
    rows = []
    for value in values:
        parts = [value["age"].float().reshape(1)]
        for note in value["notes"]:
            parts.append(note["weights"] * (1.0 if note["scale"] is None else note["scale"]))
        if value["doctor"] is None:
            parts.append(torch.zeros(1))
        rows.append(torch.cat(parts))
    return {"rows": rows}


def make_spec(**options: Any) -> ModelSpec:
    declared: dict[str, Any] = dict(
        item=CASE, layout=LAYOUT, update=replace(TARGET), fields={"rows": batched()}, process=sum_up
    )
    return ModelSpec("spec", make_modality(**{**declared, **options}))


PLAN = make_spec().bind(CONFIG, Tokenizer())
KIND = PLAN.modalities["m"].item
FULL: dict[str, Any] = {
    "age": 4,
    "notes": [{"text": "ab", "weights": [1.0, 2.0]}, {"text": "c", "weights": [3.0], "scale": 0.5}],
    "doctor": {"name": "Eve", "codes": [1]},
}


# -- what a caller sends ---------------------------------------------------------------------------


def bind_list(element: Any, most: int = 3, least: int = 0) -> List:
    return List(element, most, least).bind(SCOPE)


WORDS = bind_list(Text(3))
SERIES = bind_list(Tensor((between(0, 4),)))
NUMBERS = bind_list(Tensor(()))
PAIRS = bind_list(Record(a=Tensor(())))
PICTURES = bind_list(Image((8, 8)))
FILMS = bind_list(Video((2, 8, 8)))
NESTED = bind_list(List(Text(3), 2))
PICTURE = PILImage.new("RGB", (3, 2))
FRAMES = np.zeros((2, 4, 5, 3), np.uint8)


@pytest.mark.parametrize(
    ("kind", "single", "several"),
    [
        (WORDS, ["a", "bc"], [["a"], ["b", "c"]]),
        (WORDS, ("a",), (["a"], [])),
        (SERIES, [[1.0, 2.0], [3.0]], [[[1.0, 2.0], [3.0]], [[4.0]]]),
        (SERIES, [np.ones(2), torch.ones(3)], [[np.ones(2)], []]),
        (SERIES, np.ones((2, 4)), np.ones((2, 3, 4))),
        (SERIES, torch.ones(2, 4), [torch.ones(2, 4), torch.ones(1, 3)]),
        (NUMBERS, [1.0, 2], [[1.0], [2.0, 3.0]]),
        (PAIRS, [{"a": 1.0}], [[{"a": 1.0}], [{"a": 2.0}]]),
        (PICTURES, [PICTURE, PICTURE], [[PICTURE], [PICTURE, PICTURE]]),
        (PICTURES, FRAMES, [FRAMES, FRAMES]),
        (FILMS, [FRAMES, FRAMES], [[FRAMES], [FRAMES]]),
        (NESTED, [["a"], ["b", "c"]], [[["a"]], [["b"], ["c"]]]),
    ],
)
def test_a_list_of_elements_is_one_item_and_a_list_of_lists_several(kind: List, single: Any, several: Any) -> None:
    assert len(kind.split(single, PLACE)) == 1
    assert len(kind.split([single], PLACE)) == 1
    assert len(kind.split([single, None], PLACE)) == 2
    assert len(kind.split(several, PLACE)) == len(several)
    for value in (*kind.split(single, PLACE), *kind.split(several, PLACE)):
        canonical = kind.canonical(value, PLACE)
        assert type(canonical) is list
        assert len(canonical) == len(value)
    assert kind.split([], PLACE) == []
    assert kind.split([[]], PLACE) == [[]]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"notes": "ab"}, ".notes: expected a list of 0..3 elements, each …, got str 'ab'."),
        ({"notes": np.zeros(())}, ".notes: expected a list of 0..3 elements, each …, got ndarray array(0.)."),
        ({"notes": FULL["notes"] * 2}, ".notes: expected a list of 0..3 elements, each …, got 4 of them."),
        ({"notes": [None]}, ".notes[0]: expected a dict of text and weights and perhaps scale, got None.…"),
        ({"notes": [{"text": "a"}]}, ".notes[0]: expected a dict of …, got one of ['text']."),
        ({"notes": [{"text": "a", "weights": []}]}, ".notes[0].weights: expected a (1..3,) float32 tensor, got …"),
        (
            {"notes": [*FULL["notes"], {"text": "a", "weights": [1.0], "scale": 3}]},
            ".notes[2].scale: expected finite values of magnitude <= 2, got 3. Check the units.",
        ),
        ({"doctor": "Eve"}, ".doctor: expected a dict of name and codes, got str 'Eve'.…"),
        ({"doctor": {"name": "Eve"}}, ".doctor: expected a dict of name and codes, got one of ['name']."),
        ({"nurse": 1}, ": expected a dict of age and notes and perhaps doctor, got one of …"),
        ({"age": None}, ".age: expected a () int64 tensor, got None."),
    ],
    ids=str,
)
def test_what_is_malformed_is_refused_by_its_path(change: dict[str, Any], sentence: str) -> None:
    expect_refusal(InputError, PLACE + sentence, KIND.canonical, {**FULL, **change}, PLACE)


def test_a_part_that_is_absent_is_missing_or_none() -> None:
    without = {name: part for name, part in FULL.items() if name != "doctor"}
    canonical = KIND.canonical({**FULL, "doctor": None}, PLACE)
    assert list(canonical) == ["age", "notes", "doctor"]
    assert canonical["doctor"] is None
    assert canonical["notes"][0]["scale"] is None
    assert HASHER.hash_content(KIND.canonical(without, PLACE)) == HASHER.hash_content(canonical)
    sentence = f"{PLACE}: expected a dict of age and notes and perhaps doctor, got one of ['doctor']."
    assert get_outcome(KIND.canonical, {"doctor": FULL["doctor"]}, PLACE) == sentence


def test_nothing_of_a_caller_stays_in_a_list() -> None:
    values = [np.ones(2, np.float32), torch.ones(3)]
    canonical = SERIES.canonical(values, PLACE)
    values[0][:] = 9
    values[1].fill_(9)
    assert [part.tolist() for part in canonical] == [[1, 1], [1, 1, 1]]


# -- sizes and facts -------------------------------------------------------------------------------


@settings(max_examples=scaled(12))
@given(st.data())
def test_what_mmkit_makes_and_draws_is_accepted_and_has_its_sizes(data: Any) -> None:
    kind = data.draw(st.sampled_from([KIND, WORDS, SERIES, NUMBERS, PAIRS, NESTED]))
    largest = kind.candidates()
    values = [*largest, *kind.small(), *kind.smallest(), *kind.candidates(data.draw(st.floats(0, 1)))]
    bounds = [data.draw(st.integers(0, 5)) for _ in range(kind.num_sizes)]
    values += kind.candidates(most=bounds)
    values.append(kind.random(bounds, np.random.default_rng(0)))
    sample = data.draw(items(kind))
    values.append(kind.canonical(sample.value(), PLACE))
    for value in values:
        canonical = kind.canonical(value, PLACE)
        sizes = kind.sizes(canonical)
        assert len(sizes) == kind.num_sizes
        # one of the largest items has each size at its most
        assert any(all(size <= most for size, most in zip(sizes, kind.sizes(big), strict=True)) for big in largest)
        assert kind.num_bytes(sizes) >= 0
    for form in sample.list_forms():
        assert HASHER.hash_content(kind.canonical(form, PLACE)) == HASHER.hash_content(values[-1])


def test_every_combination_of_absent_parts_is_among_the_largest() -> None:
    assert [candidate["doctor"] is None for candidate in KIND.candidates()] == [False, True, False, True]
    notes = [candidate["notes"] for candidate in KIND.candidates()]
    assert [len(of_case) for of_case in notes] == [3, 3, 3, 3]
    assert [note[0]["scale"] is None for note in notes] == [False, False, True, True]
    assert KIND.smallest() == [{"age": torch.tensor(0), "notes": [], "doctor": None}]


def test_a_function_of_elements_reads_their_facts() -> None:
    facts = KIND.facts(KIND.canonical(FULL, PLACE), 2)
    assert facts.index == 2
    assert facts.notes.length == 2
    assert [note.text.text for note in facts.notes.elements] == ["ab", "c"]
    assert [note.index for note in facts.notes.elements] == [0, 1]
    assert [bool(note.scale) for note in facts.notes.elements] == [False, True]
    assert facts.doctor.codes.shape == (1,)


def test_sizes_of_a_list_follow_from_a_part_before_it() -> None:
    kind = Record(
        series=Tensor((between(1, 3), 2)), names=List(Text(4), most=item.series.length, least=item.series.length)
    ).bind(SCOPE)
    assert kind.canonical({"series": [[1, 2]], "names": ["a"]}, PLACE)["names"] == ["a"]
    sentence = f"{PLACE}.names: expected a list of 1..1 elements, each a text of 1..4 characters, got 2 of them."
    assert get_outcome(kind.canonical, {"series": [[1, 2]], "names": ["a", "b"]}, PLACE) == sentence
    assert [len(record["names"]) for record in kind.candidates() + kind.small()] == [3, 1]


def test_in_a_record_in_a_record_item_is_the_inner_one() -> None:
    inner = Record(ids=Tensor((between(1, 3),), "int64"), values=Tensor((item.ids.length,)))
    kind = Record(ids=Tensor((2,)), cells=List(inner, most=2), cell=optional(inner)).bind(SCOPE)
    cell = {"ids": [1, 2, 3], "values": [0.0, 0.5, 1.0]}
    assert kind.canonical({"ids": [1, 2], "cells": [cell, cell], "cell": cell}, PLACE)["cell"]["values"].shape == (3,)
    wrong = {**cell, "values": [0.0]}
    sentence = f"{PLACE}.cells[1].values: expected a (3,) float32 tensor, got shape (1,)."
    assert get_outcome(kind.canonical, {"ids": [1, 2], "cells": [cell, wrong]}, PLACE) == sentence


# -- layouts ---------------------------------------------------------------------------------------


def spell(value: dict[str, Any]) -> list[int]:
    """Return the ids of a case, by plain Python."""
    ids = [5]
    for note in value["notes"]:
        ids += [ord(letter) for letter in note["text"]] + [5] * len(note["weights"])
        if note.get("scale") is not None:
            ids.append(99)
    if value.get("doctor") is None:
        return ids + [5]
    return ids + [ord(letter) for letter in f"({value['doctor']['name']})"]


@settings(max_examples=scaled(12))
@given(st.lists(items(KIND), min_size=1, max_size=3))
def test_a_layout_over_elements_and_absent_parts(samples: list[RecordSample]) -> None:
    values = [sample.value() for sample in samples]
    prompt = [TARGET] * len(values)
    expected = [token for value in values for token in spell(value)]
    data = {"m": values}
    ids = PLAN.expand(prompt, data)
    assert ids == expected
    assert PLAN.expand(ids, data) == ids
    assert PLAN.unexpand(ids, data) == prompt
    facts = {"m": [KIND.state_facts(KIND.canonical(value, PLACE)) for value in values]}
    rows = PLAN.outline(prompt, data).rows
    assert rows == {"m": [spell(value).count(5) for value in values]}
    message = get_outcome(PLAN.outline, prompt, facts)
    if any(value["notes"] for value in values):
        assert "expected the text, which a layout reads, got its length." in message


COUNTED = make_spec(
    layout=embed(5)
    + each(item.notes.elements, lambda x: embed(5) * x.weights.length)
    + where(item.doctor, [], embed(5))
).bind(CONFIG, Tokenizer())


@settings(max_examples=scaled(12))
@given(st.lists(items(KIND), min_size=1, max_size=3))
def test_facts_alone_tell_a_layout_that_reads_sizes(samples: list[RecordSample]) -> None:
    values = [sample.value() for sample in samples]
    facts = [KIND.state_facts(KIND.canonical(value, PLACE)) for value in values]
    outlines = [COUNTED.outline([TARGET] * len(values), {"m": data}) for data in (values, facts)]
    assert outlines[0].prompt_token_ids == outlines[1].prompt_token_ids
    assert outlines[0].rows == outlines[1].rows


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (RecordFacts({"age": TensorFacts(shape=())}), "spec.m[0]: expected facts of a dict of …, got ['age']."),
        (TextFacts(length=1), "spec.m[0]: expected RecordFacts, got TextFacts."),
        (
            RecordFacts({"age": TensorFacts(shape=()), "notes": ListFacts([TextFacts(length=1)])}),
            "spec.m[0].notes[0]: expected RecordFacts, got TextFacts.",
        ),
        (
            RecordFacts({"age": TensorFacts(shape=()), "notes": ListFacts([TextFacts(length=1)] * 4)}),
            "spec.m[0].notes: expected facts of a list of 0..3 elements, each …, got 4 of them.",
        ),
    ],
    ids=str,
)
def test_facts_of_no_list_are_refused(facts: Any, sentence: str) -> None:
    expect_refusal(InputError, sentence, COUNTED.outline, [TARGET], {"m": facts})


# -- hashes, documents, JSON -----------------------------------------------------------------------


class _Hasher(ItemHasher):
    def hash_content(self, value: Any) -> str:
        digest = self._hash_content("", value)
        assert digest is not None
        return digest


HASHER = _Hasher("sha256", "model")


def test_contents_that_differ_have_different_hashes() -> None:
    contents: list[Any] = [
        [],
        [[]],
        [[], []],
        ["a"],
        ["a", "b"],
        [["a"], ["b"]],
        [["a", "b"]],
        "a",
        None,
        [None],
        {"a": None},
        {"a": []},
        {"a": [None]},
        {"a": "a"},
        {"b": "a"},
        [torch.ones(2)],
        [torch.ones(1), torch.ones(1)],
    ]
    assert len({HASHER.hash_content(content) for content in contents}) == len(contents)


def test_a_document_has_lists_and_absent_parts() -> None:
    functions = {"m:sum_up": sum_up}
    document = make_spec().to_document(functions=functions)
    assert ModelSpec.from_document(document, functions=functions) == make_spec()
    description = describe_modality(PLAN.modalities["m"], 4)
    assert description.parts is not None
    assert description.parts["doctor"].optional
    assert description.parts["notes"].shape == [[0, 3]]
    assert description.parts["notes"].element is not None
    assert description.parts["notes"].element["parts"]["scale"]["optional"]
    assert description.item is not None


LIMITS = Limits(elements=100, items=100)


def decode(value: Any, kind: Any = KIND) -> Any:
    import msgspec

    raw = msgspec.Raw(msgspec.json.encode(encode_value(value, "items.m")))
    return Decoder(LIMITS).decode_items(raw, "items.m", kind, ["m_embeds"])


def test_lists_and_absent_parts_in_json() -> None:
    values = [FULL, {"age": 1, "notes": [], "doctor": None}]
    decoded = decode(values)
    for value, original in zip(decoded, values, strict=True):
        assert HASHER.hash_content(KIND.canonical(value, PLACE)) == HASHER.hash_content(KIND.canonical(original, PLACE))
    assert decode([["a", "b"], []], WORDS) == [["a", "b"], []]
    (array,) = decode([torch.ones(2, 3)], SERIES)
    assert SERIES.canonical(array, PLACE)[1].tolist() == [1, 1, 1]
    ((picture,),) = decode([[PICTURE]], PICTURES)
    assert isinstance(picture, Media)
    expect_refusal(InputError, "items.m[0]: expected array, got str.", decode, ["a"], WORDS)
    expect_refusal(InputError, "items.m[0][1]: expected …, got int.", decode, [["a", 1]], WORDS)
    expect_refusal(TooLarge, "items.m[0]: expected at most 100 …", decode, [["a"] * 101], WORDS)


# -- declarations that cannot work -----------------------------------------------------------------


def refuse_declaration(sentence: str, declare: Any) -> None:
    expect_refusal(SpecError, sentence, declare)


def test_declarations_that_cannot_work() -> None:
    pair = Tensor((2,))
    refuse_declaration(
        "List.element: expected an item type that is not optional, got optional(Tensor(shape=(2,))).",
        lambda: List(optional(pair), 2),
    )
    refuse_declaration("List.element: expected …, got 5.", lambda: List(5, 2))  # type: ignore[arg-type]
    refuse_declaration("optional(): expected an item type, got …", lambda: optional(optional(pair)))
    refuse_declaration("Record.a: expected an item type, got 3.", lambda: Record(a=3))  # type: ignore[arg-type]
    refuse_declaration(
        "List.least, List.most: expected whole numbers >= 0, in order, got 3..2.", lambda: List(pair, 2, 3).bind(SCOPE)
    )
    refuse_declaration(
        "List.largest: expected an item of at most 2 GiB, got …", lambda: List(pair, 1 << 30).bind(SCOPE)
    )
    refuse_declaration("List.element: Tensor.bound: …", lambda: List(Tensor((2,), bound=-1.0), 2).bind(SCOPE))
    many = {f"p{number}": optional(pair) for number in range(11)}
    refuse_declaration(
        "Record: expected at most 1024 combinations of largest and absent parts, got more with p10. "
        "Make a List of parts of one kind.",
        lambda: Record(**many).bind(SCOPE),
    )
    refuse_declaration(
        "modality 'm', item: expected an item type, got optional(…). Only a part of a Record may be absent.",
        lambda: make_modality(item=optional(pair)),
    )


def test_a_layout_that_reads_an_absent_part_is_refused_when_it_is_bound() -> None:
    spec = make_spec(layout=embed(5) * 11 + tok.text("{}", item.doctor.name.text))
    sentence = (
        "spec.m, layout: item.doctor.name has no value: item.doctor is absent. Choose by where(item.doctor, ..., [])."
    )
    refuse_declaration(sentence, lambda: spec.bind(CONFIG, Tokenizer()))


def test_facts_are_those_of_python() -> None:
    absent = KIND.facts(KIND.smallest()[0], 0).doctor
    assert not absent
    assert isinstance(absent, SimpleNamespace)
