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
    derived,
    embed,
    fields,
    hf,
    item,
    largest_of,
    later,
    proc,
    where,
)

from .llava_next import rank, remove_padding


@later
def parse_max_views(ratio: str) -> int:
    """Return the most views of which an image has the patches, as in ``anyres_max_9``."""
    return int(ratio.removeprefix("anyres_max_"))


@later
def reduce_grid(rows: int, columns: int, side: int, max_views: int) -> tuple[int, int]:
    """Return (rows, columns) of patches after an image with too many of them is made smaller."""
    ratio = sqrt(rows * columns / (max_views * side**2))
    if ratio <= 1.1:
        return rows, columns
    return int(rows // ratio), int(columns // ratio)


@later
def largest(sizes: Sequence[Sequence[int]], patch: int, side: int, max_views: int) -> list[tuple[int, int]]:
    """Return (width, height) of images that fill the tiles in one dimension.

    In the other one they fill the tiles, too, or as far as an image is not made smaller.
    """
    max_pixels = int(1.1**2 * max_views * side**2) * patch**2
    images = []
    for height, width in sizes:
        fitting_width = min(width, max_pixels // height // patch * patch)
        fitting_height = min(height, max_pixels // width // patch * patch)
        for margin in (0, patch):  # rounding may make the smaller one have more patches
            images.append((max(patch, fitting_width - margin), height))
            images.append((width, max(patch, fitting_height - margin)))
    return images


TOWER = cfg.vision_config
SIZES = cfg.image_grid_pinpoints
SIDE = TOWER.image_size // TOWER.patch_size
MAX_VIEWS = parse_max_views(cfg.vision_aspect_ratio)
ROWS = fields.tiles[0] // TOWER.image_size
COLUMNS = fields.tiles[1] // TOWER.image_size
GRID = fields.grid
TILE = (3, TOWER.image_size, TOWER.image_size)
VIEW = SIDE**2 - where(cfg.vision_feature_select_strategy == "default", 1, 0)
POOLED = ceil_div(SIDE, cfg.get("spatial_pool_stride", 2))

LLAVA_ONEVISION = ModelSpec(
    "llava_onevision",
    Modality(
        "image",
        item=Image(largest=largest(SIZES, TOWER.patch_size, SIDE, MAX_VIEWS)),
        placeholder=cfg.image_token_index,
        tokens=VIEW + GRID[0] * GRID[1] + GRID[0],
        fields={
            "tiles": derived(largest_of(SIZES, by=rank), hidden=True),
            "grid": derived(reduce_grid(*remove_padding(SIDE * ROWS, SIDE * COLUMNS), SIDE, MAX_VIEWS), hidden=True),
            "pixel_values": batched(shape=(1 + ROWS * COLUMNS,) + TILE),
            "image_sizes": batched(keep_on_cpu=True),
        },
        process=hf(proc.image_processor, one_by_one=True),  # a batch is padded to the most tiles
        embeds=embed(cfg.image_token_index) * item.rows,
    ),
    Modality(
        "video",
        item=Video(largest=(32, TOWER.image_size, TOWER.image_size)),
        placeholder=cfg.video_token_index,
        tokens=item.frames * POOLED**2 + 1,
        fields={"pixel_values_videos": batched(shape=(item.frames,) + TILE)},
        process=hf(proc.video_processor, one_by_one=True),
        embeds=embed(cfg.video_token_index) * item.rows,
    ),
)
