"""The encoder of a picture: it looks for points, and tells where they are.

It is a spatial softmax (Levine et al., End-to-End Training of Deep Visuomotor Policies, 2016): a convolution makes
maps, and of each map only the place where it is large is left. An arm and discs are places, so that this learns in far
fewer steps than rows of patches do.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import gelu

PATCH = 4
CHANNELS = 32


class PointEncoder(nn.Module):
    """Encodes the points of a picture as rows.

    Args:
        config: has `tokens_per_camera`, `num_maps`, `sharpness` and `hidden_size`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_rows = config.tokens_per_camera
        self.sharpness = config.sharpness
        self.patches = nn.Conv2d(3, CHANNELS, PATCH, PATCH)
        self.maps = nn.Conv2d(CHANNELS, config.num_maps, 3, padding=1)
        self.rows = nn.Linear(3 * config.num_maps, self.num_rows * config.hidden_size)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Encode pictures, uint8 (pictures, height, width, 3), as (pictures, tokens_per_camera, hidden_size)."""
        pixels = pictures.permute(0, 3, 1, 2).to(self.rows.weight.dtype) / 127.5 - 1
        # a nearly flat map has its point in the middle of the picture, wherever the disc is, and hardly a gradient
        maps = self.sharpness * self.maps(gelu(self.patches(pixels)))
        height, width = maps.shape[-2:]
        maps = maps.flatten(2)
        weights = maps.softmax(-1)
        x = weights @ _make_axis(width, maps).repeat(height)
        y = weights @ _make_axis(height, maps).repeat_interleave(width)
        strength = 0.1 / self.sharpness * maps.logsumexp(-1)
        rows: torch.Tensor = self.rows(torch.cat([x, y, strength], -1))
        return rows.unflatten(-1, (self.num_rows, -1))


def _make_axis(size: int, like: torch.Tensor) -> torch.Tensor:
    """Return the middles of patches from -1 to 1."""
    return (torch.arange(size, device=like.device, dtype=like.dtype) + 0.5) * 2 / size - 1
