"""The encoder: a convolution over neighbouring frames."""

import torch
from torch import nn
from torch.nn.functional import gelu

from .configuration import VowelsConfig

KERNEL = 3
"""Frames that one row sees."""


class FrameEncoder(nn.Module):
    """Encodes each frame, with its neighbours, as one row of `hidden_size`."""

    def __init__(self, config: VowelsConfig) -> None:
        super().__init__()
        self.frames = nn.Conv1d(config.channels, config.intermediate_size, KERNEL, padding=KERNEL // 2)
        self.rows = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, recording: torch.Tensor) -> torch.Tensor:
        """Encode one recording (frames, channels) as (frames, hidden_size)."""
        channels = recording.to(self.rows.weight.dtype).T
        rows: torch.Tensor = self.rows(gelu(self.frames(channels)).T)
        return rows
