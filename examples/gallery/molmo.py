"""Molmo: a low-resolution view and a grid of overlapping crops, each in rows of pooled patches, before the text.

Every prompt is the text after a space, behind the end-of-text token.
"""

from collections.abc import Sequence

import numpy as np

from mmkit import (
    Image,
    Modality,
    ModelSpec,
    Scope,
    ceil_div,
    constant,
    derived,
    embed,
    fields,
    flat,
    hf,
    insert,
    item,
    later,
    proc,
    tok,
    where,
)

POOLING = 2  # patches per row and column of a position


def grids(most: int) -> list[tuple[int, int]]:
    """All (rows, columns) of at most `most` crops, fewer crops first."""
    sizes = range(1, most + 1)
    return sorted(((i, j) for i in sizes for j in sizes if i * j <= most), key=lambda grid: grid[0] * grid[1])


@later
def best_grid(height: int, width: int, window: int, most: int) -> tuple[int, int]:
    """(rows, columns) of crops, `window` pixels each: the least enlargement, else the least reduction."""
    candidates = np.array(grids(most), dtype=np.int32)
    with np.errstate(divide="ignore"):  # an image as small as the margins
        scale = ((candidates * window).astype(np.float32) / np.array([height, width], dtype=np.float32)).min(axis=1)
    best = scale.argmax() if (scale < 1).all() else np.where(scale < 1, 10e9, scale).argmin()
    return tuple(candidates[best].tolist())


@later
def sizes_of_grids(most: int, size: Sequence[int]) -> list[tuple[int, int]]:
    """(width, height) of the images that fill each grid."""
    return [(size[1] * i, size[0] * j) for i, j in grids(most)]


crops = proc.image_processor
patch, left, right = crops.image_patch_size, crops.overlap_margins[0], crops.overlap_margins[1]
view = crops.base_image_input_size[0] // patch  # patches per side of a crop
window = view - left - right  # of them, those that no neighbour shows
margins = patch * (left + right)
grid = best_grid(item.height - margins, item.width - margins, patch * window, crops.max_crops)


def pooled(count):
    """Positions along a side of `count` crops."""
    several = (
        ceil_div(window + left, POOLING) + (count - 2) * ceil_div(window, POOLING) + ceil_div(window + right, POOLING)
    )
    return where(count == 1, ceil_div(view, POOLING), several)


def block(columns, rows):
    """Rows of patches between a start and an end token, each with a column token at its end."""
    return tok["<im_start>"] + (embed(tok["<im_patch>"]) * columns + tok["<im_col>"]) * rows + tok["<im_end>"]


def text_after_space(s: Scope) -> list[int]:
    """The prompt's text after a space, behind the end-of-text token; an expanded prompt as it is."""
    begin, patch = [s.tok["<|endoftext|>"], s.tok["<im_start>"]], s.tok["<im_patch>"]
    if s.prompt[:2] == begin and patch in s.prompt:
        return s.prompt
    return [s.tok["<|endoftext|>"], *s.tok.text(" " + s.tok.decode(s.prompt))]


MOLMO = ModelSpec(
    "molmo",
    Modality(
        "image",
        item=Image(largest=sizes_of_grids(crops.max_crops, crops.base_image_input_size)),
        layout=block(crops.image_token_length_w, crops.image_token_length_h) + block(pooled(grid[1]), pooled(grid[0])),
        update=insert(after=tok["<|endoftext|>"]),
        fields={
            "images": flat(fields.num_crops),
            "image_masks": flat(fields.num_crops),
            "image_input_idx": flat(fields.num_crops),
            "num_crops": derived(grid[0] * grid[1] + 1, dtype="int64", keep_on_cpu=True),
            "img_patch_id": constant(tok["<im_patch>"], keep_on_cpu=True),
        },
        process=hf(proc.process, text=""),
    ),
    prompt=text_after_space,
)
