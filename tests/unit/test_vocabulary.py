"""Values of a template are plain text: no special token comes out of them, and nothing else changes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mmkit import InputError, SpecError, cfg, fields, tok
from mmkit.language.expr import Scope, evaluate
from mmkit.language.vocabulary import AuthorText, Vocabulary
from tests.profiles import scaled

from .common import Tokenizer as Characters

SPECIAL = ("<s>", "</s>", "<|im_end|>", "<|im_end|>>")
"""Marked as special; one of them begins with another one."""
ADDED = ("<ts>", "<ts_patch>", "<|image_1|>")
"""Added, and not marked."""
WORDS = ("graph", "  ")
"""Added words, which are ordinary texts."""

CORPUS = ["the mean of a graph is 1.5, <b>x</b> [0] {1} |2|", "<ts and patch> of an image | im_end", "a\nb  c"]


@cache
def tokenizer(kind: str) -> Any:
    """A tokenizer of one of the common constructions."""
    model = Tokenizer(models.BPE(unk_token=None, byte_fallback=kind == "llama"))
    alphabet: list[str] = []
    if kind == "bytes":
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    elif kind == "llama":
        model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = [chr(code) for code in range(32, 127)] + ["\n", "▁"]
    else:  # splits at each character of no letter or digit
        model.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|."), "isolated")
        alphabet = [chr(code) for code in range(32, 127)] + ["\n"]
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator(CORPUS * 20, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>")
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL[2:])})
    fast.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    fast.add_tokens(list(WORDS))
    return fast


KINDS = ("bytes", "llama", "words")

texts = st.lists(
    st.sampled_from([*SPECIAL, *ADDED, *WORDS, "<", ">", "|", "<ts_", "patch>", "im_end", "a", " ", "mean 1.5", "\n"]),
    max_size=4,
).map("".join)


def spelled(template: str, values: list[str]) -> bool:
    """Whether a special token has a part in a value: whether its text begins, ends or lies there."""
    owners: list[bool] = []
    text = ""
    for number, literal in enumerate(template.split("{}")):
        for part, is_value in ((literal, False), (values[number] if number < len(values) else "", True)):
            text += part
            owners += [is_value] * len(part)
        if number < len(values) and not values[number]:
            owners[-1:] = [True]  # an empty value stands between two literal characters
    return any(
        any(owners[start : start + len(token)])
        for token in (*SPECIAL, *ADDED)
        for start in range(len(text))
        if text.startswith(token, start)
    )


@settings(max_examples=scaled(400))
@given(st.sampled_from(KINDS), texts, texts, texts, st.lists(texts, min_size=2, max_size=2))
def test_no_special_token_comes_out_of_a_value(kind, first, between, last, values):
    fast, template = tokenizer(kind), f"{first}{{}}{between}{{}}{last}"
    ids = Vocabulary(fast).text(template, *values)
    special = {fast.convert_tokens_to_ids(text) for text in (*SPECIAL, *ADDED)}
    literal = [fast.encode(text, add_special_tokens=False) for text in (first, between, last)]
    assert [token for token in ids if token in special] == [t for own in literal for t in own if t in special]
    if not spelled(template, values):
        assert ids == fast.encode(template.format(*values), add_special_tokens=False)
    if kind == "bytes":  # of which decoding is the inverse
        assert fast.decode(ids) == template.format(*values)


def test_what_a_spec_states_and_numbers_are_no_values_of_a_caller():
    fast = tokenizer("bytes")
    vocabulary = Vocabulary(fast)
    (image,) = fast.convert_tokens_to_ids(["<|image_1|>"])
    assert vocabulary.text("<|image_{}|>", 1) == [image]
    assert image not in vocabulary.text("<|image_{}|>", "1")
    assert vocabulary.text("{}", AuthorText("<|image_1|>")) == [image]
    scope = Scope(cfg={"token": "<|image_1|>"}, fields={"token": "<|image_1|>"}, tok=vocabulary)
    assert evaluate(tok.text("{}", "<|image_1|>"), scope) == [image]
    assert evaluate(tok.text("{}", cfg.token), scope) == [image]
    assert evaluate(tok.text(fields.token), scope) == [image]
    assert image not in evaluate(tok.text("{}", fields.token), scope)
    assert evaluate(tok["<|image_{}|>", fields.number], Scope(fields={"number": "1"}, tok=vocabulary)) == image


def test_a_special_token_that_a_normaliser_makes_of_a_value_is_refused():
    model = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate("<>abts")}, merges=[], unk_token=None))
    model.normalizer = normalizers.Lowercase()
    fast = PreTrainedTokenizerFast(tokenizer_object=model)
    fast.add_tokens([AddedToken("<ts>", normalized=True, special=True)])
    vocabulary = Vocabulary(fast)
    assert vocabulary.text("a{}", "<t") == fast.encode("a<t")
    with pytest.raises(InputError) as error:
        vocabulary.text("a{}", "<TS>")
    assert str(error.value) == (
        "tok.text('a{}'): expected values that the tokenizer takes for plain text, got 'a<TS>', in which it finds a "
        "special token."
    )


def test_a_field_inside_a_format_specification_is_refused():
    with pytest.raises(SpecError, match="expected a template without a field inside a form"):
        Vocabulary(tokenizer("bytes")).text("{:{}}", "a", 4)
    assert Vocabulary(Characters()).text("{:>3}{{", "a") == [32, 32, 97, ord("{")]
