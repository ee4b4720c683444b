"""The published names and sizes, and state dicts that are not complete."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from examples.terra.configuration import LlamaActionConfig
from examples.terra.reference import LlamaActionForCausalLM
from tests.engine.weights import Weights, load_model, new_model

from .published import make_published


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_published(tmp_path_factory.mktemp("published"))


@pytest.fixture
def weights(published: Path) -> Weights:
    return load_file(published / "model.safetensors")


def test_published_names() -> None:
    """The reference has exactly the published names, with the published sizes where the layout sets them."""
    with torch.device("meta"):
        state = LlamaActionForCausalLM(LlamaActionConfig()).state_dict()
    assert state["model.embed_tokens.weight"].shape == state["lm_head.weight"].shape == (262_145, 2048)
    assert state["pos_embedding_spatio_temporal.spatio_embeddings.weight"].shape == (582, 2048)
    assert state["pos_embedding_spatio_temporal.temporal_embeddings.weight"].shape == (25, 2048)
    assert state["action_projection.weight"].shape == (2048, 3)
    assert state["action_projection.bias"].shape == (2048,)
    others = {name for name in state if not name.startswith(("model.", "pos_embedding_spatio_temporal."))}
    assert others == {"lm_head.weight", "action_projection.weight", "action_projection.bias"}
    assert sum(tensor.numel() for tensor in state.values()) == pytest.approx(2.04e9, rel=0.01)


def test_published_names_load_completely(terra: Any, published: Path, weights: Weights, tmp_path: Path) -> None:
    model = new_model(published, tmp_path, skip_tokenizer_init=True)
    model.load_weights(weights.items())
    assert not any(parameter.isnan().any() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("change", "fault"),
    [("missing", "temporal_embeddings.weight missing and none"), ("unexpected", "no module or parameter")],
)
def test_incomplete_checkpoints_are_refused(
    terra: Any, published: Path, weights: Weights, tmp_path: Path, change: str, fault: str
) -> None:
    """A state dict with a name too few or too many does not load."""
    if change == "missing":
        del weights["pos_embedding_spatio_temporal.temporal_embeddings.weight"]
    else:
        weights["pos_embedding_spatio_temporal.more.weight"] = torch.zeros(1)
    with pytest.raises(ValueError, match=fault):
        load_model(published, tmp_path, weights, skip_tokenizer_init=True)
