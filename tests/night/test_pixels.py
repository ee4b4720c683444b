"""The pixels of examples/pixels.py are those of the fast processors of transformers, bit for bit."""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from examples.pixels import Pixels
from mmkit.testing.options import BYTES_OPTIONS
from tests.profiles import scaled

SQUARE = {"height": 40, "width": 40}
PROCESSORS = [
    transformers.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
    transformers.CLIPImageProcessor(size={"shortest_edge": 30}, resample=2, do_center_crop=False),
    transformers.CLIPImageProcessor(size={"shortest_edge": 60}, crop_size=SQUARE),
    transformers.CLIPImageProcessor(size={"shortest_edge": 30}, crop_size=SQUARE),
    transformers.SiglipImageProcessor(size=SQUARE),
    transformers.BlipImageProcessor(size=SQUARE),
    transformers.ViTImageProcessor(size=SQUARE, do_resize=False),
]
SIDES = st.integers(2, 200)


@settings(max_examples=scaled(200))
@given(st.sampled_from(PROCESSORS), SIDES, SIDES, st.integers(0, 9))
def test_bytes_are_those_of_transformers(processor: object, width: int, height: int, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    image = Image.fromarray(pixels)
    expected = processor([image], return_tensors="pt", **BYTES_OPTIONS)["pixel_values"][0]
    assert torch.equal(Pixels(processor)([image])["pixel_values"][0], expected)


def test_what_differs_is_refused() -> None:
    lanczos = transformers.CLIPImageProcessor(resample=1)
    with pytest.raises(ValueError, match="only resizes"):
        Pixels(lanczos)
    with pytest.raises(ValueError, match="a shortest edge, or a height"):
        Pixels(transformers.ViTImageProcessor(size={"shortest_edge": 30, "longest_edge": 60}))
    floats = np.zeros((4, 4, 3), np.float32)
    with pytest.raises(ValueError, match="a float32 image"):
        Pixels(PROCESSORS[0])([floats])
