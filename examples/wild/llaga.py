"""LLaGA reads the neighbourhood of a node in a graph, as a fixed template of the embeddings of its nodes.

Source: https://github.com/VITA-Group/LLaGA at 288240f, paper arXiv 2402.08170, Apache 2.0.

A template is a tree: each node has `sample_neighbor_size` children, over `use_hop` hops. Where a neighbour is missing
there is no node: -1 here, -500 there. Between the hops stand rows that are parameters of the model.
"""

from mmkit import Modality, ModelSpec, Record, Scope, Tensor, batched, between, cfg, embed, item, replace, tok


def count_nodes(scope: Scope) -> int:
    """Return the nodes of a template."""
    count = 0
    for hop in range(scope.cfg.use_hop + 1):
        count += scope.cfg.sample_neighbor_size**hop
    return count


def count_rows(scope: Scope) -> int:
    """Return the nodes of a template, and with special rows one before, between and after the hops."""
    count = count_nodes(scope)
    if scope.cfg.mm_use_graph_special_token:
        count += scope.cfg.use_hop + 2
    return count


LLAGA = ModelSpec(
    "llaga",
    Modality(
        "graph",
        item=Record(
            nodes=Tensor((count_nodes,), "int64", bound=between(-1, cfg.num_nodes - 1)),
            embeddings=Tensor((item.nodes.length, cfg.mm_hidden_size)),
        ),
        fields={"nodes": batched(), "embeddings": batched()},
        layout=embed(tok[cfg.graph_token]) * count_rows,
        update=replace(tok["<graph>"]),
    ),
)
