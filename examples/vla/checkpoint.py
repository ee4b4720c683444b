"""A tiny checkpoint with random weights: LLaVA's, with 256 more tokens and the statistics of a robot's actions."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from examples.llava_like import checkpoint as llava

from . import ARCHITECTURE
from .spec import BINS

STATISTICS = {
    # x, y, z in metres, three angles in radians, and the gripper
    "q01": [-0.03, -0.04, -0.04, -0.12, -0.16, -0.21, 0.0],
    "q99": [0.03, 0.04, 0.04, 0.11, 0.16, 0.2, 1.0],
}


def make_checkpoint(folder: Path) -> Path:
    """Write config, weights, tokenizer and image processor; the folder is made if it does not exist."""
    llava.make_checkpoint(folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            more = torch.randn(BINS, tensor.shape[1], generator=generator) * 0.2
            weights[name] = torch.cat([tensor, more])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [ARCHITECTURE], "norm_stats": STATISTICS}
    config["text_config"]["vocab_size"] += BINS
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder
