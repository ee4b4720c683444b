"""A tiny checkpoint with random weights. Nothing is downloaded."""

from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file

from . import ARCHITECTURE
from .configuration import TerratorchLikeConfig


def make_checkpoint(folder: Path, *, seed: int = 0) -> Path:
    """Write config and weights.

    Args:
        folder: made if it does not exist.
        seed: of the weights.

    Returns:
        The folder.
    """
    config = TerratorchLikeConfig(architectures=[ARCHITECTURE], dtype="float32")
    config.save_pretrained(folder)
    width = config.hidden_size
    shapes = {
        "patches": (width, config.bands, config.patch_size, config.patch_size),
        "location": (width, 2),
        "head": (config.classes, width),
    }
    for layer in range(config.num_hidden_layers):
        shapes[f"layers.{layer}"] = (width, width)
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        weights[f"{name}.weight"] = torch.randn(shape, generator=random) / prod(shape[1:]) ** 0.5
        weights[f"{name}.bias"] = torch.randn(shape[0], generator=random) / 10
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
