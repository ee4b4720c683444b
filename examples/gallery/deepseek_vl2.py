"""DeepSeek-VL2: one global view and a grid of local tiles; requests of more than two images are not tiled.

A view is ``side`` rows of patches, each followed by a newline; one separator stands between the global and the local
views. The model writes newlines and separator itself, so all positions take encoder rows.
"""

from collections.abc import Sequence
from typing import Any

from mmkit import (
    Image,
    Modality,
    ModelSpec,
    ceil_div,
    cfg,
    derived,
    embed,
    fields,
    flat,
    hf,
    item,
    later,
    proc,
    replace,
    tok,
)


@later
def most_tiles(resolutions: Sequence[Sequence[int]]) -> Sequence[int]:
    """(width, height) of the grid with the most tiles, of several the one with the most rows, which end in newlines."""
    return max(resolutions, key=lambda size: (size[0] * size[1], size[1]))


@later
def count_tiles(processor: Any, width: int, height: int, count: int) -> list[int]:
    """Return [columns, rows] of the local tiles of an image, one of `count` in its request."""
    if count > 2:
        return [1, 1]
    best_width, best_height = processor.select_best_resolution((width, height))
    return [best_width // processor.image_size, best_height // processor.image_size]


TILES = count_tiles(proc, item.width, item.height, item.count)
SIDE = ceil_div(proc.image_size // proc.patch_size, proc.downsample_ratio)
COLUMNS, ROWS = fields.images_spatial_crop[0], fields.images_spatial_crop[1]
IMAGE = embed(tok[proc.image_token])

DEEPSEEK_VL2 = ModelSpec(
    "deepseek_vl2",
    Modality(
        "image",
        item=Image(largest=most_tiles(cfg.candidate_resolutions)),
        layout=IMAGE * (SIDE * (SIDE + 1) + 1 + ROWS * SIDE * (COLUMNS * SIDE + 1)),
        update=replace(tok[proc.image_token]),
        fields={
            "pixel_values": flat(1 + COLUMNS * ROWS),
            "images_spatial_crop": derived(TILES, dtype="int64", keep_on_cpu=True),
        },
        process=hf(text=proc.image_token),
        cacheable=item.count <= 2,
        embeds=IMAGE * item.rows,
    ),
)
