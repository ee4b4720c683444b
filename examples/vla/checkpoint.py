"""A tiny checkpoint with random weights: LLaVA's, with OpenVLA's fields in its config, and the tokens for these."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from examples.llava_like import checkpoint as llava

from . import ARCHITECTURE
from .spec import EMPTY_TOKEN

BINS = 256
PADDING = 64
STATISTICS = {
    "town": {
        "action": {
            # x, y, z in metres, three angles in radians, and the gripper, which is not scaled
            "q01": [-0.03, -0.04, -0.04, -0.12, -0.16, -0.21, 0.0],
            "q99": [0.03, 0.04, 0.04, 0.11, 0.16, 0.2, 1.0],
            "mask": [True, True, True, True, True, True, False],
        }
    }
}


def make_checkpoint(folder: Path) -> Path:
    """Write config, weights, tokenizer and image processor; the folder is made if it does not exist."""
    from transformers import AutoTokenizer

    llava.make_checkpoint(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([EMPTY_TOKEN])
    tokenizer.save_pretrained(folder)
    num_tokens = len(tokenizer) + BINS + PADDING

    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            more = torch.randn(num_tokens - len(tensor), tensor.shape[1], generator=generator) * 0.2
            weights[name] = torch.cat([tensor, more])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})

    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [ARCHITECTURE]
    config["norm_stats"] = STATISTICS
    config["n_action_bins"] = BINS
    config["pad_to_multiple_of"] = PADDING
    config["text_config"]["vocab_size"] = num_tokens
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder
