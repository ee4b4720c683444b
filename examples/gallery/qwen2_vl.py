"""Qwen2-VL: images and videos of any size, one position per square of merged patches.

The layout reads the grid (patches over time, height and width); precomputed embeddings come with theirs.
"""

from math import ceil, isqrt
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
def grid_of(frames: int, height: int, width: int, processor: Any, min_pixels: int, max_pixels: int) -> list[int]:
    """Return the patches over time, height and width of frames that are resized to an area in pixels."""
    patch = processor.patch_size
    height, width = smart_resize(height, width, patch * processor.merge_size, min_pixels, max_pixels)
    return [ceil(frames / processor.temporal_patch_size), height // patch, width // patch]


@later
def largest_size(max_pixels: int, unit: int) -> tuple[int, int]:
    """Return (width, height) with the most squares of `unit` pixels a side, of several the one nearest to a square."""
    max_squares = max_pixels // unit**2
    best = (0, 0)
    for rows in range(1, isqrt(max_squares) + 1):
        columns = min(max_squares // rows, 200 * rows)  # `smart_resize` refuses a longer side
        if columns * rows >= best[0] * best[1]:
            best = (columns, rows)
    return unit * best[0], unit * best[1]


MERGE = cfg.vision_config.spatial_merge_size


def max_area(processor):
    """Return the most pixels of a resized image or frame."""
    return kwargs.get("max_pixels", kwargs.get("size", processor.size)["longest_edge"])


def min_area(processor):
    """Return the fewest pixels of a resized image or frame."""
    return kwargs.get("min_pixels", kwargs.get("size", processor.size)["shortest_edge"])


def largest(processor):
    """Return the largest (width, height) that is not made smaller."""
    return largest_size(max_area(processor), processor.patch_size * processor.merge_size)


def vision(name, *, item_type, frames, token, processor, pixels):
    """Return the modality of images, or of videos, whose field `pixels` has their patches."""
    grid = fields[f"{name}_grid_thw"]
    patches = grid[0] * grid[1] * grid[2]
    return Modality(
        name,
        item=item_type,
        placeholder=tok[token],
        tokens=patches // processor.merge_size**2,
        fields={
            pixels: flat(patches, shape=(patches, 3 * processor.temporal_patch_size * processor.patch_size**2)),
            f"{name}_grid_thw": derived(
                grid_of(frames, item.height, item.width, processor, min_area(processor), max_area(processor)),
                shape=(3,),
                dtype="int64",
                keep_on_cpu=True,
            ),
        },
        embeds=flat(item.rows),
        positions=(grid[0], grid[1] // MERGE, grid[2] // MERGE),
    )


def images():
    """Return the modality of images, which Qwen3-VL has too."""
    return vision(
        "image",
        item_type=Image(largest(proc.image_processor)),
        frames=1,
        token=proc.image_token,
        processor=proc.image_processor,
        pixels="pixel_values",
    )


VIDEOS = proc.video_processor

QWEN2_VL = ModelSpec(
    "qwen2_vl",
    images(),
    vision(
        "video",
        item_type=Video((VIDEOS.max_frames, largest(VIDEOS)[0], largest(VIDEOS)[1])),
        frames=item.frames,
        token=proc.video_token,
        processor=VIDEOS,
        pixels="pixel_values_videos",
    ),
)
