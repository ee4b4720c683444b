"""The multimodal side of LLaVA: an image becomes one position per patch of the vision tower."""

from mmkit import Image, Modality, ModelSpec, batched, cfg, hf, proc, replace, tok, where

SIDE = cfg.vision_config.image_size
PATCHES = (SIDE // cfg.vision_config.patch_size) ** 2
CLASS_TOKEN = where(cfg.vision_feature_select_strategy == "full", 1, 0)

LLAVA_LIKE = ModelSpec(
    "llava_like",
    Modality(
        "image",
        # the image processor brings every image to this size
        item=Image(largest=(SIDE, SIDE)),
        # the strategy "default" leaves out the row of the vision tower's class token, "full" keeps it
        placeholder=cfg.image_token_index,
        tokens=PATCHES + CLASS_TOKEN,
        # the caller writes one <image> for each
        update=replace(tok["<image>"]),
        fields={"pixel_values": batched(shape=(3, SIDE, SIDE))},
        # the whole processor wants a text in transformers 4
        process=hf(proc.image_processor),
        # rows that the caller computed before are taken in place of an image
        embeds=True,
    ),
)
