"""Pixtral: rows of patches, as many as the resized image has; a token between two rows and another after the last."""

from math import ceil, floor

from mmkit import (
    Image,
    Modality,
    ModelSpec,
    batched,
    each,
    embed,
    hf,
    item,
    kwargs,
    maximum,
    proc,
    replace,
    tok,
)

SIDE = kwargs.get("size", proc.image_processor.size)["longest_edge"]
PATCH = proc.patch_size * proc.spatial_merge_size
RATIO = maximum(item.height / SIDE, item.width / SIDE, 1)  # by which an image is made smaller
HEIGHT = ceil(floor(item.height / RATIO) / PATCH) * PATCH
WIDTH = ceil(floor(item.width / RATIO) / PATCH) * PATCH
ROW = embed(tok[proc.image_token]) * (WIDTH // PATCH)

PIXTRAL_HF = ModelSpec(
    "pixtral_hf",
    Modality(
        "image",
        item=Image(largest=(SIDE, SIDE)),
        layout=each(HEIGHT // PATCH, lambda _: ROW, sep=tok[proc.image_break_token], last=tok[proc.image_end_token]),
        update=replace(tok[proc.image_token]),
        fields={"pixel_values": batched()},
        process=hf(text=proc.image_token, unpad={"pixel_values": (3, HEIGHT, WIDTH)}),
    ),
)
