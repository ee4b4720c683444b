"""Pixels as bytes, by torchvision: those of the fast image processors of transformers, in less time.

Copy the class into a package whose model class calls `normalize_pixels`, and write
`process=hf(later(Pixels)(proc.image_processor))`. It is for processors that resize, crop the centre, rescale and
normalise, as those of CLIP, SigLIP, BLIP and ViT do.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torchvision.transforms.v2.functional import InterpolationMode, crop, resize

# PIL's memory is read-only; nothing here writes to it
warnings.filterwarnings("ignore", "The given NumPy array is not writable")

FILTERS = {2: InterpolationMode.BILINEAR, 3: InterpolationMode.BICUBIC}
SIZES = (set(), {"shortest_edge"}, {"height", "width"})


class Pixels:
    """Images to bytes (3, height, width), as an image processor of transformers resizes and crops them."""

    def __init__(self, processor: Any) -> None:
        if getattr(processor, "do_pad", False) or int(processor.resample) not in FILTERS:
            raise ValueError("Pixels takes a processor that only resizes, bilinear or bicubic, and crops.")
        self.filter = FILTERS[int(processor.resample)]
        self.size = dict(processor.size) if processor.do_resize else {}
        if {key for key, side in self.size.items() if side} not in SIZES:
            raise ValueError(f"Pixels takes a shortest edge, or a height and a width, not {self.size}.")
        self.crop = dict(processor.crop_size) if getattr(processor, "do_center_crop", False) else {}

    def __call__(
        self, images: Sequence[Any], do_rescale: bool = False, do_normalize: bool = False
    ) -> dict[str, list[torch.Tensor]]:
        if do_rescale or do_normalize:
            raise ValueError("the model rescales and normalises; leave out do_rescale and do_normalize")
        return {"pixel_values": [self.process(image) for image in images]}

    def process(self, image: Any) -> torch.Tensor:
        array = np.array(getattr(image, "media", image), copy=None)  # vLLM's files are decoded in `media`
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
            raise ValueError(f"a {array.dtype} image of shape {array.shape}; send bytes (height, width, 3)")
        pixels = torch.from_numpy(array).permute(2, 0, 1)  # a view, which torchvision resizes without a copy
        height, width = array.shape[:2]
        if self.size.get("shortest_edge"):
            scale = self.size["shortest_edge"]
            shortest = min(height, width)
            height, width = int(scale * height / shortest), int(scale * width / shortest)
        elif self.size:
            height, width = self.size["height"], self.size["width"]
        pixels = resize(pixels, [height, width], self.filter, antialias=True)
        if self.crop:
            # torchvision's own `center_crop` rounds otherwise; both pad a smaller image with zeros
            top = int((height - self.crop["height"]) / 2)
            left = int((width - self.crop["width"]) / 2)
            pixels = crop(pixels, top, left, self.crop["height"], self.crop["width"])
        return pixels.contiguous()
