"""Weights: the names of all versions of transformers, none missing and none too many."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from examples.llava_like import ARCHITECTURE
from examples.llava_like.reference import Reference
from tests.engine.weights import Weights, load_model, new_model

OVERRIDES = {"architectures": [ARCHITECTURE]}
LAYOUTS = [(inside, vision_model) for inside in (True, False) for vision_model in (True, False)]
UNUSED = ("vision_tower.vision_model.encoder.layers.2.", "vision_tower.vision_model.post_layernorm.")
"""Behind the feature layer, the last but one."""


@pytest.fixture(scope="module")
def weights(checkpoint: Path) -> Weights:
    """With the published names."""
    return load_file(checkpoint / "model.safetensors")


@pytest.fixture
def new(llava: Any, checkpoint: Path, tmp_path: Path) -> Callable[..., Any]:
    """Gives a function that makes the model before its weights are loaded."""
    return lambda **options: new_model(checkpoint, tmp_path, **{"hf_overrides": OVERRIDES, **options})


def renamed(name: str, inside: bool, vision_model: bool) -> str:
    """A published name as transformers has it inside, or with less in it."""
    if not vision_model:
        name = name.replace("vision_tower.vision_model.", "vision_tower.")
    if not inside:
        return name
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    return "model." + name.replace("language_model.model.", "language_model.", 1)


def test_names_of_all_versions_of_transformers(
    new: Any, weights: Weights, reference: Reference, tmp_path: Path
) -> None:
    """Among them those that the installed version saves, and those of its modules."""
    expected = new()
    expected.load_weights(weights.items())
    named = []
    for layout in LAYOUTS:
        model = new()
        model.load_weights((renamed(name, *layout), weight) for name, weight in weights.items())
        assert all(torch.equal(weight, expected.get_parameter(name)) for name, weight in model.named_parameters())
        assert not any(weight.isnan().any() for weight in model.parameters())
        named.append({renamed(name, *layout) for name in weights})
    reference.model.save_pretrained(tmp_path / "saved")
    assert set(load_file(tmp_path / "saved" / "model.safetensors")) in named
    assert set(reference.model.state_dict()) in named


def test_a_missing_weight_is_an_error(new: Any, checkpoint: Path, weights: Weights, tmp_path: Path) -> None:
    """Also one of vLLM's own linear layers, and through vLLM's own loader. What the model does not use may be missing;
    of a fused weight vLLM is content with a part."""
    model, refused = new(), 0
    parts = re.compile(r"\.(gate_proj|up_proj|[qkv]_proj)\.")
    for name in weights:
        rest = {key: weight for key, weight in weights.items() if key != name}
        if name.startswith(UNUSED) or parts.search(name):
            model.load_weights(rest.items())
            continue
        with pytest.raises(ValueError, match=re.escape(name.replace("vision_model.", ""))):
            model.load_weights(rest.items())
        refused += 1
    assert refused > 30
    model.eval()  # as vLLM has it when it has loaded it: an update may bring some of the weights
    model.load_weights([*weights.items()][:3])
    projection = "language_model.model.layers.0.self_attn.o_proj.weight"
    rest = {key: weight for key, weight in weights.items() if key != projection}
    with pytest.raises(ValueError, match=r"llava_like.load_weights: .* 1 missing: .*layers\.0\.self_attn\.o_proj"):
        load_model(checkpoint, tmp_path, rest, hf_overrides=OVERRIDES)


@pytest.mark.parametrize("name", ["more.weight", "multi_modal_projector.linear_3.bias"])
def test_an_unexpected_weight_is_an_error(new: Any, weights: Weights, name: str) -> None:
    with pytest.raises(ValueError, match="no module or parameter"):
        new().load_weights({**weights, name: torch.zeros(1)}.items())


def test_what_vllm_adds_may_be_missing(new: Any, weights: Weights, caplog: pytest.LogCaptureFixture) -> None:
    """The head of a classifier, and nothing else; where the checkpoint has one, it is loaded."""
    model = new(runner="pooling", convert="classify")
    (head,) = (name for name, _ in model.named_parameters() if "score" in name)
    model.load_weights(weights.items())
    assert "llava_like.load_weights: language_model.score.weight not in the checkpoint" in caplog.text
    score = torch.randn_like(model.get_parameter(head))
    model.load_weights([*weights.items(), (head, score)])
    assert torch.equal(model.get_parameter(head), score)
    with pytest.raises(ValueError, match=r"1 missing: multi_modal_projector\.linear_1\.bias"):
        model.load_weights(item for item in weights.items() if item[0] != "multi_modal_projector.linear_1.bias")


def test_several_feature_layers_are_refused(new: Any) -> None:
    sentence = r"expected a clip_vision_model and one vision_feature_layer, got .*\[-2, -1\]"
    with pytest.raises(ValueError, match=sentence):
        new(hf_overrides={**OVERRIDES, "vision_feature_layer": [-2, -1]})
