"""What the tests of this folder share: a config, a tokenizer, a spec of one modality, and how a refusal is told."""

import re
from inspect import ismodule
from math import ceil, floor
from types import SimpleNamespace

import pytest

import mmkit
from mmkit import InputError, Modality, ModelSpec, Tensor, already_expanded, batched, cfg, embed, insert, replace
from mmkit.language.expr import dependencies
from mmkit.language.layout import ItemTokens, nothing
from mmkit.plan.placement import ItemLayout, ResolvedUpdate

NAMES = {name: value for name, value in vars(mmkit).items() if name[0] != "_" and not ismodule(value)}
NAMES |= {"ceil": ceil, "floor": floor, "nothing": nothing}
"""For `eval` of a repr."""

CONFIG = SimpleNamespace(vocab_size=200, n=2, size=7, minus=-1, text="x")


class Tokenizer:
    """One id per character, and a few tokens, one of them outside the vocabulary."""

    all_special_ids = (7, 8, 181, 182)
    eos_token_id, unk_token_id = 151, 152

    def get_vocab(self):
        return {"<image>": 7, "<im_end>": 8, "<|image_1|>": 181, "<|image_2|>": 182, "<far>": 200, "word": 153}

    def encode(self, text, add_special_tokens):
        return ([1] if add_special_tokens else []) + [152 if c == "\N{SNOWMAN}" else ord(c) for c in text]

    def decode(self, ids, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(map(chr, ids))


def modality(name="m", **options):
    plain = dict(item=Tensor(shape=(2, cfg.n)), layout=embed(5), update=already_expanded(), fields={"x": batched()})
    return Modality(name, **{**plain, **options})


def plan_of(*modalities, processor=None, **prompts):
    return ModelSpec("spec", *modalities, **prompts).bind(CONFIG, Tokenizer(), processor=processor)


UPDATES = {
    "replace": replace(0),
    "in_place": already_expanded(),
    "start": insert(at="start"),
    "after": insert(after=0),
}


def alternatives(*ways, embeds=(5,)):
    """The ways to place an item, each a kind, a target and the ids that all share, of which encoder rows go at
    `embeds`."""
    (ids,) = {tuple(ids) for _, _, ids in ways}
    placeholder = ItemTokens(list(ids), bytes(token in embeds for token in ids))
    return ItemLayout(placeholder, [ResolvedUpdate(UPDATES[kind], tuple(target)) for kind, target, _ in ways])


def leaves_of(*exprs):
    """The leaves of several expressions, as one compares them."""
    return frozenset().union(*map(dependencies, exprs))


def bound(**options):
    """One modality of a plan."""
    return plan_of(modality(**options)).modalities["m"]


def outcome(call, *way):
    """What comes of a call, or the sentence with which it is refused."""
    try:
        return call(*way)
    except InputError as error:
        return str(error)


def refused(error, text, provoke, *way):
    """The whole sentence of an error that is exactly of this class; `…` stands for words that another test has."""
    with pytest.raises(error) as caught:
        provoke(*way)
    said = str(caught.value)
    assert type(caught.value) is error
    assert re.fullmatch(".+".join(map(re.escape, text.split("…"))), said), said
    return said
