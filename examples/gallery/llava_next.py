"""LLaVA-NeXT: a view of the whole image, then its tiles without their padding, in rows of patches with newlines.

The model writes the newlines itself, so all positions take encoder rows.
"""

from math import floor

from mmkit import (
    Image,
    Modality,
    ModelSpec,
    batched,
    cfg,
    derived,
    embed,
    fields,
    hf,
    item,
    largest_of,
    minimum,
    proc,
    where,
)


def rank(size):
    """Return what the best (height, width) of tiles has most of: pixels of the image, then the least area."""
    scale = minimum(size[0] / item.height, size[1] / item.width)
    num_pixels = floor(item.height * scale) * floor(item.width * scale)
    return minimum(num_pixels, item.height * item.width), -size[0] * size[1]


def count_shown(side, other_side, patches, other_patches):
    """Return the patches along a side that show the image, which stands in the middle of the padding."""
    image = floor(round(side * (other_patches / other_side), 7))
    return patches - (patches - image) // 2 * 2


def remove_padding(rows, columns):
    """Return (rows, columns) of the patches that show an image, of a grid with padding along one side."""
    is_wide = item.width / item.height > columns / rows
    shown_rows = where(is_wide, count_shown(item.height, item.width, rows, columns), rows)
    shown_columns = where(is_wide, columns, count_shown(item.width, item.height, columns, rows))
    return shown_rows, shown_columns


TOWER = cfg.vision_config
SIZES = cfg.image_grid_pinpoints
SIDE = TOWER.image_size // TOWER.patch_size
# of the sizes with the most pixels the one with the most rows, which end in newlines
LARGEST = largest_of(SIZES, by=lambda size: (size[0] * size[1], size[0]))
BEST = largest_of(SIZES, by=rank)
ROWS = SIDE * (fields.tiles[0] // TOWER.image_size)
COLUMNS = SIDE * (fields.tiles[1] // TOWER.image_size)
GRID = fields.grid
CLASS_TOKEN = where(TOWER.model_type == "clip_vision_model", 1, 0)
VIEW = SIDE**2 + CLASS_TOKEN - where(cfg.vision_feature_select_strategy == "default", 1, 0)

LLAVA_NEXT = ModelSpec(
    "llava_next",
    Modality(
        "image",
        item=Image(largest=(LARGEST[1], LARGEST[0])),
        placeholder=cfg.image_token_index,
        tokens=VIEW + GRID[0] * GRID[1] + GRID[0],
        fields={
            "tiles": derived(BEST, hidden=True),
            "grid": derived(remove_padding(ROWS, COLUMNS), hidden=True),
            "pixel_values": batched(),
            "image_sizes": batched(keep_on_cpu=True),
        },
        process=hf(proc.image_processor, one_by_one=True),  # a batch is padded to the most tiles
        embeds=embed(cfg.image_token_index) * item.rows,
    ),
)
