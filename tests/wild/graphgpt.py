"""GraphGPT at db25a66: graphgpt/eval/run_graphgpt.py, graphgpt/model/GraphLlama.py, graphgpt/conversation.py.

`<graph>` in the question becomes, before it is tokenized, a start token, a patch token for each node and an end token.
The rows are those of a graph transformer, projected; whether the start and the end stand where they must is seen when
the model runs.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from examples.wild.graphgpt import GRAPHGPT
from mmkit.training import MultiModalMixin

from .common import (
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

SYSTEM = (
    "You are GraphGPT, a large language and graph-structral assistant trained by HKUDS Lab."
    "You are able to understand the graph structures that the user provides, and assist the user with a variety of "
    "tasks using natural language.Follow the instructions carefully and explain your answers in detail."
)
"""As it is published."""


class GraphGPTConfig(LlamaConfig):
    """A Llama's, and what the published config and the config of the graph transformer say."""

    model_type = "wild_graphgpt"

    graph_hidden_size: int = 8
    max_nodes: int = 40
    max_edges: int = 100


class GraphGPTForCausalLM(MultiModalMixin, LlamaForCausalLM):
    """A Llama, with an encoder of nodes and their neighbours."""

    mm_spec = GRAPHGPT
    config_class = GraphGPTConfig

    def __init__(self, config: GraphGPTConfig) -> None:
        super().__init__(config)
        self.nodes = nn.Linear(config.graph_hidden_size, config.hidden_size)
        self.neighbours = nn.Linear(config.graph_hidden_size, config.hidden_size)
        self.post_init()

    def embed_graph(self, graph_node: Any, edge_index: Any) -> list[torch.Tensor]:
        """Encode graphs to rows (nodes, hidden_size)."""
        rows = []
        for features, edges in zip(graph_node, edge_index, strict=True):
            neighbours = self.neighbours(features)[edges[0]]
            rows.append(self.nodes(features).index_add(0, edges[1], neighbours))
        return rows


def make_tokenizer() -> Any:
    special = ["<g_patch>", "<g_start>", "<g_end>", "<graph>"]
    return make_llama_tokenizer(special, make_vicuna_template(SYSTEM, "'<graph>'"))


def draw(rng: random.Random) -> list[Message]:
    """Draw a question about one graph, or about two."""
    parts = [make_text_part(draw_text(rng))]
    for _ in range(rng.randint(1, 2)):
        generator = torch.Generator().manual_seed(rng.randrange(1000))
        features = torch.randn(rng.choice([1, 2, 7, 40]), 8, generator=generator)
        edges = torch.randint(0, len(features), (2, rng.choice([0, 1, 9, 100])), generator=generator)
        parts.append(make_item_part("graph", {"graph_node": features, "edge_index": edges}))
        parts.append(make_text_part(draw_text(rng)))
    return [make_message("user", *parts)]


def expand(tokenizer: Any, config: Any, messages: list[Message]) -> Expansion:
    """Return what GraphGPT makes of a chat."""
    prompt = write_vicuna(SYSTEM, messages, {"graph": "<graph>"})
    expansion = Expansion()
    graphs = collect_items(messages)["graph"]
    for graph in graphs:
        patches = "<g_patch>" * len(graph["graph_node"])
        prompt = prompt.replace("<graph>", f"<g_start>{patches}<g_end>", 1)
    waiting = iter(graphs)
    start, patch = tokenizer.convert_tokens_to_ids(["<g_start>", "<g_patch>"])
    for token in tokenizer(prompt).input_ids:
        if token == patch:
            expansion.add_rows(1, patch)
            continue
        if token == start:
            expansion.add_item("graph", **next(waiting))
        expansion.add_ids([token])
    return expansion


def make_config(vocab_size: int) -> GraphGPTConfig:
    return GraphGPTConfig(vocab_size=vocab_size, **SIZES)


MODEL = WildModel(GRAPHGPT, "GraphGPTForCausalLM", make_tokenizer, make_config, draw, expand)
