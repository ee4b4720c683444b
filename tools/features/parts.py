"""What some features need beside the checkpoint: adapters, drafts, heads, quantised weights.

All of it is random, and tiny.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def write_adapter(folder: Path, checkpoint: Path, *prefixes: str) -> Path:
    """Write a LoRA adapter for the projections of layers whose names start with some prefixes."""
    folder.mkdir()
    torch.manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    targets: set[str] = set()
    for name, weight in load_file(checkpoint / WEIGHTS).items():
        module = name.removesuffix(".weight")
        if name.startswith(prefixes) and module.endswith(("_proj", "fc1", "fc2")):
            rows, columns = weight.shape
            lora = f"base_model.model.{module}.lora"
            tensors[f"{lora}_A.weight"] = torch.randn(8, columns) * columns**-0.5
            tensors[f"{lora}_B.weight"] = torch.randn(rows, 8) * 0.5
            targets.add(module.rpartition(".")[2])
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 8,
        "bias": "none",
        "target_modules": sorted(targets),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_variant(
    folder: Path, checkpoint: Path, weights: dict[str, torch.Tensor], **fields: Any
) -> Path:
    """Write the checkpoint with other weights, and with further fields of its config."""
    shutil.copytree(checkpoint, folder)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def write_classifier(folder: Path, checkpoint: Path, labels: int = 2) -> Path:
    """Write the checkpoint with the head of a classifier."""
    torch.manual_seed(2)
    weights = load_file(checkpoint / WEIGHTS)
    weights["language_model.score.weight"] = torch.randn(labels, 64)
    names = {i: str(i) for i in range(labels)}
    return write_variant(folder, checkpoint, weights, num_labels=labels, id2label=names)


def quantise(folder: Path, checkpoint: Path) -> Path:
    """Write the checkpoint with the language model's layers in int8, as compressed-tensors does."""
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    weights: dict[str, torch.Tensor] = {}
    for name, weight in load_file(checkpoint / WEIGHTS).items():
        if name.startswith("language_model.model.layers.") and name.endswith("_proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / 127
            weights[f"{name}_scale"] = scale
            weight = (weight / scale).round().to(torch.int8)
        weights[name] = weight.contiguous()
    ignored = ["re:.*vision_tower.*", "re:.*multi_modal_projector.*", "re:.*lm_head"]
    scheme = preset_name_to_scheme("W8A8", ["Linear"])
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format="int-quantized", ignore=ignored
    )
    return write_variant(folder, checkpoint, weights, quantization_config=config.to_dict())


def write_draft(folder: Path, checkpoint: Path, kind: str) -> Path:
    """Write a Llama of one layer that drafts for the language model, or an EAGLE or EAGLE-3."""
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    text = AutoConfig.from_pretrained(checkpoint).text_config.to_dict()
    config = LlamaConfig(**{**text, "num_hidden_layers": 1, "dtype": "float32"})
    torch.manual_seed(3)
    model = LlamaForCausalLM(config)
    folder.mkdir()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if kind == "eagle":
        config.architectures = ["EagleLlamaForCausalLM"]
        weights = convert_to_eagle(weights, config.hidden_size)
    elif kind == "eagle3":
        config.architectures = ["LlamaForCausalLMEagle3"]
        config.draft_vocab_size = config.vocab_size
        config.eagle_aux_hidden_state_layer_ids = [0, 1, 2]
        weights = convert_to_eagle3(weights, config.hidden_size)
    else:
        config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, folder)
    return folder


def convert_to_eagle(weights: dict[str, torch.Tensor], width: int) -> dict[str, torch.Tensor]:
    """Return the weights of a Llama under the names of an EAGLE, with its projection."""
    weights = replace_in_names(weights, "model.", "")
    for name in ("embed_tokens", "lm_head", "norm", "layers.0.input_layernorm"):
        del weights[f"{name}.weight"]
    weights["fc.weight"] = torch.randn(width, 2 * width) * 0.1
    return weights


def convert_to_eagle3(weights: dict[str, torch.Tensor], width: int) -> dict[str, torch.Tensor]:
    """Return the weights of a Llama under the names of an EAGLE-3, with its projections."""
    weights = replace_in_names(weights, "model.layers.0.", "midlayer.")
    weights = replace_in_names(weights, "model.", "")
    del weights["embed_tokens.weight"]
    for letter in "qkv":
        name = f"midlayer.self_attn.{letter}_proj.weight"
        weights[name] = weights[name].repeat(1, 2)
    weights["midlayer.hidden_norm.weight"] = torch.ones(width)
    weights["fc.weight"] = torch.randn(width, 3 * width) * 0.1
    return weights


def replace_in_names(
    weights: dict[str, torch.Tensor], old: str, new: str
) -> dict[str, torch.Tensor]:
    """Return the weights under other names."""
    return {name.replace(old, new): tensor for name, tensor in weights.items()}
