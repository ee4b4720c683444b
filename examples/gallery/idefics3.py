"""Idefics3: rows of tiles, each tile behind a token with its row and column, then the whole image.

An image that is not split is the whole image alone. The image processor tells rows and columns, and its tensors have a
dimension more than those of the model.
"""

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
    literal,
    proc,
    replace,
    tok,
)

SIZE = proc.image_processor.size["longest_edge"]
ROWS, COLUMNS = fields.rows[0], fields.cols[0]
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
            "rows": batched(hidden=True),
            "cols": batched(hidden=True),
            "pixels": batched(hidden=True),
            "mask": batched(hidden=True),
            "num_patches": derived(ROWS * COLUMNS + 1, dtype="int64", keep_on_cpu=True),
            "pixel_values": flat(fields.num_patches, value=fields.pixels),
            "pixel_attention_mask": flat(fields.num_patches, value=fields.mask),
        },
        process=hf(
            proc.image_processor,
            outputs={"pixel_values": "pixels", "pixel_attention_mask": "mask"},
            kwargs={"return_row_col_info": True},
            one_by_one=True,
        ),
    ),
)
