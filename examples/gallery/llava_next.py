"""LLaVA-NeXT: a view of the whole image, then its tiles without their padding, in rows of patches with newlines.

The model writes the newlines itself, so all positions take encoder rows.
"""

from collections.abc import Sequence

from mmkit import Image, Modality, ModelSpec, batched, cfg, embed, hf, item, later, proc, where


@later
def best_size(height: int, width: int, sizes: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return (height, width) of the tiles that show an image with the most pixels; of several the one with the least
    area."""

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


tower = cfg.vision_config
sizes = cfg.image_grid_pinpoints
side = tower.image_size // tower.patch_size
best = best_size(item.height, item.width, sizes)
rows = side * (best[0] // tower.image_size)
columns = side * (best[1] // tower.image_size)
grid = remove_padding(item.height, item.width, rows, columns)
class_token = where(tower.model_type == "clip_vision_model", 1, 0)
view = side**2 + class_token - where(cfg.vision_feature_select_strategy == "default", 1, 0)

LLAVA_NEXT = ModelSpec(
    "llava_next",
    Modality(
        "image",
        item=Image(largest=largest(sizes)),
        placeholder=cfg.image_token_index,
        tokens=view + grid[0] * grid[1] + grid[0],
        fields={"pixel_values": batched(), "image_sizes": batched(keep_on_cpu=True)},
        process=hf(proc.image_processor, one_by_one=True),  # a batch is padded to the most tiles
        embeds=embed(cfg.image_token_index) * item.rows,
    ),
)
