"""The encoder, the same for vLLM and for the reference: a small MLP over patches of a series."""

import torch
from torch import nn
from torch.nn.functional import gelu, pad

from .configuration import WavesConfig


class PatchEncoder(nn.Module):
    """Patches of `steps_per_token` steps to rows of `hidden_size`."""

    def __init__(self, config: WavesConfig) -> None:
        super().__init__()
        self.steps = config.steps_per_token
        self.up = nn.Linear(self.steps * config.channels, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        """Encode one series (steps, channels) as (ceil(steps / steps_per_token), hidden_size)."""
        padded = pad(series.to(self.up.weight.dtype), (0, 0, 0, -len(series) % self.steps))
        rows: torch.Tensor = self.down(gelu(self.up(padded.reshape(-1, self.up.in_features))))
        return rows
