"""Idefics3: rows of tiles, each tile behind a token with its row and column, then the whole image.

An image that is not split is the whole image alone. The tensors of the processor have a dimension more than those of
the model.
"""

from math import floor

from mmkit import (
    Image,
    Modality,
    ModelSpec,
    batched,
    ceil_div,
    derived,
    each,
    embed,
    fields,
    flat,
    hf,
    item,
    kwargs,
    literal,
    maximum,
    minimum,
    proc,
    replace,
    tok,
    where,
)

MAX_EDGE = 4096  # of a resized image, in all checkpoints
IS_SPLIT = kwargs.get("do_image_splitting", proc.image_processor.do_image_splitting)
SIZE = kwargs.get("size", proc.image_processor.size)["longest_edge"]
TILE = kwargs.get("max_image_size", proc.image_processor.max_image_size)["longest_edge"]


def find_shorter(longer, ratio):
    """Return the shorter edge of an image of a width to a height, whose longer edge becomes `longer`."""
    return floor(where(IS_WIDE, longer / ratio, longer * ratio))


# the processor resizes an image twice where it is larger than any checkpoint says
IS_WIDE = item.width >= item.height
FIRST = find_shorter(SIZE, item.width / item.height)
AGAIN = find_shorter(MAX_EDGE, where(IS_WIDE, SIZE / fields.first, fields.first / SIZE))
ALONG_SHORTER = ceil_div(where(SIZE > MAX_EDGE, maximum(AGAIN, 1), fields.first), TILE)
ALONG_LONGER = ceil_div(minimum(SIZE, MAX_EDGE), TILE)
HAS_TILES = IS_SPLIT & (ALONG_SHORTER * ALONG_LONGER > 1)
TILES = (where(IS_WIDE, ALONG_SHORTER, ALONG_LONGER), where(IS_WIDE, ALONG_LONGER, ALONG_SHORTER))
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
            "first": derived(maximum(FIRST + FIRST % 2, 1), hidden=True),
            "grid": derived([where(HAS_TILES, count, 0) for count in TILES], hidden=True),
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
