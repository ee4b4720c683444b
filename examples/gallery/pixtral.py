"""Pixtral: rows of patches, as many as the resized image has; a token between two rows and another after the last."""

from math import ceil, floor

from mmkit import (
    Image,
    Modality,
    ModelSpec,
    batched,
    derived,
    each,
    embed,
    fields,
    hf,
    item,
    kwargs,
    later,
    proc,
    replace,
    tok,
)


@later
def fit(height: int, width: int, side: int, patch: int) -> list[int]:
    """Return [height, width] of an image that is made smaller to a side, and larger to whole patches."""
    ratio = max(height / side, width / side, 1)
    return [ceil(floor(size / ratio) / patch) * patch for size in (height, width)]


SIDE = kwargs.get("size", proc.image_processor.size)["longest_edge"]
PATCH = proc.patch_size * proc.spatial_merge_size
HEIGHT, WIDTH = fields.image_sizes[0], fields.image_sizes[1]
ROW = embed(tok[proc.image_token]) * (WIDTH // PATCH)

PIXTRAL_HF = ModelSpec(
    "pixtral_hf",
    Modality(
        "image",
        item=Image(largest=(SIDE, SIDE)),
        layout=each(HEIGHT // PATCH, lambda _: ROW, sep=tok[proc.image_break_token], last=tok[proc.image_end_token]),
        update=replace(tok[proc.image_token]),
        fields={
            "pixel_values": batched(),
            "image_sizes": derived(fit(item.height, item.width, SIDE, PATCH), hidden=True),
        },
        process=hf(text=proc.image_token, unpad={"pixel_values": (3, HEIGHT, WIDTH)}),
    ),
)
