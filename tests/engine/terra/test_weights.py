"""The published names and sizes, and state dicts that are not complete."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from examples.terra.configuration import LlamaActionConfig
from examples.terra.reference import LlamaActionForCausalLM
from tests.engine.weights import new_model

from .published import make_published

TEMPORAL = "pos_embedding_spatio_temporal.temporal_embeddings.weight"
PUBLISHED_SHAPES = {
    "model.embed_tokens.weight": (262_145, 2048),
    "lm_head.weight": (262_145, 2048),
    "pos_embedding_spatio_temporal.spatio_embeddings.weight": (582, 2048),
    TEMPORAL: (25, 2048),
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


def test_published_names_load_completely_or_not_at_all(terra: Any, tmp_path: Path) -> None:
    """A state dict with a name too few or too many does not load."""
    published = make_published(tmp_path)
    weights = load_file(published / "model.safetensors")
    (tmp_path / "copy").mkdir()
    model = new_model(published, tmp_path / "copy", skip_tokenizer_init=True)
    model.load_weights(weights.items())
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    more = {**weights, "pos_embedding_spatio_temporal.more.weight": torch.zeros(1)}
    with pytest.raises(ValueError, match="no module or parameter"):
        model.load_weights(more.items())
    fresh = new_model(published, tmp_path / "copy", skip_tokenizer_init=True)
    with pytest.raises(ValueError, match=r"1 missing: .*temporal_embeddings\.weight"):
        fresh.load_weights(item for item in weights.items() if item[0] != TEMPORAL)
