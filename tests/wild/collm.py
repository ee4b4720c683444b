"""CoLLM at 48042b1: minigpt4/models/minigpt4rec_v2.py, prompts/collm_movie.txt.

`<s>` and the prompt are one text. `<UserID>` and `<TargetItemID>` become `<unk>`, `<ItemIDList>` as many of them as
there are items, with ", " between. Where an item has several rows, its `<unk>` are joined by ".". The rows of a matrix
factorisation, projected, take the places of all `<unk>`, in the order of the prompt.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from examples.wild.collm import COLLM
from mmkit.training import MultiModalMixin

from .common import (
    SIZES,
    Expansion,
    Message,
    WildModel,
    collect_items,
    draw_text,
    join_parts,
    make_item_part,
    make_llama_tokenizer,
    make_message,
    make_text_part,
)

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% for part in message.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% elif part.type == 'user' %}<UserID>{% elif part.type == 'history' %}<ItemIDList>"
    "{% else %}<TargetItemID>{% endif %}{% endfor %}{% endfor %}"
)


class CollmConfig(LlamaConfig):
    """A Llama's, and what the published code has in a file."""

    model_type = "wild_collm"

    proj_token_num: int = 2
    user_num: int = 10
    item_num: int = 30
    max_history: int = 8
    embedding_size: int = 16


class CollmForCausalLM(MultiModalMixin, LlamaForCausalLM):
    """A Llama, with a table of users and one of items."""

    mm_spec = COLLM
    config_class = CollmConfig

    def __init__(self, config: CollmConfig) -> None:
        super().__init__(config)
        self.users = nn.Embedding(config.user_num, config.embedding_size)
        self.items = nn.Embedding(config.item_num, config.embedding_size)
        self.projector = nn.Linear(config.embedding_size, config.proj_token_num * config.hidden_size)
        self.post_init()

    def project(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the rows of some users or items (count * proj_token_num, hidden_size)."""
        return self.projector(vectors).reshape(-1, self.config.hidden_size)

    def embed_user(self, user: torch.Tensor) -> list[torch.Tensor]:
        return [self.project(self.users(number)) for number in user]

    def embed_history(self, history: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
        return [self.project(self.items(numbers)) for numbers in history]

    def embed_target(self, target: torch.Tensor) -> list[torch.Tensor]:
        return [self.project(self.items(number)) for number in target]


ROW_TOKENS = {"user": "<user>", "history": "<item>", "target": "<target>"}
"""What the spec has in place of `<unk>`."""


def make_tokenizer() -> Any:
    return make_llama_tokenizer(["<UserID>", "<ItemIDList>", "<TargetItemID>", *ROW_TOKENS.values()], TEMPLATE)


def draw(rng: random.Random) -> list[Message]:
    """Draw a question with or without the items of the user."""
    parts = [make_text_part("#Question: A user liked: " + draw_text(rng))]
    if rng.random() < 0.7:
        history = torch.tensor([rng.randrange(30) for _ in range(rng.choice([1, 2, 7, 8]))])
        parts += [make_item_part("history", history), make_text_part("; the feature" + draw_text(rng))]
    parts += [
        make_item_part("user", torch.tensor(rng.randrange(10))),
        make_text_part(". Does he like" + draw_text(rng)),
    ]
    parts += [make_item_part("target", torch.tensor(rng.randrange(30))), make_text_part("?\n#Answer:")]
    return [make_message("user", *parts)]


def expand(tokenizer: Any, config: Any, messages: list[Message]) -> Expansion:
    """Return what CoLLM makes of a question."""
    items = collect_items(messages)
    unknown = ".".join(["<unk>"] * config.proj_token_num)
    history = items["history"][0] if "history" in items else []
    marks = {"user": unknown, "target": unknown, "history": ", ".join([unknown] * len(history))}
    ids = tokenizer("<s>" + join_parts(messages[0], marks), add_special_tokens=False).input_ids

    # what each <unk> stands for, in the order of the prompt
    waiting = []
    expansion = Expansion()
    for part in messages[0]["content"]:
        name = part["type"]
        if name != "text":
            expansion.add_item(name, **{name: part[name]})
            waiting += [name] * part[name].numel() * config.proj_token_num
    for token in ids:
        if token == tokenizer.unk_token_id:
            name = waiting.pop(0)
            expansion.add_rows(1, tokenizer.convert_tokens_to_ids(ROW_TOKENS[name]), name)
        else:
            expansion.add_ids([token])
    assert not waiting
    return expansion


def make_config(vocab_size: int) -> CollmConfig:
    return CollmConfig(vocab_size=vocab_size, **SIZES)


MODEL = WildModel(COLLM, "CollmForCausalLM", make_tokenizer, make_config, draw, expand)
