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


def find_grids(max_crops: int) -> list[tuple[int, int]]:
    """Return all (rows, columns) of at most `max_crops` crops, fewer crops first."""
    grids = []
    for rows in range(1, max_crops + 1):
        for columns in range(1, max_crops // rows + 1):
            grids.append((rows, columns))
    return sorted(grids, key=lambda grid: grid[0] * grid[1])


@later
def choose_grid(height: int, width: int, window: int, max_crops: int) -> tuple[int, int]:
    """Return (rows, columns) of crops, `window` pixels each: the least enlargement, else the least reduction."""
    grids = np.array(find_grids(max_crops), dtype=np.int32)
    image = np.array([height, width], dtype=np.float32)
    with np.errstate(divide="ignore"):  # an image as small as the margins
        scales = ((grids * window).astype(np.float32) / image).min(axis=1)
    is_reduction = scales < 1
    if is_reduction.all():
        best = scales.argmax()
    else:
        best = np.where(is_reduction, np.inf, scales).argmin()
    rows, columns = grids[best].tolist()
    return rows, columns


@later
def find_largest_images(max_crops: int, size: Sequence[int]) -> list[tuple[int, int]]:
    """Return (width, height) of the images that fill each grid."""
    height, width = size
    return [(width * rows, height * columns) for rows, columns in find_grids(max_crops)]


CROPS = proc.image_processor
PATCH = CROPS.image_patch_size  # pixels per side
LEFT = CROPS.overlap_margins[0]  # patches that a crop shares with its neighbours
RIGHT = CROPS.overlap_margins[1]
VIEW = CROPS.base_image_input_size[0] // PATCH  # patches per side of a crop
WINDOW = VIEW - LEFT - RIGHT  # of them, those that no neighbour shows
MARGINS = PATCH * (LEFT + RIGHT)
GRID = choose_grid(item.height - MARGINS, item.width - MARGINS, PATCH * WINDOW, CROPS.max_crops)


def positions_along(count):
    """Return the positions along a side of `count` crops, whose patches are pooled."""
    first = ceil_div(WINDOW + LEFT, POOLING)
    inner = ceil_div(WINDOW, POOLING)
    last = ceil_div(WINDOW + RIGHT, POOLING)
    return where(count == 1, ceil_div(VIEW, POOLING), first + (count - 2) * inner + last)


def block(columns, rows):
    """Return rows of patches between a start and an end token, each with a column token at its end."""
    return tok["<im_start>"] + (embed(tok["<im_patch>"]) * columns + tok["<im_col>"]) * rows + tok["<im_end>"]


def text_after_space(scope: Scope) -> list[int]:
    """Return the prompt's text after a space, behind the end-of-text token; an expanded prompt as it is."""
    begin = scope.tok["<|endoftext|>"]
    is_expanded = scope.prompt[:2] == [begin, scope.tok["<im_start>"]] and scope.tok["<im_patch>"] in scope.prompt
    if is_expanded:
        return scope.prompt
    return [begin] + scope.tok.text(" " + scope.tok.decode(scope.prompt))


MOLMO = ModelSpec(
    "molmo",
    Modality(
        "image",
        item=Image(largest=find_largest_images(CROPS.max_crops, CROPS.base_image_input_size)),
        layout=block(CROPS.image_token_length_w, CROPS.image_token_length_h)
        + block(positions_along(GRID[1]), positions_along(GRID[0])),
        update=insert(after=tok["<|endoftext|>"]),
        fields={
            "images": flat(fields.num_crops),
            "image_masks": flat(fields.num_crops),
            "image_input_idx": flat(fields.num_crops),
            "num_crops": derived(GRID[0] * GRID[1] + 1, dtype="int64", keep_on_cpu=True),
            "img_patch_id": constant(tok["<im_patch>"], keep_on_cpu=True),
        },
        process=hf(proc.process, text=""),
    ),
    prompt=text_after_space,
)
