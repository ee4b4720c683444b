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

from .common import Tokenizer as CharacterTokenizer

SPECIAL = ("<s>", "</s>", "<|im_end|>", "<|im_end|>>")
"""Marked as special; one of them begins with another one."""
ADDED = ("<ts>", "<ts_patch>", "<|image_1|>")
"""Added, and not marked."""
WORDS = ("graph", "  ")
"""Added words, which are ordinary texts."""

CORPUS = ["the mean of a graph is 1.5, <b>x</b> [0] {1} |2|", "<ts and patch> of an image | im_end", "a\nb  c"]


@cache
def make_tokenizer(kind: str) -> Any:
    """Return a tokenizer of one of the common constructions: bytes, llama or words."""
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

PARTS_OF_TOKENS = ("<", ">", "|", "<ts_", "patch>", "im_end")
TEXTS = ("a", " ", "mean 1.5", "\n")
texts = st.lists(st.sampled_from(SPECIAL + ADDED + WORDS + PARTS_OF_TOKENS + TEXTS), max_size=4).map("".join)


def has_token_of_values(literals: list[str], values: list[str]) -> bool:
    """Return whether a special token begins, ends or lies in a value, where values stand between these literals."""
    text = ""
    is_of_value: list[bool] = []  # for each character of the text
    for index, literal in enumerate(literals):
        text += literal
        is_of_value += [False] * len(literal)
        if index == len(values):  # no value is behind the last literal
            break
        text += values[index]
        is_of_value += [True] * len(values[index])
        if text and not values[index]:
            is_of_value[-1] = True  # an empty value is between two characters

    for token in SPECIAL + ADDED:
        for start in range(len(text)):
            end = start + len(token)
            if text.startswith(token, start) and any(is_of_value[start:end]):
                return True
    return False


@settings(max_examples=scaled(400))
@given(st.sampled_from(KINDS), st.lists(texts, min_size=3, max_size=3), st.lists(texts, min_size=2, max_size=2))
def test_no_special_token_comes_out_of_a_value(kind, literals, values):
    fast = make_tokenizer(kind)
    template = "{}".join(literals)
    ids = Vocabulary(fast).text(template, *values)

    special = set(fast.convert_tokens_to_ids(list(SPECIAL + ADDED)))
    expected = []
    for literal in literals:
        expected += keep_ids(fast.encode(literal, add_special_tokens=False), special)
    assert keep_ids(ids, special) == expected

    if not has_token_of_values(literals, values):
        assert ids == fast.encode(template.format(*values), add_special_tokens=False)
    if kind == "bytes":  # of which decoding is the inverse
        assert fast.decode(ids) == template.format(*values)


def keep_ids(ids: list[int], wanted: set[int]) -> list[int]:
    return [token for token in ids if token in wanted]


def test_numbers_and_texts_of_an_author_may_make_a_special_token():
    fast = make_tokenizer("bytes")
    vocabulary = Vocabulary(fast)
    image = fast.convert_tokens_to_ids("<|image_1|>")
    assert vocabulary.text("<|image_{}|>", 1) == [image]
    assert vocabulary.text("{}", AuthorText("<|image_1|>")) == [image]
    assert image not in vocabulary.text("<|image_{}|>", "1")


def test_what_a_spec_and_a_config_state_are_texts_of_an_author():
    fast = make_tokenizer("bytes")
    image = fast.convert_tokens_to_ids("<|image_1|>")
    facts = {"token": "<|image_1|>", "number": "1"}
    scope = Scope(cfg=facts, fields=facts, tok=Vocabulary(fast))
    assert evaluate(tok.text("{}", "<|image_1|>"), scope) == [image]
    assert evaluate(tok.text("{}", cfg.token), scope) == [image]
    assert evaluate(tok.text(fields.token), scope) == [image], "a template is the author's"
    assert evaluate(tok["<|image_{}|>", fields.number], scope) == image
    assert image not in evaluate(tok.text("{}", fields.token), scope)


def test_a_special_token_that_a_normaliser_makes_of_a_value_is_refused():
    vocab = {"<": 0, ">": 1, "a": 2, "b": 3, "t": 4, "s": 5}
    model = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=None))
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
        Vocabulary(make_tokenizer("bytes")).text("{:{}}", "a", 4)
    assert Vocabulary(CharacterTokenizer()).text("{:>3}{{", "a") == [32, 32, 97, ord("{")]
