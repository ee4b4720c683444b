"""Phi-3-vision: numbered placeholders in plain text, and between them pieces that are each tokenized as a text."""

import re

from mmkit import Image, Modality, ModelSpec, Scope, batched, embed, fields, hf, item, proc, replace, tok

IMAGE = 32044  # the checkpoints name it nowhere
CROP = 336


def in_pieces(s: Scope) -> list[int]:
    """Return the prompt of images with a token that begins a text after each."""
    if not s.counts.get("image") or IMAGE in s.prompt:
        return s.prompt
    tokenizer = s.proc.tokenizer
    ids = s.prompt
    if ids[:1] == [tokenizer.bos_token_id]:
        ids = ids[1:]
    text = s.tok.decode(ids)
    for special in tokenizer.all_special_tokens:  # the tokenizer decodes a space after each
        text = text.replace(f"{special} ", special)
    pieces = []
    for piece in re.split(r"(<\|image_\d+\|>)", text):
        if piece.startswith("<|image_"):
            pieces += s.tok.text(piece)
        else:
            pieces += tokenizer.encode(piece)
    return pieces


PHI3V = ModelSpec(
    "phi3v",
    Modality(
        "image",
        item=Image(largest=(CROP, CROP * proc.image_processor.num_crops)),
        placeholder=IMAGE,
        tokens=fields.num_img_tokens,
        update=replace(tok.text("<|image_{}|>", item.index + 1)),
        fields={
            "pixel_values": batched(),
            "image_sizes": batched(keep_on_cpu=True),
            "num_img_tokens": batched(hidden=True),
        },
        process=hf(proc.image_processor),
        embeds=embed(IMAGE) * item.rows,
    ),
    prompt=in_pieces,
)
