"""LLaVA-NeXT: a view of the whole image, then its tiles without their padding, in rows of patches with newlines.

The model writes the newlines itself, so all positions take encoder rows.
"""

from collections.abc import Sequence

from mmkit import Image, Modality, ModelSpec, batched, cfg, embed, hf, item, later, proc, where


@later
def best_size(height: int, width: int, sizes: Sequence[Sequence[int]]) -> Sequence[int]:
    """(height, width) of the tiles that show an image with the most pixels; of several the one with the least area."""

    def shown(size: Sequence[int]) -> int:
        scale = min(size[0] / height, size[1] / width)
        return min(int(height * scale) * int(width * scale), height * width)

    return max(sizes, key=lambda size: (shown(size), -size[0] * size[1]))


@later
def unpadded(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of patches of an image, which stands in the middle of so many."""
    if width / height > columns / rows:
        return rows - (rows - int(round(height * (columns / width), 7))) // 2 * 2, columns
    return rows, columns - (columns - int(round(width * (rows / height), 7))) // 2 * 2


@later
def largest(sizes: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """(width, height) of the images that fill the tiles."""
    return [(width, height) for height, width in sizes]


tower, sizes = cfg.vision_config, cfg.image_grid_pinpoints
side = tower.image_size // tower.patch_size
best = best_size(item.height, item.width, sizes)
grid = unpadded(item.height, item.width, *(side * (best[i] // tower.image_size) for i in (0, 1)))
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
