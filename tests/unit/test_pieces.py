"""Whether texts around items have other ids when they are tokenized apart, for tokenizers of several constructions."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

from mmkit import Modality, ModelSpec, Tensor, already_expanded, batched, insert, literal, replace, tok
from mmkit.cli.common import describe_pieces
from mmkit.plan.pieces import compare_pieces
from mmkit.plan.plan import Plan

MARKER = "<graph>"
PLACEHOLDER = "<part>"
CORPUS = ["a graph of 12 nodes, as a user's (small) network: <b>x</b>", "USER: what is it? It is a graph.", "a\n\nb  c"]
FRAGMENTS = ("a", "b", " ", "  ", "\n", ".", ",", ":", "'s", "1", "<", ">", "(", ")", "USER: ", " graph", "is", "x", "")
"""What prompts are drawn from."""

WITH_TOKEN = ("bytes", "bytes_rstrip", "legacy", "not_legacy", "metaspace_first", "slow")
"""Constructions in which the marker is a token."""

KINDS = (*WITH_TOKEN, "bytes_without_token", "legacy_without_token")
DIFFER = ("bytes_rstrip", "not_legacy", "metaspace_first", "bytes_without_token", "legacy_without_token")
"""Those that make other ids of pieces."""


@cache
def train_bpe(kind: str) -> Tokenizer:
    """Return a BPE model of bytes, or of characters in which ▁ is a space."""
    model = Tokenizer(models.BPE(unk_token=None if kind == "bytes" else "<unk>", byte_fallback=kind != "bytes"))
    if kind == "bytes":
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = ["<s>", "</s>"]
    else:
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
        model.decoder = decoders.Metaspace(prepend_scheme="first", split=True)
        alphabet = [chr(code) for code in range(32, 127)] + ["\n", "▁"]
        special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + len(alphabet) + 60,
        initial_alphabet=alphabet,
        special_tokens=special,
        show_progress=False,
    )
    model.train_from_iterator(CORPUS * 20, trainer)
    return model


def make_tokenizer(kind: str, folder: Path) -> Any:
    construction = kind.removesuffix("_without_token").removesuffix("_rstrip")
    if construction == "bytes":
        tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=train_bpe("bytes"), bos_token="<s>", eos_token="</s>")
    elif construction == "metaspace_first":
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=train_bpe("metaspace"), bos_token="<s>", eos_token="</s>")
    elif construction == "slow":
        model = folder / "model"
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS * 20),
            model_prefix=str(model),
            vocab_size=90,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        tokenizer = SentencePieceBackend(
            vocab_file=f"{model}.model", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
        )
    else:
        bpe = json.loads(train_bpe("metaspace").to_str())["model"]
        merges = [tuple(merge) for merge in bpe["merges"]]
        tokenizer = LlamaTokenizer(vocab=bpe["vocab"], merges=merges, legacy=construction == "legacy")
    tokens = [PLACEHOLDER] if kind.endswith("_without_token") else [PLACEHOLDER, MARKER]
    rstrip = kind.endswith("_rstrip")
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=True, rstrip=rstrip) for text in tokens])
    return tokenizer


def make_plan(tokenizer: Any, *, is_token: bool = True, update: Any = None) -> Plan:
    target = tok[MARKER] if is_token else tok.text(MARKER)
    spec = ModelSpec(
        "graphs",
        Modality(
            "graph",
            item=Tensor((2,)),
            placeholder=tok[PLACEHOLDER],
            tokens=3,
            update=update or replace(target),
            fields={"graph": batched()},
        ),
    )
    return spec.bind(LlamaConfig(vocab_size=len(tokenizer)), tokenizer)


def draw_prompts(count: int) -> list[str]:
    """Return prompts with one to three markers."""
    rng = random.Random(0)
    prompts = []
    for _ in range(count):
        texts = ["".join(rng.choices(FRAGMENTS, k=rng.randint(0, 4))) for _ in range(rng.randint(2, 4))]
        prompts.append(MARKER.join(texts))
    return prompts


def encode_apart(tokenizer: Any, prompt: str, placeholder: int) -> list[int]:
    """Return the ids of a prompt as LLaVA-like training code makes them, expanded."""
    ids: list[int] = []
    for number, text in enumerate(prompt.split(MARKER)):
        if number:
            ids += [placeholder] * 3
        ids += tokenizer.encode(text, add_special_tokens=False)
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_the_verdict_is_right_for_200_prompts(kind: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(kind, tmp_path)
    plan = make_plan(tokenizer, is_token=kind in WITH_TOKEN)
    placeholder = tokenizer.convert_tokens_to_ids(PLACEHOLDER)
    prompts = draw_prompts(200)
    differing = []
    for prompt in prompts:
        items = {"graph": [torch.zeros(2)] * prompt.count(MARKER)}
        expanded = plan.expand(plan.encode(prompt, add_special_tokens=False), items)
        if expanded != encode_apart(tokenizer, prompt, placeholder):
            differing.append(prompt)

    tried = compare_pieces(plan, prompts)
    assert tried is not None
    assert tried.num_prompts == len(prompts)
    assert [difference.prompt for difference in tried.differences] == differing

    verdict = compare_pieces(plan)
    assert verdict is not None
    assert bool(verdict.differences) == bool(differing) == (kind in DIFFER)


@pytest.mark.parametrize("update", [insert(at="start"), already_expanded()])
def test_there_is_no_verdict_where_no_caller_writes_a_target(update: Any, tmp_path: Path) -> None:
    assert compare_pieces(make_plan(make_tokenizer("bytes", tmp_path), update=update)) is None


def test_a_difference_is_told_with_an_example(tmp_path: Path) -> None:
    sentence = describe_pieces(make_plan(make_tokenizer("not_legacy", tmp_path)))
    assert sentence.startswith("Text before and after an item has other ids tokenized apart, in ")
    assert sentence.endswith(": '<graph>a' is <graph> a here, and <graph> ␣a apart.")


def test_the_remedies_of_the_reference_give_the_ids_of_pieces(tmp_path: Path) -> None:
    """A special token in place of a text, and `legacy=True`."""
    without_token = make_plan(make_tokenizer("legacy_without_token", tmp_path), is_token=False)
    assert describe_pieces(without_token).startswith("Text before and after an item has other ids")
    with_token = make_plan(make_tokenizer("legacy", tmp_path))
    assert describe_pieces(with_token).startswith("Text before and after an item has the same ids")


def test_a_saved_tokenizer_is_legacy_by_its_config_file_alone(tmp_path: Path) -> None:
    """Transformers 5 saves no such key, and reads a file without it as `legacy=False`."""
    make_tokenizer("legacy", tmp_path).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    options = json.loads(file.read_text())
    assert "legacy" not in options
    for legacy, verdict in ((False, "other"), (True, "the same")):
        file.write_text(json.dumps({**options, "legacy": legacy}))
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        assert describe_pieces(make_plan(tokenizer)).startswith(
            f"Text before and after an item has {verdict} ids tokenized apart"
        )


def test_an_item_that_becomes_ids_only_has_a_target_as_well(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("not_legacy", tmp_path)
    beat = Modality("beat", item=Tensor((2,)), layout=literal(tok["<s>"]) * 2, update=replace(tok[MARKER]))
    plan = ModelSpec("beats", beat).bind(LlamaConfig(vocab_size=len(tokenizer)), tokenizer)
    assert "'<graph>a' is <graph> a here, and <graph> ␣a apart." in describe_pieces(plan)
