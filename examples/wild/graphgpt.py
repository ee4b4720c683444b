"""GraphGPT reads graphs whose nodes have features, a row for each node, and classifies nodes or predicts links.

Source: https://github.com/HKUDS/GraphGPT at db25a66, paper arXiv 2310.13023, Apache 2.0.
"""

from mmkit import Modality, ModelSpec, Record, Tensor, batched, between, cfg, embed, fields, item, replace, tok

GRAPHGPT = ModelSpec(
    "graphgpt",
    Modality(
        "graph",
        item=Record(
            graph_node=Tensor((between(1, cfg.max_nodes), cfg.graph_hidden_size)),
            # pairs of nodes: an index beyond the nodes is refused, not run
            edge_index=Tensor((2, between(0, cfg.max_edges)), "int64", bound=between(0, item.graph_node.length - 1)),
        ),
        fields={"graph_node": batched(), "edge_index": batched()},
        layout=tok["<g_start>"] + embed(tok["<g_patch>"]) * fields.graph_node.shape[0] + tok["<g_end>"],
        update=replace(tok["<graph>"]),
    ),
)
