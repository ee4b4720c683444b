"""InternVL: an image becomes tiles of one size and a thumbnail, a video its frames; both between start and end tokens.

InternVL ships no Hugging Face processor; `Tiles` is one.
"""

from collections.abc import Sequence
from math import floor

import numpy as np
import torch
from PIL import Image as PILImage

from mmkit import (
    Image,
    Modality,
    ModelSpec,
    Video,
    batched,
    cfg,
    constant,
    each,
    embed,
    fields,
    flat,
    hf,
    item,
    kwargs,
    later,
    replace,
    tok,
    where,
)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


def grids(least: int, most: int) -> list[tuple[int, int]]:
    """All (columns, rows) of `least` to `most` tiles, fewer tiles first."""
    # the model was trained with the order in which Python's sets hold grids of equally many tiles: it decides ties
    candidates = {(i, j) for n in range(least, most + 1) for i in range(1, n + 1) for j in range(1, n + 1)}
    return sorted((g for g in candidates if least <= g[0] * g[1] <= most), key=lambda grid: grid[0] * grid[1])


class Tiles:
    """Images to tiles and videos to frames, all of one size: float32 (tiles, 3, size, size), normalised."""

    def __init__(self, size: int, least: int, most: int, thumbnail: bool) -> None:
        self.size, self.thumbnail, self.grids = size, thumbnail, grids(least, most)

    def __call__(
        self, images: Sequence[PILImage.Image] = (), videos: Sequence[np.ndarray] = (), **options: object
    ) -> dict[str, torch.Tensor]:  # the request's options have chosen the grids already
        outputs = {}
        for items, pixels, count in (
            ([self.tiles(image) for image in images], "pixel_values_flat", "image_num_patches"),
            ([self.frames(video) for video in videos], "pixel_values_flat_video", "video_num_patches"),
        ):
            if items:
                outputs[pixels] = items[0] if len(items) == 1 else torch.cat(items)
                outputs[count] = torch.tensor([len(item) for item in items])
        return outputs

    def best_grid(self, width: int, height: int) -> tuple[int, int]:
        """(columns, rows) of the nearest aspect ratio; of equally near ones the last that the image fills to a half."""
        best, nearest = (1, 1), float("inf")
        for columns, rows in self.grids:
            distance = abs(width / height - columns / rows)
            half_full = width * height > 0.5 * self.size**2 * columns * rows
            if distance < nearest or (distance == nearest and half_full):
                best, nearest = (columns, rows), distance
        return best

    def tiles(self, image: PILImage.Image) -> torch.Tensor:
        """Tiles of an image, row by row, and its thumbnail if they are several."""
        columns, rows = self.best_grid(*image.size)
        whole = image.resize((self.size * columns, self.size * rows))
        corners = [(self.size * x, self.size * y) for y in range(rows) for x in range(columns)]
        parts = [whole.crop((x, y, x + self.size, y + self.size)) for x, y in corners]
        if self.thumbnail and len(parts) > 1:
            parts.append(image.resize((self.size, self.size)))
        return self.normalised(parts)

    def frames(self, video: np.ndarray) -> torch.Tensor:
        """Frames (frames, height, width, 3) of a video, each as a whole."""
        return self.normalised([PILImage.fromarray(frame).resize((self.size, self.size)) for frame in video])

    def normalised(self, images: list[PILImage.Image]) -> torch.Tensor:
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
        pixels = torch.empty(len(images), 3, self.size, self.size)
        for tile, image in zip(pixels, images, strict=True):  # one by one, each fits a processor's cache
            tile.copy_(torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1))
            tile.div_(255).sub_(mean).div_(std)
        return pixels


@later
def most_tiles(size: int, least: int, most: int) -> tuple[int, int]:
    """(width, height) of an image that fills a grid of the most tiles."""
    columns, rows = grids(least, most)[-1]
    return size * columns, size * rows


size = cfg.vision_config.image_size
tiled = kwargs.get("dynamic_image_size", cfg.dynamic_image_size)
least = where(tiled, kwargs.get("min_dynamic_patch", cfg.min_dynamic_patch), 1)
most = where(tiled, kwargs.get("max_dynamic_patch", cfg.max_dynamic_patch), 1)
tiles = hf(later(Tiles)(size, least, most, kwargs.get("use_thumbnail", cfg.use_thumbnail)))
rows_per_tile = floor((size // cfg.vision_config.patch_size) ** 2 * cfg.downsample_ratio**2)
context = tok["<IMG_CONTEXT>"]
VIDEO_TOKENS = {"gpt_oss": "<|reserved_200000|>"} | dict.fromkeys(["qwen2", "qwen3", "qwen3_moe"], "<|video_pad|>")
video_token = later(VIDEO_TOKENS.get)(cfg.llm_config.model_type)
video_context = tok[video_token]


def tile(token, count):
    """Tiles between start and end token."""
    return tok["<img>"] + embed(token) * (rows_per_tile * count) + tok["</img>"]


INTERNVL = ModelSpec(
    "internvl",
    Modality(
        "image",
        item=Image(largest=most_tiles(size, least, most)),
        layout=tile(context, fields.image_num_patches),
        update=replace(tok.text("<image>")),
        fields={
            "pixel_values_flat": flat(fields.image_num_patches),
            "image_num_patches": batched(keep_on_cpu=True),
            "image_token_id": constant(context, dtype="int64", keep_on_cpu=True),
        },
        process=tiles,
        embeds=tok["<img>"] + embed(context) * item.rows + tok["</img>"],
    ),
    Modality(
        "video",
        item=Video(largest=(32, size, size)),
        layout=each(fields.video_num_patches, lambda i: tok.text("Frame{}: ", i + 1) + tile(video_context, 1)),
        update=replace(tok.text("<video>")),
        fields={
            "pixel_values_flat_video": flat(fields.video_num_patches),
            "video_num_patches": batched(keep_on_cpu=True),
            "video_token_id": constant(video_context, dtype="int64", keep_on_cpu=True),
        },
        process=tiles,
        when=tok.has(video_token),
    ),
)
