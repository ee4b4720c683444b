"""Classes of transformers that vLLM runs: their registration, and what is refused."""

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import conversion_mapping
from vllm import ModelRegistry
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import LinearBase

from examples.series import CHECKPOINT
from examples.series.configuration import WavesConfig
from mmkit import SpecError, serve_transformers
from mmkit.model.weight_names import WeightNames
from mmkit.testing.vllm_model import load_model
from mmkit.vllm_api.checkpoint_processors import load_model_config
from tests.path import one_classes
from tests.unit.common import expect_refusal, refuses

HOME = "tests.path.one_classes"


def import_vllm_class(name: str) -> Any:
    module = importlib.import_module(f"mmkit.model.generated.{HOME}.{name}")
    return getattr(module, name)


def make_folder(folder: Path, name: str) -> Path:
    """Write the config of a class, and the tokenizer."""
    config = json.loads((CHECKPOINT / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_text((CHECKPOINT / file).read_text())
    return folder


def load(folder: Path, name: str) -> Any:
    """Make vLLM's model of a class, with random weights."""
    serve_transformers(f"{HOME}:{name}", WavesConfig)
    ModelRegistry.register_model(name, import_vllm_class(name))  # no process is spawned to look at it
    return load_model(load_model_config(make_folder(folder, name)))


def test_the_class_for_vllm_can_be_read() -> None:
    vllm_class = import_vllm_class("RightForCausalLM")
    assert vllm_class.hf_class is one_classes.RightForCausalLM
    assert vllm_class.__module__ == f"mmkit.model.generated.{HOME}.RightForCausalLM"
    assert "call_on_hf_model(HF_CLASS.embed_series)" in inspect.getsource(vllm_class)
    assert import_vllm_class("RightForCausalLM") is vllm_class


def test_registration_imports_no_class_and_can_be_repeated() -> None:
    for _ in range(2):
        serve_transformers("no_such_package.model:NoSuchForCausalLM", WavesConfig)
    registered = ModelRegistry.models["NoSuchForCausalLM"]
    assert registered.module_name == "mmkit.model.generated.no_such_package.model.NoSuchForCausalLM"


def test_two_packages_with_one_architecture() -> None:
    serve_transformers("first.model:TwiceForCausalLM")
    sentence = (
        "architecture TwiceForCausalLM: expected one class of this name, got "
        "mmkit.model.generated.first.model.TwiceForCausalLM and "
        "mmkit.model.generated.second.model.TwiceForCausalLM. Rename one of them, or leave the plugin of its package "
        "out of VLLM_PLUGINS."
    )
    expect_refusal(SpecError, sentence, serve_transformers, "second.model:TwiceForCausalLM")

    # one of vLLM's classes may be replaced
    serve_transformers("second.model:LlavaForConditionalGeneration")
    ModelRegistry.register_model(
        "LlavaForConditionalGeneration", "vllm.model_executor.models.llava:LlavaForConditionalGeneration"
    )


def test_a_name_of_no_class() -> None:
    sentence = "serve_transformers: expected package.module:Class, or a class at the top of a module, got pulse.model:."
    expect_refusal(SpecError, sentence, serve_transformers, "pulse.model")


CLASSES = [
    ("WithoutSpecForCausalLM", ": expected a class with a ModelSpec as mm_spec, got none. Derive the class from "
        "mmkit.training.MultiModalMixin, and set mm_spec."),
    ("WithoutEncoderForCausalLM", ": expected a method embed_series(self, series), got none."),
    ("RawForCausalLM", ": expected items that take positions of a prompt, got raw input. Write a class of "
        "mmkit.MultiModalModel."),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sentence"), CLASSES, ids=[name for name, _ in CLASSES])
def test_classes_that_are_no_such_model(name: str, sentence: str) -> None:
    expect_refusal(SpecError, f"{HOME}.{name}{sentence}", import_vllm_class, name)


MODELS = [
    ("ComputedForCausalLM", "waves, ComputedForCausalLM.__init__, encoder.norm: expected a tensor that is not computed "
        "from parameters, got one that is. Compute it in the method that reads it."),
    ("ReadForCausalLM", "waves, ReadForCausalLM.__init__: expected a class whose __init__ reads no values of its "
        "parameters, which have none yet, got "),
    ("WithDecoderForCausalLM", "waves, WithDecoderForCausalLM.vllm_towers: expected names of modules beside the "
        "decoder, as named_modules() has them, got 'model'."),
    ("HeadlessForCausalLM", "waves, HeadlessForCausalLM: expected a language model that get_decoder returns, got the "
        "whole model. Name it: def get_decoder(self): return self.language_model."),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sentence"), MODELS, ids=[name for name, _ in MODELS])
def test_models_that_cannot_be_made(name: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught, load(tmp_path, name):
        pass
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("name", ["OtherNameForCausalLM", "DecodingForCausalLM"])
def test_a_language_model_under_another_name(name: str, tmp_path: Path) -> None:
    with load(tmp_path, name) as model:
        assert isinstance(model.model.llm.model.layers[0].mlp.down_proj, LinearBase)
        assert model.compute_logits(torch.zeros(1, 96)).shape == (1, model.config.vocab_size)


def test_layers_of_vllm_beside_the_decoder(tmp_path: Path) -> None:
    with load(tmp_path, "WithTowerForCausalLM") as model:
        encoder = model.model.encoder
        assert isinstance(encoder.up, LinearBase)
        assert not isinstance(encoder.down, LinearBase)
        assert isinstance(model.model.model.layers[0].mlp.down_proj, LinearBase)


def test_adapters_beside_towers_with_layers_of_vllm(tmp_path: Path) -> None:
    name = "WithTowerForCausalLM"
    vllm_class = import_vllm_class(name)
    ModelRegistry.register_model(name, vllm_class)
    config = EngineArgs(str(make_folder(tmp_path, name)), enable_lora=True).create_engine_config()
    sentence = (
        "waves, WithTowerForCausalLM: expected vllm_towers without enable_lora, got both. Leave vllm_towers out: the "
        "towers then have no layers that adapters change."
    )
    with refuses(SpecError, sentence):
        vllm_class(vllm_config=config)


def make_weight_names(name: str, conversion: Any) -> WeightNames:
    """Return the names of the weights of a class, for which transformers has a conversion."""
    conversion_mapping.register_checkpoint_conversion_mapping(name, [conversion], overwrite=True)
    with torch.device("meta"):
        model = getattr(one_classes, name)(WavesConfig.from_pretrained(CHECKPOINT))
    return WeightNames(f"waves, {name}", model)


def test_names_of_weights_without_the_prefix_of_the_base_model() -> None:
    renaming = conversion_mapping.WeightRenaming(r"^published\.", "encoder.")
    names = make_weight_names("RightForCausalLM", renaming)
    assert names.rename("layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert names.rename("model.norm.weight") == "model.norm.weight"
    assert names.rename("published.up.weight") == "encoder.up.weight"
    assert names.rename("model.published.up.weight") == "model.published.up.weight"  # no renaming matches
    assert names.rename("lm_head.weight") == "lm_head.weight"


def test_a_weight_whose_values_transformers_converts() -> None:
    converter = conversion_mapping.WeightConverter(
        "encoder.up.weight", "encoder.up.weight", operations=[conversion_mapping.Transpose(0, 1)]
    )
    names = make_weight_names("ConvertedForCausalLM", converter)
    sentence = (
        "waves, ConvertedForCausalLM, weight encoder.up.weight: expected the values of a parameter of the class, got "
        "some that transformers splits, joins or turns. Load the checkpoint by from_pretrained of the class, and save "
        "it by save_pretrained(folder, save_original_format=False)."
    )
    weights = [("model.norm.weight", torch.zeros(1)), ("encoder.up.weight", torch.zeros(1))]
    expect_refusal(SpecError, sentence, list, names.refuse_converted(weights))


FORWARDS = [
    ("SquaredForCausalLM", "waves, SquaredForCausalLM.forward: expected logits that are the head's result, scaled, or "
        "capped by final_logit_softcapping, got other changes. Serve the model by a class of mmkit.MultiModalModel "
        "that computes them."),
    ("IdsForCausalLM", "waves, IdsForCausalLM.forward: expected a forward that takes inputs_embeds and position_ids, "
        "and calls decoder and head, got TypeError: "),
    ("UncountedForCausalLM", "waves, UncountedForCausalLM.forward: expected a forward that passes position_ids on to "
        "the language model, got none in its call. Between MultiModalMixin and your class, put a class with "
        "def forward(self, **inputs): return self.language_model(**inputs)."),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sentence"), FORWARDS, ids=[name for name, _ in FORWARDS])
def test_forwards_that_vllm_cannot_run(name: str, sentence: str, tmp_path: Path) -> None:
    with load(tmp_path, name) as model, pytest.raises(SpecError) as caught:
        model.compute_logits(torch.zeros(1, 96))
    assert str(caught.value).startswith(sentence)
