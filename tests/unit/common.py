"""A config, a tokenizer, a spec of one modality and checks of refusals, which many tests share."""

import re
from contextlib import contextmanager
from inspect import ismodule
from math import ceil, floor
from types import SimpleNamespace

import pytest

import mmkit
from mmkit import InputError, Modality, ModelSpec, Tensor, already_expanded, batched, cfg, embed, insert, replace
from mmkit.language.layout import ItemTokens, nothing
from mmkit.language.node import dependencies
from mmkit.plan.placement import ItemLayout, ResolvedUpdate

NAMES = {}
for public_name, public in vars(mmkit.public).items():
    if not public_name.startswith("_") and not ismodule(public):
        NAMES[public_name] = public
# two functions of Python, and a layout that mmkit does not export
NAMES |= {"ceil": ceil, "floor": floor, "nothing": nothing}
"""What `eval` of a repr needs."""

CONFIG = SimpleNamespace(vocab_size=200, n=2, size=7, minus=-1, text="x")


class Tokenizer:
    """One id per character, and a few tokens, one of them outside the vocabulary."""

    all_special_ids = (7, 8, 181, 182)
    eos_token_id = 151
    unk_token_id = 152

    def get_vocab(self):
        return {"<image>": 7, "<im_end>": 8, "<|image_1|>": 181, "<|image_2|>": 182, "<far>": 200, "word": 153}

    def encode(self, text, add_special_tokens):
        ids = [1] if add_special_tokens else []
        for character in text:
            ids.append(self.unk_token_id if character == "\N{SNOWMAN}" else ord(character))
        return ids

    def decode(self, ids, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(chr(token) for token in ids)


def make_modality(name="m", **options):
    """Return a modality of 2 x 2 tensors, each one position of the id 5, with these options in place of its own."""
    all_options = {
        "item": Tensor(shape=(2, cfg.n)),
        "layout": embed(5),
        "update": already_expanded(),
        "fields": {"x": batched()},
    }
    all_options.update(options)
    return Modality(name, **all_options)


def bind_modality(**options):
    """Return the modality "m" with these options, bound as the only one of a plan."""
    return bind_plan(make_modality(**options)).modalities["m"]


def bind_plan(*modalities, processor=None, **prompts):
    """Return the plan of a spec of these modalities, for CONFIG and Tokenizer."""
    return ModelSpec("spec", *modalities, **prompts).bind(CONFIG, Tokenizer(), processor=processor)


UPDATES = {
    "replace": replace(0),
    "already_expanded": already_expanded(),
    "start": insert(at="start"),
    "after": insert(after=0),
}
"""An update of each kind; the target of it is resolved apart from it."""


def make_item_layout(ids, updates, embeds=(5,)):
    """Return the layout of an item: its ids, with encoder rows where one of `embeds` is, and its updates, each a pair
    of a key of UPDATES and the ids of its target."""
    tokens = ItemTokens(list(ids), bytes(token in embeds for token in ids))
    return ItemLayout(tokens, [ResolvedUpdate(UPDATES[kind], tuple(target)) for kind, target in updates])


def find_leaves(*exprs):
    """Return the leaves of several expressions as one set."""
    leaves = set()
    for expr in exprs:
        leaves |= dependencies(expr)
    return frozenset(leaves)


def get_outcome(function, *arguments):
    """Return what a call returns, or the sentence of its InputError."""
    try:
        return function(*arguments)
    except InputError as error:
        return str(error)


@contextmanager
def refuses(error, sentence):
    """Check that the block raises an error of exactly this class with this sentence; yield what pytest caught.

    `…` in the sentence stands for words that another test has.
    """
    with pytest.raises(error) as caught:
        yield caught
    message = str(caught.value)
    pattern = ".+".join(re.escape(words) for words in sentence.split("…"))
    assert type(caught.value) is error
    assert re.fullmatch(pattern, message), message


def expect_refusal(error, sentence, function, *arguments):
    """Call a function that must raise such an error, as `refuses()` says; return the whole sentence."""
    with refuses(error, sentence) as caught:
        function(*arguments)
    return str(caught.value)
