"""DeepSeek-VL2: one global view and a grid of local tiles; requests of more than two images are not tiled.

A view is ``side`` rows of patches, each followed by a newline; one separator stands between the global and the local
views. The model writes newlines and separator itself, so all positions take encoder rows.
"""

from math import floor

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
    largest_of,
    minimum,
    proc,
    replace,
    tok,
    where,
)


def rank(size):
    """Return what the best (width, height) of tiles has most of: pixels of the image, then the least area."""
    scale = minimum(size[0] / item.width, size[1] / item.height)
    num_pixels = floor(item.width * scale) * floor(item.height * scale)
    return minimum(num_pixels, item.width * item.height), -size[0] * size[1]


# of the grids with the most tiles the one with the most rows, which end in newlines
LARGEST = largest_of(cfg.candidate_resolutions, by=lambda size: (size[0] * size[1], size[1]))
BEST = largest_of(proc.candidate_resolutions, by=rank)
LOCAL_COLUMNS = where(item.count > 2, 1, BEST[0] // proc.image_size)
LOCAL_ROWS = where(item.count > 2, 1, BEST[1] // proc.image_size)
SIDE = ceil_div(proc.image_size // proc.patch_size, proc.downsample_ratio)
COLUMNS, ROWS = fields.images_spatial_crop[0], fields.images_spatial_crop[1]
IMAGE = embed(tok[proc.image_token])

DEEPSEEK_VL2 = ModelSpec(
    "deepseek_vl2",
    Modality(
        "image",
        item=Image(largest=LARGEST),
        layout=IMAGE * (SIDE * (SIDE + 1) + 1 + ROWS * SIDE * (COLUMNS * SIDE + 1)),
        update=replace(tok[proc.image_token]),
        fields={
            "pixel_values": flat(1 + COLUMNS * ROWS),
            "images_spatial_crop": derived([LOCAL_COLUMNS, LOCAL_ROWS], dtype="int64", keep_on_cpu=True),
        },
        process=hf(text=proc.image_token),
        cacheable=item.count <= 2,
        embeds=IMAGE * item.rows,
    ),
)
