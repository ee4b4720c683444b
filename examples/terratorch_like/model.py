"""The model for vLLM: a stack of layers over patches, which answers each image with numbers per patch."""

from collections.abc import Iterable

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.pooler import IdentityPooler
from vllm.model_executor.models.interfaces import IsAttentionFree
from vllm.model_executor.models.interfaces_base import attn_type
from vllm.model_executor.models.utils import AutoWeightsLoader

from mmkit import MultiModalModel

from .configuration import TerratorchLikeConfig
from .spec import TERRATORCH_LIKE


@TERRATORCH_LIKE.register
@attn_type("attention_free")
class TerratorchLike(MultiModalModel, nn.Module, IsAttentionFree):
    """Patches of the pixels and a row of the coordinates, mixed by layers without attention."""

    is_pooling_model = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: TerratorchLikeConfig = vllm_config.model_config.hf_config
        width = config.hidden_size
        self.patches = nn.Conv2d(config.bands, width, config.patch_size, stride=config.patch_size)
        self.location = nn.Linear(2, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(width, config.classes)
        self.pooler = IdentityPooler()

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        pixel_values: torch.Tensor,
        location_coords: torch.Tensor,
    ) -> torch.Tensor:
        """Answer images with numbers, float (items, patches, classes).

        Args:
            input_ids, positions, intermediate_tensors, inputs_embeds: vLLM's; the model has no use for them.
            pixel_values: (items, bands, size, size).
            location_coords: coordinates (items, 2).
        """
        dtype = self.head.weight.dtype
        rows = self.patches(pixel_values.to(dtype)).flatten(2).transpose(1, 2)
        rows = rows + self.location(location_coords.to(dtype))[:, None]
        for layer in self.layers:
            rows = rows + torch.relu(layer(rows + rows.mean(dim=1, keepdim=True)))
        return self.head(rows)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights)
