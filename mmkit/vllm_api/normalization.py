"""How pixels that come as bytes are rescaled and normalised, on the device.

From 0.28 on, vLLM leaves this to the model (`mm_device_do_normalize`) where its class says
`supports_mm_device_do_normalize = True`: image processors then return bytes, a quarter of what
float32 takes on the way to the engine and in the caches.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import SpecError
from .compat import find


class BytesNorm(nn.Module):
    """Rescales and normalises bytes, where vLLM has no module for it: before 0.31.

    ``(pixels * rescale_factor - image_mean) / image_std``, in float32. Arguments and buffers are
    those of vLLM's module.
    """

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(
        self, image_mean: list[float], image_std: list[float], rescale_factor: float, channel: int
    ) -> None:
        super().__init__()
        self.channel = channel
        mean = torch.tensor(image_mean, dtype=torch.float32)
        std = torch.tensor(image_std, dtype=torch.float32)
        self.register_buffer("weight", rescale_factor / std)
        self.register_buffer("bias", -mean / std)

    def forward(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return pixels (rows, channels * values) in a floating dtype."""
        by_channel = pixels.unflatten(1, (self.channel, -1))
        scaled: torch.Tensor = by_channel * self.weight[:, None] + self.bias[:, None]
        return scaled.flatten(1).to(dtype)


_FUSED_NORM: Any = find(
    "model_executor.layers.fusion.mm_input_norm:FusedMMInputNorm", default=BytesNorm
)
"""vLLM's module, which is one kernel on CUDA. It is made only where vLLM has a current config."""


class Normalization(NamedTuple):
    """What an image processor does to the pixels at its end.

    Attributes:
        image_mean: of each channel, or one number for all channels.
        image_std: of each channel, or one number for all channels.
        rescale_factor: 1 where it does not rescale.
    """

    image_mean: list[float]
    image_std: list[float]
    rescale_factor: float

    def make_module(self) -> nn.Module:
        """Return vLLM's module on the device of the model that vLLM is constructing."""
        module: nn.Module = _FUSED_NORM(*self, channel=len(self.image_mean))
        module.to(torch.get_default_device())
        # out of the state of the model: vLLM's dummy weights overwrite what they find there
        for name, buffer in list(module.named_buffers()):
            module.register_buffer(name, buffer, persistent=False)
        return module

    def make_torch_module(self) -> BytesNorm:
        """Return a module that needs no vLLM, on the CPU."""
        return BytesNorm(*self, channel=len(self.image_mean))


def read_normalization(info: Any, part: str = "image_processor") -> Normalization:
    """Return how a checkpoint's image processor rescales and normalises.

    vLLM's own reader takes the files of the checkpoint alone: values that only the class of the
    image processor has are none to it.

    Args:
        info: vLLM's processing info of a model, ours or another one.
        part: of the Hugging Face processor: ``image_processor`` or ``video_processor``.

    Raises:
        SpecError: the processor has no such part, or a part that normalises by no values.
    """
    processor = _load_plain_processor(info)
    where = f"proc.{part}"
    pixel_processor = getattr(processor, part, None)
    if pixel_processor is None:
        expected = f"a checkpoint with an {part}, which says how bytes are normalised"
        raise SpecError(where, expected, f"a {type(processor).__name__} without one")
    image_mean = [0.0]
    image_std = [1.0]
    rescale_factor = 1.0
    if getattr(pixel_processor, "do_rescale", True):
        rescale_factor = float(getattr(pixel_processor, "rescale_factor", 1 / 255))
    if getattr(pixel_processor, "do_normalize", True):
        image_mean = _read_channels(pixel_processor, "image_mean", where)
        image_std = _read_channels(pixel_processor, "image_std", where)
    return Normalization(image_mean, image_std, rescale_factor)


def read_normalization_of_all(info: Any) -> Normalization:
    """Return how a checkpoint normalises images, and videos if its spec has any.

    Args:
        info: the processing info of a spec.

    Raises:
        SpecError: videos are normalised otherwise, or one of the parts cannot be read.
    """
    normalization = read_normalization(info)
    for modality in info.plan.modalities.values():
        if modality.item.vllm_modality != "video":
            continue
        of_videos = read_normalization(info, "video_processor")
        if of_videos != normalization:
            expected = f"a video_processor that normalises as the image_processor, {normalization}"
            remedy = "Leave supports_mm_device_do_normalize out of the model class."
            raise SpecError(modality.where, expected, str(of_videos), remedy)
    return normalization


def _load_plain_processor(info: Any) -> Any:
    """Return the Hugging Face processor as the checkpoint has it.

    Where vLLM leaves normalising to the device, it loads processors that do not normalise.
    """
    config = copy(info.ctx.model_config)
    config.multimodal_config = copy(config.get_multimodal_config())
    config.multimodal_config.mm_device_do_normalize = False
    plain_info = copy(info)
    plain_info.ctx = replace(info.ctx, model_config=config)
    return plain_info.get_hf_processor()


def _read_channels(pixel_processor: Any, name: str, where: str) -> list[float]:
    """Return a value of a part of a Hugging Face processor for each channel.

    Raises:
        SpecError: it has none.
    """
    values = getattr(pixel_processor, name, None)
    if values is None:
        raise SpecError(f"{where}.{name}", "a number for each channel, as it normalises", "None")
    if isinstance(values, (int, float)):
        return [float(values)]
    return [float(value) for value in values]


def normalize_bytes(
    norm: nn.Module, pixels: torch.Tensor, dtype: torch.dtype, where: str
) -> torch.Tensor:
    """Return bytes rescaled and normalised, of their shape and a floating dtype.

    Args:
        norm: of `Normalization`.
        pixels: uint8 (..., channels, height, width), or (rows, channels * values).
        dtype: of the result.
        where: names the caller in errors.

    Raises:
        SpecError: pixels of another shape.
    """
    channels: int = norm.channel  # type: ignore[assignment]
    if pixels.ndim == 2:
        is_shaped = pixels.shape[1] % channels == 0
    else:
        # one number for all channels goes with any number of them
        is_shaped = pixels.ndim >= 3 and channels in (1, pixels.shape[-3])
    if not is_shaped:
        expected = f"pixels (..., {channels}, height, width), or (rows, {channels} * values)"
        got = f"shape {tuple(pixels.shape)}"
        raise SpecError(where, expected, got, "Give the channels before height and width.")
    rows = pixels
    if pixels.ndim > 2:
        rows = pixels.flatten(-3).reshape(-1, pixels.shape[-3:].numel())
    normalized: torch.Tensor = norm(rows, dtype)
    return normalized.view(pixels.shape)
