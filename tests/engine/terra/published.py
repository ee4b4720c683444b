"""A checkpoint of the published layout and names that is small enough for a test."""

from pathlib import Path

import torch

from examples.terra.configuration import LlamaActionConfig
from examples.terra.reference import LlamaActionForCausalLM

SIZES = {"vocab_size": 262_145, "num_image_patches": 576, "num_spatio_embeddings": 582, "pad_token_id": 262_144}


def make_published(folder: Path) -> Path:
    """Write it, with a narrow hidden size and random weights. Returns the folder."""
    torch.manual_seed(0)
    config = LlamaActionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1,
        head_dim=32, architectures=["LlamaActionForCausalLM"], dtype="float32", **SIZES,
    )  # fmt: skip
    assert (config.num_temporal_embeddings, config.num_action_tokens, config.action_dim) == (25, 6, 3)
    LlamaActionForCausalLM(config).save_pretrained(folder)
    return folder
