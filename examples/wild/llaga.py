"""LLaGA reads the neighbourhood of a node in a graph, as a fixed template of the embeddings of its nodes.

Source: https://github.com/VITA-Group/LLaGA at 288240f, paper arXiv 2402.08170, Apache 2.0.

A template is a tree: each node has `sample_neighbor_size` children, over `use_hop` hops. Where a neighbour is missing
there is no node: -1 here, -500 there. Between the hops stand rows that are parameters of the model.
"""

from mmkit import Modality, ModelSpec, Record, Tensor, batched, between, cfg, embed, item, replace, tok, where

CHILDREN, HOPS = cfg.sample_neighbor_size, cfg.use_hop
# the sum of CHILDREN**hop over the hops 0 to HOPS
NODES = where(CHILDREN == 1, HOPS + 1, (CHILDREN ** (HOPS + 1) - 1) // (CHILDREN - 1))
# special rows stand before, between and after the hops
SPECIAL_ROWS = where(cfg.mm_use_graph_special_token, HOPS + 2, 0)

LLAGA = ModelSpec(
    "llaga",
    Modality(
        "graph",
        item=Record(
            nodes=Tensor((NODES,), "int64", bound=between(-1, cfg.num_nodes - 1)),
            embeddings=Tensor((item.nodes.length, cfg.mm_hidden_size)),
        ),
        fields={"nodes": batched(), "embeddings": batched()},
        layout=embed(tok[cfg.graph_token]) * (NODES + SPECIAL_ROWS),
        update=replace(tok["<graph>"]),
    ),
)
