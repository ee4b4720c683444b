"""Weights: the names of all versions of transformers, none missing and none too many."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from examples.llava_like import ARCHITECTURE
from examples.llava_like.reference import Reference
from tests.engine.weights import Weights, load_model, new_model

OVERRIDES = {"architectures": [ARCHITECTURE]}

UNUSED = ("vision_tower.vision_model.encoder.layers.2.", "vision_tower.vision_model.post_layernorm.")
"""Behind the feature layer, the last but one."""

FUSED = re.compile(r"\.(gate_proj|up_proj|[qkv]_proj)\.")
"""Weights that vLLM fuses with others: of a fused weight it is content with a part."""


@pytest.fixture(scope="module")
def weights(checkpoint: Path) -> Weights:
    """With the published names."""
    return load_file(checkpoint / "model.safetensors")


@pytest.fixture
def make_model(llava: Any, checkpoint: Path, tmp_path: Path) -> Callable[..., Any]:
    """A function that makes the model before its weights are loaded."""

    def make(**options: Any) -> Any:
        return new_model(checkpoint, tmp_path, **{"hf_overrides": OVERRIDES, **options})

    return make


def remove(weights: Weights, removed: str) -> Weights:
    """Return all weights but one."""
    return {name: weight for name, weight in weights.items() if name != removed}


# -- names -------------------------------------------------------------------------------------------------------------


class Naming(NamedTuple):
    """How a version of transformers names weights.

    Attributes:
        is_inside: whether the parts of the model are inside another one.
        has_vision_model: whether the vision tower has a model in it.
    """

    is_inside: bool
    has_vision_model: bool

    def rename(self, name: str) -> str:
        """Return a published name as this version has it."""
        if not self.has_vision_model:
            name = name.replace("vision_tower.vision_model.", "vision_tower.")
        if not self.is_inside:
            return name
        if name.startswith("language_model.lm_head."):
            return name.removeprefix("language_model.")
        return "model." + name.replace("language_model.model.", "language_model.", 1)


NAMINGS = [Naming(False, False), Naming(False, True), Naming(True, False), Naming(True, True)]


def rename_all(weights: Weights, naming: Naming) -> Weights:
    return {naming.rename(name): weight for name, weight in weights.items()}


@pytest.mark.parametrize("naming", NAMINGS)
def test_the_names_of_a_version_of_transformers_are_loaded(make_model: Any, weights: Weights, naming: Naming) -> None:
    expected = make_model()
    expected.load_weights(weights.items())
    model = make_model()
    model.load_weights(rename_all(weights, naming).items())
    for name, weight in model.named_parameters():
        assert torch.equal(weight, expected.get_parameter(name))
        assert not weight.isnan().any()


def is_known(names: Iterable[str], weights: Weights) -> bool:
    """Tell whether names are those of a version."""
    names = set(names)
    return any(names == set(rename_all(weights, naming)) for naming in NAMINGS)


def test_the_installed_transformers_is_such_a_version(weights: Weights, reference: Reference, tmp_path: Path) -> None:
    """By the names that it saves, and by those of its modules."""
    reference.model.save_pretrained(tmp_path / "saved")
    assert is_known(load_file(tmp_path / "saved" / "model.safetensors"), weights)
    assert is_known(reference.model.state_dict(), weights)


# -- missing and unexpected weights ------------------------------------------------------------------------------------


def is_needed(name: str) -> bool:
    return not name.startswith(UNUSED) and FUSED.search(name) is None


def test_a_missing_weight_is_an_error(make_model: Any, weights: Weights) -> None:
    needed = [name for name in weights if is_needed(name)]
    assert len(needed) > 30
    model = make_model()
    for name in needed:
        with pytest.raises(ValueError, match=re.escape(name.replace("vision_model.", ""))):
            model.load_weights(remove(weights, name).items())


def test_a_weight_that_the_model_does_not_use_may_be_missing(make_model: Any, weights: Weights) -> None:
    model = make_model()
    for name in weights:
        if not is_needed(name):
            model.load_weights(remove(weights, name).items())


def test_an_update_may_bring_some_of_the_weights(make_model: Any, weights: Weights) -> None:
    model = make_model()
    model.load_weights(weights.items())
    model.eval()  # as vLLM has it when it has loaded it
    model.load_weights(list(weights.items())[:3])


def test_a_missing_weight_is_an_error_through_vllms_loader(
    llava: Any, checkpoint: Path, tmp_path: Path, weights: Weights
) -> None:
    """Also one of vLLM's own linear layers."""
    projection = "language_model.model.layers.0.self_attn.o_proj.weight"
    with pytest.raises(ValueError, match=r"llava_like.load_weights: .* 1 missing: .*layers\.0\.self_attn\.o_proj"):
        load_model(checkpoint, tmp_path, remove(weights, projection), hf_overrides=OVERRIDES)


@pytest.mark.parametrize("name", ["more.weight", "multi_modal_projector.linear_3.bias"])
def test_an_unexpected_weight_is_an_error(make_model: Any, weights: Weights, name: str) -> None:
    with pytest.raises(ValueError, match="no module or parameter"):
        make_model().load_weights({**weights, name: torch.zeros(1)}.items())


# -- the head of a classifier ------------------------------------------------------------------------------------------


@pytest.fixture
def classifier(make_model: Any) -> Any:
    return make_model(runner="pooling", convert="classify")


def find_head(model: Any) -> str:
    """Return the name of the parameter that vLLM adds."""
    (head,) = [name for name, _ in model.named_parameters() if "score" in name]
    return head


def test_the_head_that_vllm_adds_may_be_missing(
    classifier: Any, weights: Weights, caplog: pytest.LogCaptureFixture
) -> None:
    find_head(classifier)
    classifier.load_weights(weights.items())
    assert "llava_like.load_weights: language_model.score.weight not in the checkpoint" in caplog.text


def test_a_head_in_the_checkpoint_is_loaded(classifier: Any, weights: Weights) -> None:
    head = find_head(classifier)
    score = torch.randn_like(classifier.get_parameter(head))
    classifier.load_weights({**weights, head: score}.items())
    assert torch.equal(classifier.get_parameter(head), score)


def test_no_other_weight_of_a_classifier_may_be_missing(classifier: Any, weights: Weights) -> None:
    name = "multi_modal_projector.linear_1.bias"
    with pytest.raises(ValueError, match=r"1 missing: multi_modal_projector\.linear_1\.bias"):
        classifier.load_weights(remove(weights, name).items())


def test_several_feature_layers_are_refused(make_model: Any) -> None:
    sentence = r"expected a clip_vision_model and one vision_feature_layer, got .*\[-2, -1\]"
    with pytest.raises(ValueError, match=sentence):
        make_model(hf_overrides={**OVERRIDES, "vision_feature_layer": [-2, -1]})
