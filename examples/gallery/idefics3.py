"""Idefics3: rows of tiles, each tile behind a token with its row and column, then the whole image.

An image that is not split is the whole image alone. A method of the image processor tells rows and columns, and its
tensors have a dimension more than those of the model.
"""

from collections.abc import Mapping
from typing import Any

from mmkit import (
    Image,
    Modality,
    ModelSpec,
    batched,
    derived,
    each,
    embed,
    fields,
    flat,
    hf,
    item,
    kwargs,
    later,
    literal,
    proc,
    replace,
    tok,
)


@later
def count_tiles(processor: Any, height: int, width: int, options: Mapping[str, Any]) -> list[int]:
    """Return [rows, columns] of the tiles of an image; zeros for one that is not split.

    transformers before 5 calls an image that is not split one row of one tile.
    """
    patches, rows, columns = processor.get_number_of_image_patches(height, width, options)
    if patches <= 1:
        return [0, 0]
    return [rows, columns]


SIZE = proc.image_processor.size["longest_edge"]
ROWS, COLUMNS = fields.grid[0], fields.grid[1]
BORDER = tok[proc.fake_image_token]


def view(name):
    """One tile, or the whole image, behind its name."""
    return literal(BORDER, name) + embed(tok[proc.image_token]) * proc.image_seq_len


def row_of_tiles(row):
    return each(COLUMNS, lambda column: view(tok.text("<row_{}_col_{}>", row + 1, column + 1)))


IDEFICS3 = ModelSpec(
    "idefics3",
    Modality(
        "image",
        item=Image(largest=(SIZE, SIZE)),
        layout=each(ROWS, row_of_tiles, sep=tok.text("\n"), last=tok.text("\n\n"))
        + view(tok.text("{}", proc.global_image_tag))
        + BORDER,
        update=replace(tok[proc.image_token]),
        fields={
            "grid": derived(count_tiles(proc.image_processor, item.height, item.width, kwargs), hidden=True),
            "pixels": batched(hidden=True),
            "mask": batched(hidden=True),
            "num_patches": derived(ROWS * COLUMNS + 1, dtype="int64", keep_on_cpu=True),
            "pixel_values": flat(fields.num_patches, value=fields.pixels),
            "pixel_attention_mask": flat(fields.num_patches, value=fields.mask),
        },
        process=hf(
            proc.image_processor,
            outputs={"pixel_values": "pixels", "pixel_attention_mask": "mask"},
            one_by_one=True,
        ),
    ),
)
