"""`item.text`: what a text of an item says, in layouts."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from mmkit import (
    InputError,
    Modality,
    ModelSpec,
    Record,
    Tensor,
    Text,
    batched,
    embed,
    item,
    later,
    literal,
    replace,
    tok,
    where,
)
from mmkit.plan.layouts import MAX_KEY_VALUES
from mmkit.plan.outline import TextFacts
from mmkit.plan.plan import Plan
from tests.profiles import scaled

from .common import Tokenizer as CharacterTokenizer
from .test_vocabulary import ADDED, KINDS, SPECIAL, make_tokenizer, texts

ASSAY = Record(molecule=Text(64), dose=Tensor((2,)))


def bind(kind: str = "bytes", **changes: Any) -> Plan:
    """Return the plan of an item with a text and a vector: the text, then a row."""
    options: dict[str, Any] = {
        "item": ASSAY,
        "layout": literal(tok["<s>"], tok.text("smiles: {};", item.molecule.text)) + embed(tok["<ts_patch>"]),
        "update": replace(tok["<ts>"]),
        "fields": {"dose": batched()},
        "process": return_doses,
    }
    options.update(changes)
    tokenizer = CharacterTokenizer() if kind == "characters" else make_tokenizer(kind)
    vocab_size = 200 if kind == "characters" else len(tokenizer)
    return ModelSpec("spec", Modality("assay", **options)).bind(LlamaConfig(vocab_size=vocab_size), tokenizer)


def return_doses(values: Any, scope: Any) -> dict[str, Any]:
    return {"dose": [value["dose"] for value in values]}


@settings(max_examples=scaled(60))
@given(st.sampled_from(KINDS), texts.filter(bool))
def test_a_text_is_laid_out_as_plain_text(kind: str, text: str) -> None:
    plan = bind(kind)
    tokenizer = make_tokenizer(kind)
    data = {"assay": {"molecule": text, "dose": [0.0, 1.0]}}
    target = tokenizer.convert_tokens_to_ids("<ts>")
    if "<ts>" in text or "<ts_patch>" in text:
        with pytest.raises(InputError, match=r"spec\.assay\[0\]\.molecule: expected a text without '<ts"):
            plan.expand([target], data)
        return
    ids = plan.expand([target], data)
    special = {tokenizer.convert_tokens_to_ids(word) for word in SPECIAL + ADDED}
    beginning, *inner, placeholder = ids
    assert [beginning, placeholder] == tokenizer.convert_tokens_to_ids(["<s>", "<ts_patch>"])
    assert special.isdisjoint(inner)
    if not any(word in f"smiles: {text};" for word in SPECIAL + ADDED):
        assert inner == tokenizer.encode(f"smiles: {text};", add_special_tokens=False)
    assert plan.expand(ids, data) == ids
    assert plan.unexpand(ids, data) == [target]
    assert plan.outline([target], data).prompt_token_ids == ids


def test_items_of_equal_length_and_other_texts_have_other_ids() -> None:
    note = Modality("note", item=Text(9), layout=tok.text("{}!", item.text), update=replace(7))
    plan = ModelSpec("spec", note).bind(LlamaConfig(vocab_size=200), CharacterTokenizer())
    assert plan.expand([7, 7, 7], {"note": ["CCO", "OCC", "CCO"]}) == [ord(letter) for letter in "CCO!OCC!CCO!"]
    assert plan.preview([7], {"note": "C"}).fields == {"note": [{}]}


def test_a_text_may_decide_what_is_laid_out() -> None:
    layout = embed(5) * later(str.count)(item.text, "C") + where(item.text == "CCO", 1, 2)
    atoms = Modality(
        "atoms", item=Text(9, largest="C" * 9), layout=layout, update=replace(7), fields={"x": batched()}, process=count
    )
    plan = ModelSpec("spec", atoms).bind(LlamaConfig(vocab_size=200), CharacterTokenizer())
    assert plan.expand([7, 7], {"atoms": ["CCO", "OC"]}) == [5, 5, 1, 5, 2]


def count(values: Any, scope: Any) -> dict[str, Any]:
    return {"x": [len(value) for value in values]}


def test_layouts_of_long_texts_are_not_cached() -> None:
    plan = bind(item=Record(molecule=Text(4096), dose=Tensor((2,))))
    cached = plan.modalities["assay"].layout_evaluator.memo
    target = make_tokenizer("bytes").convert_tokens_to_ids("<ts>")
    for length, expected in ((MAX_KEY_VALUES, True), (MAX_KEY_VALUES + 1, False)):
        text = "x" * length
        plan.expand([target], {"assay": {"molecule": text, "dose": [0.0, 1.0]}})
        assert (text in str(list(cached._new))) is expected


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_text_becomes_unknown_tokens_where_a_prompt_does() -> None:
    plan = bind("characters", layout=tok.text("{}", item.molecule.text) + embed(5), update=replace(7))
    data = {"assay": {"molecule": "C\N{SNOWMAN}", "dose": [0.0, 1.0]}}
    assert plan.expand([7], data) == [67, CharacterTokenizer.unk_token_id, 5]


def test_a_special_token_that_comes_out_of_a_text_all_the_same_names_the_item() -> None:
    class CaseBlind(CharacterTokenizer):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [8] if text.upper() == "<IM_END>" else CharacterTokenizer.encode(self, text, add_special_tokens)

    note = Modality("note", item=Text(9), layout=tok.text("{}", item.text), update=replace(7))
    plan = ModelSpec("spec", note).bind(LlamaConfig(vocab_size=200), CaseBlind())
    with pytest.raises(InputError) as caught:
        plan.expand([7, 7], {"note": ["a", "<IM_End>"]})
    assert str(caught.value).startswith("spec.note[1]: expected values that the tokenizer takes for plain text, got")


def test_the_length_of_a_text_does_not_tell_a_layout_that_reads_it() -> None:
    note = Modality("note", item=Text(9), layout=tok.text("{}", item.text), update=replace(7))
    plan = ModelSpec("spec", note).bind(LlamaConfig(vocab_size=200), CharacterTokenizer())
    assert plan.outline([7], {"note": "CC"}).prompt_token_ids == [67, 67]
    sentence = (
        "spec.note[0]: expected the text, which a layout reads, got its length. Send the item in place of its facts."
    )
    with pytest.raises(InputError, match=re.escape(sentence)):
        plan.outline([7], {"note": TextFacts(length=2)})
