"""Pixels that come as bytes are normalised as the checkpoint's image processor normalises them."""

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config

from mmkit import MultiModalModel, SpecError
from mmkit.testing.options import BYTES_OPTIONS
from mmkit.vllm_api.normalization import (
    Normalization,
    normalize_bytes,
    read_normalization,
    read_normalization_of_all,
)
from tests import oracles
from tests.unit.common import expect_refusal

NORM = Normalization([0.5, 0.25, 0.125], [0.5, 1.0, 2.0], 1 / 255)


def normalize(pixels: torch.Tensor, normalization: Normalization = NORM) -> torch.Tensor:
    return normalize_bytes(normalization.make_torch_module(), pixels, torch.float32, "Model.normalize_pixels")


def test_bytes_become_what_the_processor_of_transformers_makes() -> None:
    """By vLLM's module and by the one for older releases."""
    info = oracles.processor("qwen2_vl").info  # vLLM normalises its pixels on the device
    image_processor = info.get_hf_processor().image_processor
    image = torch.randint(0, 256, (3, 60, 50), dtype=torch.uint8)
    floats = image_processor(image, return_tensors="pt")["pixel_values"]
    pixels = image_processor(image, **BYTES_OPTIONS, return_tensors="pt")["pixel_values"]
    assert pixels.dtype == torch.uint8
    normalization = read_normalization(info)
    torch.testing.assert_close(normalize(pixels, normalization), floats, rtol=0, atol=1e-6)
    with set_current_vllm_config(VllmConfig()):
        module = normalization.make_module()
    torch.testing.assert_close(normalize_bytes(module, pixels, torch.float32, ""), floats, rtol=0, atol=1e-6)
    assert not module.state_dict()


@pytest.mark.parametrize("shape", [(3, 4, 2), (5, 3, 4, 2), (2, 5, 3, 4, 2)])
def test_each_channel_is_normalised_by_its_own_values(shape: tuple[int, ...]) -> None:
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
    mean = torch.tensor(NORM.image_mean)[:, None, None]
    std = torch.tensor(NORM.image_std)[:, None, None]
    expected = (pixels / 255 - mean) / std
    torch.testing.assert_close(normalize(pixels), expected, rtol=0, atol=1e-6)
    # patches: a row is the values of the channels, one channel after the other
    patches = pixels.reshape(-1, 24)
    torch.testing.assert_close(normalize(patches), expected.reshape(-1, 24), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(4, 2, 3), (5, 4, 2, 3), (5, 25), (24,)])
def test_pixels_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    sentence = (
        "Model.normalize_pixels: expected pixels (..., 3, height, width), or (rows, 3 * values), got shape "
        f"{shape}. Give the channels before height and width."
    )
    with pytest.raises(SpecError) as refusal:
        normalize(torch.zeros(shape, dtype=torch.uint8))
    assert str(refusal.value) == sentence


def test_a_processor_whose_values_bytes_cannot_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    info = oracles.processor("qwen2_vl").info
    processor = info.get_hf_processor()
    assert read_normalization_of_all(info) == read_normalization(info, "video_processor")

    with monkeypatch.context() as patch:
        patch.setattr(processor.video_processor, "image_mean", 0.5)
        with pytest.raises(SpecError, match=VIDEOS):
            read_normalization_of_all(info)

    with monkeypatch.context() as patch:
        patch.setattr(processor.image_processor, "image_std", None)
        sentence = "proc.image_processor.image_std: expected a number for each channel, as it normalises, got None."
        expect_refusal(SpecError, sentence, read_normalization, info)

    with monkeypatch.context() as patch:
        patch.setattr(processor.image_processor, "do_normalize", False)
        patch.setattr(processor.image_processor, "do_rescale", False)
        assert read_normalization(info) == Normalization([0.0], [1.0], 1.0)

    info_of_text = oracles.processor("qwen2_audio").info
    sentence = (
        "proc.image_processor: expected a checkpoint with an image_processor, which says how bytes are normalised, got "
        "a Qwen2AudioProcessor without one."
    )
    expect_refusal(SpecError, sentence, read_normalization, info_of_text)


VIDEOS = (
    r"qwen2_vl\.video: expected a video_processor that normalises as the image_processor, Normalization\(.*\), got "
    r"Normalization\(image_mean=\[0\.5\], .*\)\. Leave supports_mm_device_do_normalize out of the model class\."
)


@pytest.mark.parametrize("supports", [True, False])
def test_what_the_mixin_makes_of_pixels(supports: bool) -> None:
    class Model(MultiModalModel, nn.Module):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self._dtype = torch.bfloat16
            self.mm_bytes_norm = NORM.make_torch_module() if supports else None

    model = Model()
    floats = torch.rand(2, 3, 4, 4)
    assert torch.equal(model.normalize_pixels(floats), floats.bfloat16())
    sentence = (
        "Model.normalize_pixels: expected floats, or uint8 and supports_mm_device_do_normalize = True in the class"
    )
    expect_refusal(SpecError, f"{sentence}, got torch.int64.", model.normalize_pixels, torch.zeros(1, 3, 4, 4).long())
    pixels = (255 * floats).byte()
    if supports:
        assert torch.equal(model.normalize_pixels(pixels), normalize(pixels).bfloat16())
    else:
        expect_refusal(SpecError, f"{sentence}, got torch.uint8.", model.normalize_pixels, pixels)
