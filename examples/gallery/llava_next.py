"""LLaVA-NeXT: a view of the whole image, then its tiles without their padding, in rows of patches with newlines.

The model writes the newlines itself, so all positions take encoder rows.
"""

from collections.abc import Sequence

from mmkit import Image, Modality, ModelSpec, batched, cfg, embed, hf, item, later, proc, where


@later
def best_size(height: int, width: int, sizes: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return (height, width) of the tiles that show an image with the most pixels.

    Of several such sizes it is the one with the least area.
    """

    def rank(size: Sequence[int]) -> tuple[int, int]:
        scale = min(size[0] / height, size[1] / width)
        num_pixels = min(int(height * scale) * int(width * scale), height * width)
        return num_pixels, -size[0] * size[1]

    return max(sizes, key=rank)


@later
def remove_padding(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Return (rows, columns) of patches of an image that stands in the middle of a padded grid of patches."""
    if width / height > columns / rows:
        padding = rows - int(round(height * (columns / width), 7))
        return rows - padding // 2 * 2, columns
    padding = columns - int(round(width * (rows / height), 7))
    return rows, columns - padding // 2 * 2


@later
def largest(sizes: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return (width, height) of the images that fill the tiles."""
    return [(width, height) for height, width in sizes]


TOWER = cfg.vision_config
SIZES = cfg.image_grid_pinpoints
SIDE = TOWER.image_size // TOWER.patch_size
BEST = best_size(item.height, item.width, SIZES)
ROWS = SIDE * (BEST[0] // TOWER.image_size)
COLUMNS = SIDE * (BEST[1] // TOWER.image_size)
GRID = remove_padding(item.height, item.width, ROWS, COLUMNS)
CLASS_TOKEN = where(TOWER.model_type == "clip_vision_model", 1, 0)
VIEW = SIDE**2 + CLASS_TOKEN - where(cfg.vision_feature_select_strategy == "default", 1, 0)

LLAVA_NEXT = ModelSpec(
    "llava_next",
    Modality(
        "image",
        item=Image(largest=largest(SIZES)),
        placeholder=cfg.image_token_index,
        tokens=VIEW + GRID[0] * GRID[1] + GRID[0],
        fields={"pixel_values": batched(), "image_sizes": batched(keep_on_cpu=True)},
        process=hf(proc.image_processor, one_by_one=True),  # a batch is padded to the most tiles
        embeds=embed(cfg.image_token_index) * item.rows,
    ),
)
