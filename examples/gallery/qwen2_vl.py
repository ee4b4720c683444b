"""Qwen2-VL: images and videos of any size, one position per square of merged patches.

The layout reads the grid (patches over time, height and width); precomputed embeddings come with theirs.
"""

from math import isqrt
from typing import Any

from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from mmkit import (
    Image,
    Modality,
    ModelSpec,
    Video,
    cfg,
    derived,
    fields,
    flat,
    item,
    kwargs,
    later,
    proc,
    tok,
)


@later
def grid_of(frames: int, height: int, width: int, processor: Any, least: int, most: int) -> list[int]:
    """Patches over time, height and width of frames that are resized to `least` to `most` pixels."""
    patch = processor.patch_size
    height, width = smart_resize(height, width, patch * processor.merge_size, least, most)
    return [-(-frames // processor.temporal_patch_size), height // patch, width // patch]


@later
def fullest(pixels: int, unit: int) -> tuple[int, int]:
    """(width, height) with the most squares of `unit` pixels a side, of several the one nearest to a square."""
    count = pixels // unit**2
    grids = [(min(count // rows, 200 * rows), rows) for rows in range(1, isqrt(count) + 1)]
    columns, rows = max(grids, key=lambda grid: (grid[0] * grid[1], grid[1]))
    return unit * columns, unit * rows


merged = cfg.vision_config.spatial_merge_size


def vision(name, of_size, frames, token, processor, pixels):
    """Images, or videos; `of_size` makes their item type of the largest (width, height)."""
    size = kwargs.get("size", processor.size)
    least, most = kwargs.get("min_pixels", size["shortest_edge"]), kwargs.get("max_pixels", size["longest_edge"])
    grid = fields[f"{name}_grid_thw"]
    patches = grid[0] * grid[1] * grid[2]
    return Modality(
        name,
        item=of_size(fullest(most, processor.patch_size * processor.merge_size)),
        placeholder=tok[token],
        tokens=patches // processor.merge_size**2,
        fields={
            pixels: flat(patches, shape=(patches, 3 * processor.temporal_patch_size * processor.patch_size**2)),
            f"{name}_grid_thw": derived(
                grid_of(frames, item.height, item.width, processor, least, most),
                shape=(3,),
                dtype="int64",
                keep_on_cpu=True,
            ),
        },
        embeds=flat(item.rows),
        positions=(grid[0], grid[1] // merged, grid[2] // merged),
    )


images, videos = proc.image_processor, proc.video_processor

QWEN2_VL = ModelSpec(
    "qwen2_vl",
    vision("image", Image, 1, proc.image_token, images, "pixel_values"),
    vision(
        "video",
        lambda size: Video((videos.max_frames, size[0], size[1])),
        item.frames,
        proc.video_token,
        videos,
        "pixel_values_videos",
    ),
)
