"""vLLM's own classes of Qwen2-VL and InternVL, with the processors of specs that make floats or bytes."""

from typing import Any

import torch
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.models.internvl import InternVLChatModel
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration
from vllm.multimodal import MULTIMODAL_REGISTRY

from benchmarks.pixels import INTERNVL_BYTES, INTERNVL_FLOATS
from examples.gallery.internvl import MEAN, STD
from examples.gallery.qwen2_vl import QWEN2_VL
from mmkit import ModelSpec
from mmkit.vllm_api.normalization import Normalization, normalize_bytes


class Qwen2VLOfSpec(Qwen2VLForConditionalGeneration):
    """Takes floats, or normalises bytes as vLLM's class does: by the option `mm_device_do_normalize`."""


class InternVLOfFloats(InternVLChatModel):
    """Takes floats that are normalised already."""


class InternVLOfBytes(InternVLChatModel):
    """Normalises bytes."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.bytes_norm = Normalization(list(MEAN), list(STD), 1 / 255).make_module()
        self.pixel_dtype = vllm_config.model_config.dtype

    def extract_feature(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the features of tiles, uint8 (tiles, 3, size, size)."""
        pixels = normalize_bytes(self.bytes_norm, pixel_values, self.pixel_dtype, type(self).__name__)
        features: torch.Tensor = super().extract_feature(pixels)
        return features


def register_model(model: Any, spec: ModelSpec) -> None:
    """Register a class under its name, with the processor of a spec."""
    classes = spec.classes
    MULTIMODAL_REGISTRY.register_processor(classes.processor, info=classes.info, dummy_inputs=classes.dummy_inputs)(
        model
    )
    ModelRegistry.register_model(model.__name__, model)


def register() -> None:
    register_model(Qwen2VLOfSpec, QWEN2_VL)
    register_model(InternVLOfFloats, INTERNVL_FLOATS)
    register_model(InternVLOfBytes, INTERNVL_BYTES)
