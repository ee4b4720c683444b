"""Weights under other names than the class has: vLLM loads what from_pretrained loads."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from examples.series import CHECKPOINT
from examples.series.offline import answer, engine
from examples.series.spec import WAVES
from examples.series.waves import ANSWER_WORDS, FIRST_TEST_SEED, PROMPT, make_wave
from mmkit.model.weight_names import WeightNames
from mmkit.training import MultiModalMixin
from tests.engine.one_class import OneClassWavesForCausalLM, copy_checkpoint, register

MAX_PARAMETERS = 30_000_000
"""Of a model that is made here; a few classes have parts that no size of their config makes small."""

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 300, "pad_token_id": 0, "decoder_layers": 2, "encoder_layers": 2,
    "d_model": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32,
    "encoder_ffn_dim": 32, "depth": 2, "embed_dim": 32, "num_heads": 2, "ffn_dim": 32, "image_size": 28,
    "patch_size": 14, "head_dim": 16, "out_hidden_size": 32, "num_experts": 4, "num_local_experts": 4,
    "moe_intermediate_size": 16, "projector_hidden_size": 32, "hidden_dim": 32, "layers": 2,
    "encoder_hidden_size": 32, "qformer_hidden_size": 32,
}  # fmt: skip
"""Of a config, by the names that transformers gives them."""

OTHERS = {"T5Gemma2ForConditionalGeneration"}
"""Classes that vLLM runs in no such way: an encoder and a decoder with attention to it."""


def shrink(config: Any) -> Any:
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            shrink(value)
        elif name in SIZES and type(value) is int:
            setattr(config, name, SIZES[name])
    return config


def make_model(name: str) -> Any:
    """Return a small model of a class of transformers.

    Skips the test where it cannot be made of such a config.
    """
    model_class = getattr(transformers, name)
    try:
        config = shrink(model_class.config_class())
        with torch.device("meta"):
            num_parameters = sum(weight.numel() for weight in model_class._from_config(config).parameters())
        if num_parameters > MAX_PARAMETERS:
            pytest.skip(f"{num_parameters} parameters")
        return model_class(config)
    except (AttributeError, ImportError, KeyError, RuntimeError, TypeError, ValueError) as error:
        pytest.skip(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("name", sorted(set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()) - OTHERS))
def test_published_names_of_a_class_of_transformers(name: str, tmp_path: Path) -> None:
    """A subclass loads them in transformers, and vLLM gets the names of the class."""
    model = make_model(name)
    model.save_pretrained(tmp_path)
    members = {"mm_spec": SimpleNamespace(name="published"), "__module__": __name__}
    subclass: Any = type(name, (MultiModalMixin, type(model)), members)
    published = set()
    for file in tmp_path.glob("*.safetensors"):
        published.update(load_file(file))

    loaded, info = subclass.from_pretrained(tmp_path, config=model.config, output_loading_info=True)

    assert (info["missing_keys"], info["unexpected_keys"]) == (set(), set())
    weights = model.state_dict()
    for key, weight in loaded.state_dict().items():
        assert torch.equal(weight, weights[key]), key
    names = WeightNames(name, subclass._from_config(model.config))
    unconverted = {key for key in published if not names._is_converted(key)}
    renamed = {names.rename(key) for key in unconverted}
    assert len(renamed) == len(unconverted)
    assert renamed <= weights.keys()


def test_an_engine_loads_other_names(engines: ExitStack, tmp_path: Path) -> None:
    """Names without the prefix of the base model, and a part that transformers is told to rename."""
    register()
    folder = copy_checkpoint(tmp_path / "waves")
    file = folder / "model.safetensors"
    weights = {}
    for name, tensor in load_file(file).items():
        weights[name.removeprefix("model.").replace("encoder.", "published.")] = tensor
    save_file(weights, file, {"format": "pt"})
    renaming = conversion_mapping.WeightRenaming(r"^published\.", "encoder.")
    conversion_mapping.register_checkpoint_conversion_mapping("OneClassWavesForCausalLM", [renaming], overwrite=True)
    series = [make_wave(seed).series for seed in range(FIRST_TEST_SEED, FIRST_TEST_SEED + 10)]
    model, info = OneClassWavesForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert (info["missing_keys"], info["unexpected_keys"]) == (set(), set())
    processor = WAVES.hf_processor(model.config, AutoTokenizer.from_pretrained(CHECKPOINT))
    expected = [model.eval().answer(processor, PROMPT, item, ANSWER_WORDS) for item in series]

    llm = engines.enter_context(engine(folder, enforce_eager=True))

    assert answer(llm, series) == expected
