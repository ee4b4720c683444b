"""BLIP-2: a fixed number of query tokens in front of the prompt."""

from mmkit import Image, Modality, ModelSpec, batched, cfg, insert

BLIP2 = ModelSpec(
    "blip2",
    Modality(
        "image",
        item=Image(largest=(cfg.vision_config.image_size, cfg.vision_config.image_size)),
        placeholder="<image>",
        tokens=cfg.num_query_tokens,
        update=insert(at="start"),
        fields={"pixel_values": batched()},
        limit=1,
        embeds=True,
    ),
)
