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
    cfg,
    constant,
    derived,
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

MEAN = (0.485, 0.456, 0.406)  # of ImageNet
STD = (0.229, 0.224, 0.225)


def num_tiles(grid: tuple[int, int]) -> int:
    """Return how many tiles a grid of (columns, rows) has."""
    columns, rows = grid
    return columns * rows


def find_grids(min_tiles: int, max_tiles: int) -> list[tuple[int, int]]:
    """Return all (columns, rows) of `min_tiles` to `max_tiles` tiles, fewer tiles first."""
    # The model was trained with the order in which a Python set holds grids of equally many tiles, since that order
    # decides ties. So the set must be filled in this order, with these values.
    candidates = set()
    for limit in range(min_tiles, max_tiles + 1):
        for columns in range(1, limit + 1):
            for rows in range(1, limit + 1):
                candidates.add((columns, rows))
    grids = [grid for grid in candidates if min_tiles <= num_tiles(grid) <= max_tiles]
    return sorted(grids, key=num_tiles)


class Tiles:
    """Images to tiles and videos to frames, all of one size: float32 (tiles, 3, size, size), normalised."""

    def __init__(self, size: int, min_tiles: int, max_tiles: int, use_thumbnail: bool) -> None:
        self.size = size
        self.use_thumbnail = use_thumbnail
        self.grids = find_grids(min_tiles, max_tiles)

    def __call__(
        self, images: Sequence[PILImage.Image] = (), videos: Sequence[np.ndarray] = (), **options: object
    ) -> dict[str, torch.Tensor]:
        # `options` are those of the request, which have chosen the grids already
        outputs = {}
        if images:
            outputs["pixel_values_flat"] = concatenate([self.tile_image(image) for image in images])
        if videos:
            outputs["pixel_values_flat_video"] = concatenate([self.resize_frames(video) for video in videos])
        return outputs

    def tile_image(self, image: PILImage.Image) -> torch.Tensor:
        """Return the tiles of an image, row by row, and its thumbnail if they are several."""
        columns, rows = self.choose_grid(image.width, image.height)
        whole = image.resize((self.size * columns, self.size * rows))
        tiles = []
        for y in range(0, whole.height, self.size):
            for x in range(0, whole.width, self.size):
                tiles.append(whole.crop((x, y, x + self.size, y + self.size)))
        if self.use_thumbnail and len(tiles) > 1:
            tiles.append(image.resize((self.size, self.size)))
        return self.normalise(tiles)

    def count_tiles(self, width: int, height: int) -> int:
        """Return how many tiles an image of a size becomes, its thumbnail included."""
        count = num_tiles(self.choose_grid(width, height))
        if self.use_thumbnail and count > 1:
            return count + 1
        return count

    def choose_grid(self, width: int, height: int) -> tuple[int, int]:
        """Return (columns, rows) of the nearest aspect ratio.

        Of equally near ones it is the last that the image fills to a half.
        """
        best = (1, 1)
        least_distance = float("inf")
        for columns, rows in self.grids:
            distance = abs(width / height - columns / rows)
            is_half_full = width * height > 0.5 * self.size**2 * columns * rows
            if distance < least_distance or (distance == least_distance and is_half_full):
                best = (columns, rows)
                least_distance = distance
        return best

    def resize_frames(self, video: np.ndarray) -> torch.Tensor:
        """Return the frames (frames, height, width, 3) of a video, each as a tile."""
        frames = [PILImage.fromarray(frame).resize((self.size, self.size)) for frame in video]
        return self.normalise(frames)

    def normalise(self, images: list[PILImage.Image]) -> torch.Tensor:
        """Return images of the tiles' size as float32 (images, 3, size, size), normalised."""
        mean = torch.tensor(MEAN).view(3, 1, 1)
        std = torch.tensor(STD).view(3, 1, 1)
        pixels = torch.empty(len(images), 3, self.size, self.size)
        for tile, image in zip(pixels, images, strict=True):  # one by one, since one tile fits the CPU's cache
            tile.copy_(torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1))
            tile.div_(255).sub_(mean).div_(std)
        return pixels


def concatenate(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the tiles of all items; of one item without a copy."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors)


@later
def largest_image(size: int, min_tiles: int, max_tiles: int) -> tuple[int, int]:
    """Return (width, height) of an image that fills a grid of the most tiles."""
    columns, rows = find_grids(min_tiles, max_tiles)[-1]
    return size * columns, size * rows


VIDEO_TOKENS = {
    "gpt_oss": "<|reserved_200000|>",
    "qwen2": "<|video_pad|>",
    "qwen3": "<|video_pad|>",
    "qwen3_moe": "<|video_pad|>",
}


@later
def find_video_token(model_type: str) -> str | None:
    """Return the placeholder of videos; None for a language model without one."""
    return VIDEO_TOKENS.get(model_type)


SIZE = cfg.vision_config.image_size
IS_TILED = kwargs.get("dynamic_image_size", cfg.dynamic_image_size)
MIN_TILES = where(IS_TILED, kwargs.get("min_dynamic_patch", cfg.min_dynamic_patch), 1)
MAX_TILES = where(IS_TILED, kwargs.get("max_dynamic_patch", cfg.max_dynamic_patch), 1)
TILES = later(Tiles)(SIZE, MIN_TILES, MAX_TILES, kwargs.get("use_thumbnail", cfg.use_thumbnail))
NUM_TILES = later(Tiles.count_tiles)(TILES, item.width, item.height)
TOKENS_PER_TILE = floor((SIZE // cfg.vision_config.patch_size) ** 2 * cfg.downsample_ratio**2)

IMAGE_CONTEXT = tok["<IMG_CONTEXT>"]
VIDEO_TOKEN = find_video_token(cfg.llm_config.model_type)
VIDEO_CONTEXT = tok[VIDEO_TOKEN]


def tiles(token, count):
    """Return the layout of tiles, between start and end token."""
    return tok["<img>"] + embed(token) * (TOKENS_PER_TILE * count) + tok["</img>"]


def frame(index):
    """Return the layout of a frame, behind its number."""
    return tok.text("Frame{}: ", index + 1) + tiles(VIDEO_CONTEXT, 1)


INTERNVL = ModelSpec(
    "internvl",
    Modality(
        "image",
        item=Image(largest=largest_image(SIZE, MIN_TILES, MAX_TILES)),
        layout=tiles(IMAGE_CONTEXT, fields.image_num_patches),
        update=replace(tok.text("<image>")),
        fields={
            "pixel_values_flat": flat(fields.image_num_patches),
            "image_num_patches": derived(NUM_TILES, dtype="int64", keep_on_cpu=True),
            "image_token_id": constant(IMAGE_CONTEXT, dtype="int64", keep_on_cpu=True),
        },
        process=hf(TILES),
        embeds=tok["<img>"] + embed(IMAGE_CONTEXT) * item.rows + tok["</img>"],
    ),
    Modality(
        "video",
        item=Video(largest=(32, SIZE, SIZE)),
        layout=each(fields.video_num_patches, frame),
        update=replace(tok.text("<video>")),
        fields={
            "pixel_values_flat_video": flat(fields.video_num_patches),
            "video_num_patches": derived(item.frames, dtype="int64", keep_on_cpu=True),
            "video_token_id": constant(VIDEO_CONTEXT, dtype="int64", keep_on_cpu=True),
        },
        process=hf(TILES),
        when=tok.has(VIDEO_TOKEN),
    ),
)
