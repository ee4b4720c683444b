"""Pixtral: rows of patches, as many as the resized image has; a token between two rows and another after the last."""

from mmkit import Image, Modality, ModelSpec, batched, each, embed, fields, hf, proc, replace, tok

side = proc.image_processor.size["longest_edge"]
patch = proc.patch_size * proc.spatial_merge_size
height, width = fields.image_sizes[0], fields.image_sizes[1]
row = embed(tok[proc.image_token]) * (width // patch)

PIXTRAL_HF = ModelSpec(
    "pixtral_hf",
    Modality(
        "image",
        item=Image(largest=(side, side)),
        layout=each(height // patch, lambda _: row, sep=tok[proc.image_break_token], last=tok[proc.image_end_token]),
        update=replace(tok[proc.image_token]),
        fields={"pixel_values": batched(), "image_sizes": batched(hidden=True)},
        process=hf(text=proc.image_token, unpad={"pixel_values": (3, height, width)}),
    ),
)
