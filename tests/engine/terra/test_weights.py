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


def test_the_reference_has_the_published_names_and_sizes() -> None:
    """The names of the other weights begin with "model.", and their sizes add up to the published number."""
    with torch.device("meta"):
        state = LlamaActionForCausalLM(LlamaActionConfig()).state_dict()

    for name, shape in PUBLISHED_SHAPES.items():
        assert state[name].shape == shape
    for name in state.keys() - PUBLISHED_SHAPES.keys():
        assert name.startswith("model.")
    num_weights = sum(tensor.numel() for tensor in state.values())
    assert num_weights == pytest.approx(2.04e9, rel=0.01)
