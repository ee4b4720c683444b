"""The published names and sizes; `tests/night/test_commands.py` runs a checkpoint that has them."""

import pytest
import torch

from examples.terra.configuration import LlamaActionConfig
from examples.terra.reference import LlamaActionForCausalLM

PUBLISHED_SHAPES = {
    "model.embed_tokens.weight": (262_145, 2048),
    "lm_head.weight": (262_145, 2048),
    "pos_embedding_spatio_temporal.spatio_embeddings.weight": (582, 2048),
    "pos_embedding_spatio_temporal.temporal_embeddings.weight": (25, 2048),
    "action_projection.weight": (2048, 3),
    "action_projection.bias": (2048,),
}


def test_published_names() -> None:
    """The reference has exactly the published names, with the published sizes where the layout sets them."""
    with torch.device("meta"):
        state = LlamaActionForCausalLM(LlamaActionConfig()).state_dict()
    assert {name: tuple(state[name].shape) for name in PUBLISHED_SHAPES} == PUBLISHED_SHAPES
    assert all(name.startswith("model.") for name in state.keys() - PUBLISHED_SHAPES.keys())
    assert sum(tensor.numel() for tensor in state.values()) == pytest.approx(2.04e9, rel=0.01)
