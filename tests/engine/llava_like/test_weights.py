"""Weights: the names of all versions of transformers, none missing and none too many."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.model_executor.models.utils import AutoWeightsLoader

from examples.llava_like import ARCHITECTURE
from examples.llava_like.reference import Reference
from tests.engine.weights import Weights, load_model, new_model
from tools.features.parts import WEIGHTS, quantised

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


def test_every_missing_weight_is_an_error(new: Any, checkpoint: Path, weights: Weights, tmp_path: Path) -> None:
    """Each of them by itself, but those that the model does not use; also through vLLM's own loader."""
    model, refused = new(), 0
    for name in weights:
        rest = {key: weight for key, weight in weights.items() if key != name}
        if name.startswith(UNUSED):
            model.load_weights(rest.items())
            continue
        with pytest.raises(ValueError, match=re.escape(name.replace("vision_model.", ""))):
            model.load_weights(rest.items())
        refused += 1
    assert refused == len(weights) - 18 > 50
    model.eval()  # as vLLM has it when it has loaded it: an update may bring some of the weights
    model.load_weights([*weights.items()][:3])
    with pytest.raises(ValueError, match=r"got none missing and more\.weight unexpected"):
        model.load_weights([("more.weight", torch.zeros(1))])
    del rest["language_model.model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(ValueError, match=r"llava_like.load_weights: .*layers\.0\.self_attn\.k_proj\.weight.*missing"):
        load_model(checkpoint, tmp_path, rest, hf_overrides=OVERRIDES)


@pytest.mark.parametrize(
    "name",
    [
        "more.weight",
        "multi_modal_projector.linear_3.bias",
        "language_model.model.layers.0.self_attn.q_proj.bias",
        "language_model.model.layers.2.mlp.gate_proj.weight",
        "vision_tower.vision_model.encoder.layers.3.mlp.fc1.weight",
        "vision_tower.vision_model.more.bias",
    ],
)
def test_every_unexpected_weight_is_an_error(new: Any, weights: Weights, name: str) -> None:
    """Also where vLLM would pass over it: biases, and layers of the vision tower."""
    with pytest.raises(ValueError, match=r"unexpected|no module or parameter"):
        new().load_weights({**weights, name: torch.zeros(1)}.items())


def test_a_class_with_its_own_loader(new: Any, weights: Weights) -> None:
    """One that passes over what its modules lack, as some do. The mapper says what is of no use; others are
    named as in the checkpoint."""

    class Loader:
        def load_weights(self, weights: Any) -> set[str]:
            loader = AutoWeightsLoader(self, ignore_unexpected_prefixes=[""])
            return loader.load_weights(weights, mapper=self.hf_to_vllm_mapper)

    model = new()
    model.__class__ = type("Own", (type(model), Loader), {})
    assert model.load_weights(weights.items())
    surplus = "model.multi_modal_projector.more.weight"
    with pytest.raises(ValueError, match=rf"got none missing and {surplus} unexpected\. Map a name .* in front of"):
        model.load_weights([*weights.items(), (surplus, torch.zeros(1))])


def test_what_vllm_adds_may_be_missing(new: Any, weights: Weights, caplog: pytest.LogCaptureFixture) -> None:
    """The head of a classifier, and nothing else; where the checkpoint has one, it is loaded."""
    model = new(runner="pooling", convert="classify")
    (head,) = (name for name, _ in model.named_parameters() if "score" in name)
    model.load_weights(weights.items())
    assert "llava_like.load_weights: language_model.score.weight is not in the checkpoint" in caplog.text
    score = torch.randn_like(model.get_parameter(head))
    model.load_weights([*weights.items(), (head, score)])
    assert torch.equal(model.get_parameter(head), score)
    with pytest.raises(ValueError, match=r"got multi_modal_projector\.linear_1\.bias missing and none unexpected"):
        model.load_weights(item for item in weights.items() if item[0] != "multi_modal_projector.linear_1.bias")


def test_quantised_weights(llava: Any, checkpoint: Path, tmp_path: Path) -> None:
    """Their scales are weights like others."""
    folder = quantised(tmp_path / "int8", checkpoint)
    weights = load_file(folder / WEIGHTS)
    new_model(folder, tmp_path, hf_overrides=OVERRIDES).load_weights(weights.items())
    del weights["language_model.model.layers.0.mlp.up_proj.weight_scale"]
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.weight_scale missing and none unexpected"):
        new_model(folder, tmp_path, hf_overrides=OVERRIDES).load_weights(weights.items())


def test_several_feature_layers_are_refused(new: Any) -> None:
    sentence = r"expected a clip_vision_model and one vision_feature_layer, got .*\[-2, -1\]"
    with pytest.raises(ValueError, match=sentence):
        new(hf_overrides={**OVERRIDES, "vision_feature_layer": [-2, -1]})
