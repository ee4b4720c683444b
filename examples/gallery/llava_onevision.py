"""LLaVA-OneVision: LLaVA-NeXT's images, made smaller where they have too many patches, and videos of pooled frames."""

from collections.abc import Sequence
from math import sqrt

from mmkit import (
    Image,
    Modality,
    ModelSpec,
    Video,
    batched,
    ceil_div,
    cfg,
    embed,
    hf,
    item,
    later,
    proc,
    where,
)

from .llava_next import best_size, unpadded


@later
def most_views(ratio: str) -> int:
    """The most views of which an image has the patches, as in ``anyres_max_9``."""
    return int(ratio.removeprefix("anyres_max_"))


@later
def reduced(grid: Sequence[int], side: int, most: int) -> tuple[int, int]:
    """(rows, columns) of patches after an image with too many of them is made smaller."""
    rows, columns = grid
    ratio = sqrt(rows * columns / (most * side**2))
    return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)


@later
def largest(sizes: Sequence[Sequence[int]], patch: int, side: int, most: int) -> list[tuple[int, int]]:
    """(width, height) of images that fill the tiles in one dimension, and in the other too, or as far as an image is
    not made smaller."""
    fitting = int(1.1**2 * most * side**2) * patch**2
    spans = [(height, width, span) for height, width in sizes for span in (0, patch)]
    tall = [
        (max(patch, min(width, fitting // height // patch * patch) - less), height) for height, width, less in spans
    ]
    wide = [(width, max(patch, min(height, fitting // width // patch * patch) - less)) for height, width, less in spans]
    return tall + wide


tower, sizes = cfg.vision_config, cfg.image_grid_pinpoints
side = tower.image_size // tower.patch_size
most = most_views(cfg.vision_aspect_ratio)
best = best_size(item.height, item.width, sizes)
rows, columns = (best[i] // tower.image_size for i in (0, 1))
grid = reduced(unpadded(item.height, item.width, side * rows, side * columns), side, most)
tile = (3, tower.image_size, tower.image_size)
view = side**2 - where(cfg.vision_feature_select_strategy == "default", 1, 0)
pooled = ceil_div(side, cfg.get("spatial_pool_stride", 2))

LLAVA_ONEVISION = ModelSpec(
    "llava_onevision",
    Modality(
        "image",
        item=Image(largest=largest(sizes, tower.patch_size, side, most)),
        placeholder=cfg.image_token_index,
        tokens=view + grid[0] * grid[1] + grid[0],
        fields={"pixel_values": batched(shape=(1 + rows * columns, *tile)), "image_sizes": batched(keep_on_cpu=True)},
        process=hf(proc.image_processor, one_by_one=True),  # a batch is padded to the most tiles
        embeds=embed(cfg.image_token_index) * item.rows,
    ),
    Modality(
        "video",
        item=Video(largest=(32, tower.image_size, tower.image_size)),
        placeholder=cfg.video_token_index,
        tokens=item.frames * pooled**2 + 1,
        fields={"pixel_values_videos": batched(shape=(item.frames, *tile))},
        process=hf(proc.video_processor, one_by_one=True),
        embeds=embed(cfg.video_token_index) * item.rows,
    ),
)
