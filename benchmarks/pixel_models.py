"""vLLM's own classes of Qwen2-VL and InternVL, with processors of specs.

Who imports this module registers them.
"""

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.internvl import InternVLChatModel
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration

from examples.gallery.internvl import INTERNVL, MEAN, STD
from examples.gallery.qwen2_vl import QWEN2_VL
from mmkit.vllm_api.normalization import Normalization, normalize_bytes

from .pixels import INTERNVL_BYTES, INTERNVL_FLOATS


@QWEN2_VL.register
class Qwen2VLOfSpec(Qwen2VLForConditionalGeneration):
    """Takes floats, or normalises bytes as vLLM's class does: by `mm_device_do_normalize`."""


@INTERNVL.register
class InternVLOfSpec(InternVLChatModel):
    """Takes the floats of the gallery's spec."""


@INTERNVL_FLOATS.register
class InternVLOfFloats(InternVLChatModel):
    """Takes floats that are normalised already."""


@INTERNVL_BYTES.register
class InternVLOfBytes(InternVLChatModel):
    """Normalises bytes."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.bytes_norm = Normalization(list(MEAN), list(STD), 1 / 255).make_module()
        self.pixel_dtype = vllm_config.model_config.dtype

    def extract_feature(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the features of tiles, uint8 (tiles, 3, size, size)."""
        pixels = normalize_bytes(
            self.bytes_norm, pixel_values, self.pixel_dtype, type(self).__name__
        )
        features: torch.Tensor = super().extract_feature(pixels)
        return features
