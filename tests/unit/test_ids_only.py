"""Items that become ids of the vocabulary only: of these, nothing else is in an expanded prompt."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from mmkit import (
    InputError,
    Modality,
    ModelSpec,
    Tensor,
    Text,
    batched,
    between,
    derived,
    embed,
    fields,
    item,
    later,
    literal,
    replace,
    select,
    tok,
    where,
)
from mmkit.language.layout import layout, may_embed
from mmkit.training.mixin import MultiModalMixin
from tests.profiles import scaled

from .common import Tokenizer, make_modality

CLIP, PATCH, ECG, OPEN, CLOSE = 3, 4, 5, 6, 7
FIRST_CODE = 10
CODES = [[0], [1], [0, 1], [1, 1], [2, 0, 1]]
"""Few of them, so that items and their ids repeat in a prompt."""


def make_codes(values: Any, scope: Any) -> dict[str, Any]:
    return {"codes": [value.long() + FIRST_CODE for value in values]}


CLIPS = Modality("clip", item=Tensor((2,)), layout=embed(PATCH) * 2, update=replace(CLIP), fields={"x": batched()})
ECGS = Modality(
    "ecg",
    item=Tensor((between(1, 4),)),
    process=make_codes,
    fields={"codes": batched(dtype="int64")},
    layout=literal(OPEN, fields.codes, CLOSE),
    update=replace(ECG),
)
SPEC = ModelSpec("spec", CLIPS, ECGS)
CONFIG = LlamaConfig(vocab_size=32)
PLAN = SPEC.bind(CONFIG)
PROCESSOR = SPEC.hf_processor(CONFIG)


def lay_out(codes: list[int]) -> list[int]:
    return [OPEN, *[FIRST_CODE + code for code in codes], CLOSE]


class Piece(NamedTuple):
    """A part of a drawn prompt: what the caller writes, what it becomes, and the item that it stands for, if any."""

    caller_ids: list[int]
    expanded: list[int]
    modality: str = ""
    value: Any = None


def make_ecg(codes: list[int]) -> Piece:
    return Piece([ECG], lay_out(codes), "ecg", torch.tensor(codes, dtype=torch.float32))


def make_earlier_ecg(codes: list[int]) -> Piece:
    """Return ids that an earlier message has left, without their item."""
    return Piece(lay_out(codes), lay_out(codes))


def make_text(token: int) -> Piece:
    return Piece([token], [token])


PIECES = st.one_of(
    st.sampled_from([20, FIRST_CODE, FIRST_CODE + 1, OPEN, CLOSE]).map(make_text),
    st.sampled_from(CODES).map(make_ecg),
    st.sampled_from(CODES).map(make_earlier_ecg),
    st.just(Piece([CLIP], [PATCH, PATCH], "clip", torch.ones(2))),
)
MESSAGES = st.lists(st.lists(PIECES, max_size=4), min_size=1, max_size=3)


def collect(pieces: list[Piece]) -> dict[str, list[Any]]:
    data: dict[str, list[Any]] = {}
    for piece in pieces:
        if piece.modality:
            data.setdefault(piece.modality, []).append(piece.value)
    return data


@settings(max_examples=scaled(100))
@given(MESSAGES)
def test_messages_are_expanded_alike_whatever_came_before(messages: list[list[Piece]]) -> None:
    """A history keeps the other items, and of these nothing but the ids."""
    history: list[int] = []
    data: dict[str, list[Any]] = {}
    for message in messages:
        caller_ids = history + [token for piece in message for token in piece.caller_ids]
        expected = history + [token for piece in message for token in piece.expanded]
        data = {"clip": data.get("clip", [])}
        for name, values in collect(message).items():
            data[name] = data.get(name, []) + values
        data = {name: values for name, values in data.items() if values}
        without = {name: values for name, values in data.items() if name != "ecg"}

        assert PLAN.expand(caller_ids, data) == expected
        assert PLAN.expand(expected, data) == expected
        assert PLAN.expand(expected, without) == expected
        assert PLAN.expand(PLAN.unexpand(expected, data), data) == expected
        batch = PROCESSOR(input_ids=caller_ids, **data)
        assert batch["input_ids"].tolist() == [expected]
        assert batch["mm_token_type_ids"][0].bool().tolist() == [token == PATCH for token in expected]
        assert "codes" not in batch
        assert len(batch["placeholders"][0]) == sum(map(len, data.values()))
        history = expected


def test_more_and_fewer_targets_than_items_are_refused() -> None:
    ecg = torch.zeros(1)
    for prompt, data in (
        ([ECG], {}),
        ([], {"ecg": [ecg]}),
        ([ECG, ECG], {"ecg": [ecg]}),
        ([ECG], {"ecg": [ecg, ecg]}),
        ([*lay_out([1]), ECG], {"ecg": [ecg, ecg]}),
    ):
        with pytest.raises(InputError, match=r"spec\.ecg"):
            PLAN.expand(prompt, data)


def test_some_items_are_laid_out_and_others_are_not() -> None:
    data = {"ecg": [torch.tensor([0.0]), torch.tensor([1.0])]}
    assert PLAN.expand([*lay_out([0]), ECG], data) == lay_out([0]) + lay_out([1])


# -- targets of several tokens -----------------------------------------------------------------------------------------


def test_a_target_that_holds_another_one_is_one() -> None:
    """The second item stands in the prompt already, which two targets would contradict."""
    ecgs = ECGS.model_copy(update={"update": [replace([ECG, ECG]), replace(ECG)]})
    plan = ModelSpec("spec", ecgs).bind(CONFIG)
    data = {"ecg": [torch.tensor([0.0]), torch.tensor([1.0])]}
    assert plan.expand([ECG, ECG, *lay_out([1])], data) == lay_out([0]) + lay_out([1])


def test_a_text_as_target_is_found_behind_the_same_item_of_an_earlier_message() -> None:
    ecgs = ECGS.model_copy(update={"update": replace(tok.text("<ecg>"))})
    plan = ModelSpec("spec", ecgs).bind(LlamaConfig(vocab_size=200), Tokenizer())
    data = {"ecg": [torch.zeros(1)]}
    ids = plan.expand(spell("a<ecg>"), data)
    assert ids == [ord("a"), *lay_out([0])]
    assert plan.expand(ids + spell("<ecg>"), data) == ids + lay_out([0])
    assert plan.expand(ids, {}) == ids
    assert plan.expand(ids, data) == ids


def test_no_text_of_an_item_spells_a_target_of_several_tokens() -> None:
    note = Modality(
        "note",
        item=Text(9),
        fields={"ids": derived(later(encode)(item.length))},
        layout=literal(OPEN, fields.ids),
        update=replace(tok.text("<note>")),
    )
    plan = ModelSpec("spec", note).bind(LlamaConfig(vocab_size=200), Tokenizer())
    assert plan.expand(spell("<note>!"), {"note": "abc"}) == [OPEN, 65, 65, 65, ord("!")]
    with pytest.raises(
        InputError, match=r"spec\.note\[0\]: expected a text without '<note>', which stands for an item"
    ):
        plan.expand(spell("<note>"), {"note": "a<note>"})


def encode(length: int) -> list[int]:
    return [65] * length


def spell(text: str) -> list[int]:
    return [ord(character) for character in text]


# -- what a layout says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (literal(5), False),
        (literal(5) * item.length, False),
        (literal(5) * later(encode)(item.length), False),
        (literal(tok.text("{}", later(str)(item.length))), False),
        (where(item.length > 1, literal(5), literal(6)), False),
        (embed(5), True),
        (literal(5) + embed(5) * item.length, True),
        (select([1, 5], embed=5), True),
        (where(item.length > 1, literal(5), embed(5)), True),
        (lambda scope: [5], True),
        (later(encode)(item.length), True),
        (later(encode)(item.length)[0], True),
    ],
)
def test_a_layout_without_embed_says_that_items_become_ids_only(declared: Any, expected: bool) -> None:
    assert may_embed(layout(declared)) is expected


def test_no_field_of_these_items_has_a_name_for_the_model() -> None:
    codes = ECGS.fields
    spec = ModelSpec("spec", ECGS, ECGS.model_copy(update={"name": "eeg", "update": replace(8)}))
    assert spec["eeg"].received_fields == {} != codes
    named = ECGS.model_copy(update={"fields": {"input_ids": batched()}, "layout": literal(fields.input_ids)})
    assert named.is_ids_only


def test_a_modality_without_fields_needs_no_process() -> None:
    counted = Modality("n", item=Tensor((between(1, 4),)), layout=literal(9) * item.length, update=replace(8))
    plan = ModelSpec("spec", counted).bind(CONFIG)
    assert plan.expand([8, 1, 8], {"n": [[0.0], [0.0] * 3]}) == [9, 1, 9, 9, 9]
    assert plan.preview([8], {"n": [[0.0]]}).fields == {"n": [{}]}


# -- training ----------------------------------------------------------------------------------------------------------


class Language(torch.nn.Module):
    """A table of embeddings as a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(32, 2)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.table

    def forward(self, **inputs: Any) -> Any:
        return inputs


class Model(MultiModalMixin, Language):
    mm_spec = SPEC

    def embed_clip(self, x: torch.Tensor) -> Any:
        return x[:, None].expand(-1, 2, -1)


def test_a_model_is_trained_on_the_ids_of_these_items() -> None:
    model = Model()
    batch = PROCESSOR(input_ids=[ECG, CLIP, 20], clip=[torch.ones(2)], ecg=[torch.zeros(1)])
    embeds = model(**batch)["inputs_embeds"]
    table = model.table.weight
    assert torch.equal(embeds[0, :3], table[[OPEN, FIRST_CODE, CLOSE]])
    assert torch.equal(embeds[0, 3:5], torch.ones(2, 2))
    alone = PROCESSOR(input_ids=[ECG, 20], ecg=[torch.zeros(1)])
    assert torch.equal(model(**alone)["input_ids"], alone["input_ids"])


def test_rows_are_still_required_of_other_items() -> None:
    assert not make_modality().is_ids_only
