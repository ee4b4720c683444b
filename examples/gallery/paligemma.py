"""PaliGemma: image tokens and another beginning of the text, before a prompt that ends in a newline."""

from mmkit import Image, Modality, ModelSpec, batched, cfg, embed, ending_with, hf, insert, literal, proc, tok, where

TOWER, TOKENIZER = cfg.vision_config, proc.tokenizer
IMAGE = embed(cfg.image_token_index)
BEGIN = TOKENIZER.bos_token_id

PALIGEMMA = ModelSpec(
    "paligemma",
    Modality(
        "image",
        item=Image(largest=(TOWER.image_size, TOWER.image_size)),
        layout=IMAGE * (TOWER.image_size // TOWER.patch_size) ** 2 + BEGIN,
        # the tokenizer of PaliGemma 1 begins every text with the token, that of PaliGemma 2 none
        update=insert(after=where(TOKENIZER.add_bos_token, BEGIN, literal())),
        fields={"pixel_values": batched()},
        process=hf(proc.image_processor),
        limit=1,
        embeds=True,
    ),
    prompt=ending_with(tok["\n"]),
    tokenization_kwargs={"add_special_tokens": False},
)
