"""LLaGA at 288240f: utils/utils.py, model/llaga_arch.py, eval/eval_pretrain.py.

The text is cut at each `<graph>`, and each piece is tokenized by itself; the <s> that the tokenizer writes before a
piece is kept for the first one only. A graph becomes the projected embeddings of its nodes, hop by hop, with zeros for
missing nodes; before, between and behind the hops stand rows that were trained.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from examples.wild.llaga import LLAGA
from mmkit.training import MultiModalMixin

from .common import (
    ASSISTANT,
    SIZES,
    Expansion,
    Message,
    WildModel,
    collect_items,
    draw_text,
    make_item_part,
    make_llama_tokenizer,
    make_message,
    make_text_part,
    make_vicuna_template,
    write_vicuna,
)


class LlagaConfig(LlamaConfig):
    """A Llama's, and what a published config says."""

    model_type = "wild_llaga"

    sample_neighbor_size: int = 3
    use_hop: int = 2
    mm_hidden_size: int = 8
    mm_use_graph_special_token: bool = True
    num_nodes: int = 100
    """Of the graph that the model knows."""
    graph_token: str = "<graph_row>"
    """At the positions of rows; the published code has none."""


class LlagaForCausalLM(MultiModalMixin, LlamaForCausalLM):
    """A Llama, with a projector of node embeddings."""

    mm_spec = LLAGA
    config_class = LlagaConfig

    def __init__(self, config: LlagaConfig) -> None:
        super().__init__(config)
        self.projector = nn.Linear(config.mm_hidden_size, config.hidden_size)
        self.special_rows = nn.Parameter(torch.randn(config.use_hop + 2, config.hidden_size))
        self.post_init()

    def embed_graph(self, nodes: torch.Tensor, embeddings: torch.Tensor) -> list[torch.Tensor]:
        """Project the embeddings of nodes, and put rows between the hops."""
        rows = []
        for ids, vectors in zip(nodes, embeddings, strict=True):
            projected = self.projector(vectors) * (ids >= 0)[:, None]
            parts = [self.special_rows[:1]]
            start = 0
            for hop in range(self.config.use_hop + 1):
                count = self.config.sample_neighbor_size**hop
                parts.append(projected[start : start + count])
                parts.append(self.special_rows[hop + 1 : hop + 2])
                start += count
            rows.append(torch.cat(parts))
        return rows


def make_tokenizer() -> Any:
    return make_llama_tokenizer(["<graph_row>", "<graph>"], make_vicuna_template(ASSISTANT, "'<graph>'"))


def draw(rng: random.Random) -> list[Message]:
    """Draw a question about one graph, or about whether two are linked."""
    parts = [make_text_part(draw_text(rng))]
    for _ in range(rng.randint(1, 2)):
        generator = torch.Generator().manual_seed(rng.randrange(1000))
        nodes = torch.randint(-1, 100, (13,), generator=generator)
        nodes[0] = rng.randrange(100)
        embeddings = torch.randn(13, 8, generator=generator)
        embeddings[nodes < 0] = 0.0
        parts.append(make_item_part("graph", {"nodes": nodes, "embeddings": embeddings}))
        parts.append(make_text_part(draw_text(rng)))
    return [make_message("user", *parts)]


def expand(tokenizer: Any, config: Any, messages: list[Message]) -> Expansion:
    """Return what LLaGA makes of a chat."""
    row = tokenizer.convert_tokens_to_ids(config.graph_token)
    hops = [config.sample_neighbor_size**hop for hop in range(config.use_hop + 1)]
    graphs = collect_items(messages)["graph"]
    pieces = write_vicuna(ASSISTANT, messages, {"graph": "<graph>"}).split("<graph>")

    expansion = Expansion()
    expansion.add_ids(tokenizer(pieces[0]).input_ids)
    for graph, piece in zip(graphs, pieces[1:], strict=True):
        expansion.add_item("graph", **graph)
        expansion.add_rows(1, row)  # a trained row
        for nodes in hops:
            expansion.add_rows(nodes, row)
            expansion.add_rows(1, row)  # a trained row
        ids = tokenizer(piece).input_ids
        assert ids[0] == tokenizer.bos_token_id
        expansion.add_ids(ids[1:])
    return expansion


def make_config(vocab_size: int) -> LlagaConfig:
    return LlagaConfig(vocab_size=vocab_size, **SIZES)


MODEL = WildModel(LLAGA, "LlagaForCausalLM", make_tokenizer, make_config, draw, expand)
