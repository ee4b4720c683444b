"""The multimodal side of Terra: one action per frame, six positions of the prompt each."""

from mmkit import Modality, ModelSpec, Tensor, already_expanded, batched, cfg, embed

TERRA = ModelSpec(
    "terra",
    Modality(
        "actions",
        # six future waypoints (x, y, t) after every frame; the bound keeps them in the range of any model dtype
        item=Tensor(shape=(cfg.num_action_tokens, cfg.action_dim), bound=1000.0),
        # pad is a reserved id inside the vocabulary, and the prompts carry it at every action position
        layout=embed(cfg.pad_token_id) * cfg.num_action_tokens,
        update=already_expanded(),
        fields={"actions": batched(shape=(cfg.num_action_tokens, cfg.action_dim), dtype="float32")},
        # the last frame has no action
        limit=cfg.num_temporal_embeddings - 1,
    ),
)
