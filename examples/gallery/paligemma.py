"""PaliGemma: image tokens and another beginning of the text, before a prompt that ends in a newline."""

from mmkit import Image, Modality, ModelSpec, batched, cfg, embed, ending_with, hf, insert, literal, proc, tok, where

tower, tokenizer = cfg.vision_config, proc.tokenizer
image = embed(cfg.image_token_index)
begin = tokenizer.bos_token_id

PALIGEMMA = ModelSpec(
    "paligemma",
    Modality(
        "image",
        item=Image(largest=(tower.image_size, tower.image_size)),
        layout=image * (tower.image_size // tower.patch_size) ** 2 + begin,
        # the tokenizer of PaliGemma 1 begins every text with the token, that of PaliGemma 2 none
        update=insert(after=where(tokenizer.add_bos_token, begin, literal())),
        fields={"pixel_values": batched()},
        process=hf(proc.image_processor),
        limit=1,
        embeds=True,
    ),
    prompt=ending_with(tok["\n"]),
    tokenization_kwargs={"add_special_tokens": False},
)
