"""Chameleon: image tokens between a start and an end token; every prompt ends with the separator of a turn."""

from mmkit import Image, Modality, ModelSpec, batched, cfg, embed, ending_with, hf, proc, replace, tok

CHAMELEON = ModelSpec(
    "chameleon",
    Modality(
        "image",
        item=Image(largest=(cfg.vq_config.resolution, cfg.vq_config.resolution)),
        layout=tok[proc.image_start_token]
        + embed(tok[proc.image_token]) * proc.image_seq_length
        + tok[proc.image_end_token],
        update=replace(tok[proc.image_token]),
        fields={"pixel_values": batched()},
        process=hf(text=proc.image_token),
        limit=1,
    ),
    prompt=ending_with(tok["<reserved08706>"]),
)
