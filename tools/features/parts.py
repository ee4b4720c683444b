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


def adapter(folder: Path, checkpoint: Path, *parts: str) -> Path:
    """A LoRA adapter for the projections of all layers whose names start with some prefixes."""
    folder.mkdir()
    torch.manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    targets: set[str] = set()
    for name, weight in load_file(checkpoint / WEIGHTS).items():
        module = name.removesuffix(".weight")
        if name.startswith(parts) and module.endswith(("_proj", "fc1", "fc2")):
            rows, columns = weight.shape
            tensors[f"base_model.model.{module}.lora_A.weight"] = (
                torch.randn(8, columns) * columns**-0.5
            )
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, 8) * 0.5
            targets.add(module.rpartition(".")[2])
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": sorted(targets),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(folder: Path, checkpoint: Path, lora: Path) -> Path:
    """The checkpoint with the weights of an adapter added to its own."""
    weights, added = load_file(checkpoint / WEIGHTS), load_file(lora / "adapter_model.safetensors")
    for name in [name for name in added if name.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        weights[f"{module}.weight"] += added[name.replace("lora_A", "lora_B")] @ added[name]
    return changed(folder, checkpoint, weights)


def changed(
    folder: Path, checkpoint: Path, weights: dict[str, torch.Tensor], **config: Any
) -> Path:
    """The checkpoint with other weights, and with more in its config."""
    shutil.copytree(checkpoint, folder)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**known, **config}))
    return folder


def with_head(folder: Path, checkpoint: Path, labels: int = 2) -> Path:
    """The checkpoint with the head of a classifier."""
    torch.manual_seed(2)
    weights = load_file(checkpoint / WEIGHTS)
    weights["language_model.score.weight"] = torch.randn(labels, 64)
    return changed(
        folder, checkpoint, weights, num_labels=labels, id2label={i: str(i) for i in range(labels)}
    )


def quantised(folder: Path, checkpoint: Path) -> Path:
    """The checkpoint with the language model's layers in int8, as compressed-tensors has them."""
    weights: dict[str, torch.Tensor] = {}
    for name, weight in load_file(checkpoint / WEIGHTS).items():
        if name.startswith("language_model.model.layers.") and name.endswith("_proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / 127
            weights[f"{name}_scale"] = scale
            weight = (weight / scale).round().to(torch.int8)
        weights[name] = weight.contiguous()
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": {**numbers, "strategy": "channel", "dynamic": False},
        "input_activations": {**numbers, "strategy": "token", "dynamic": True},
    }
    ignored = ["re:.*vision_tower.*", "re:.*multi_modal_projector.*", "re:.*lm_head"]
    quantisation = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": scheme},
        "ignore": ignored,
    }
    return changed(folder, checkpoint, weights, quantization_config=quantisation)


def draft(folder: Path, checkpoint: Path, kind: str) -> Path:
    """A Llama of one layer that drafts for the language model, or an EAGLE or EAGLE-3 for it."""
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    text = AutoConfig.from_pretrained(checkpoint).text_config.to_dict()
    config = LlamaConfig(**{**text, "num_hidden_layers": 1, "dtype": "float32"})
    torch.manual_seed(3)
    model = LlamaForCausalLM(config)
    folder.mkdir()
    config.architectures = ["LlamaForCausalLM"]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    width = config.hidden_size
    if kind == "eagle":
        config.architectures = ["EagleLlamaForCausalLM"]
        for name in (
            "model.embed_tokens",
            "lm_head",
            "model.norm",
            "model.layers.0.input_layernorm",
        ):
            del weights[f"{name}.weight"]
        weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
        weights["fc.weight"] = torch.randn(width, 2 * width) * 0.1
    if kind == "eagle3":
        config.architectures = ["LlamaForCausalLMEagle3"]
        config.draft_vocab_size = config.vocab_size
        config.eagle_aux_hidden_state_layer_ids = [0, 1, 2]
        layer = "model.layers.0."
        weights = {
            name.replace(layer, "midlayer.").removeprefix("model."): t
            for name, t in weights.items()
        }
        del weights["embed_tokens.weight"]
        for letter in "qkv":
            name = f"midlayer.self_attn.{letter}_proj.weight"
            weights[name] = weights[name].repeat(1, 2)
        weights["midlayer.hidden_norm.weight"] = torch.ones(width)
        weights["fc.weight"] = torch.randn(width, 3 * width) * 0.1
    config.save_pretrained(folder)
    save_file(
        {name: t.contiguous() for name, t in weights.items()}, folder / WEIGHTS, {"format": "pt"}
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, folder)
    return folder
