"""Phi-3-vision: numbered placeholders in plain text, and between them pieces that are each tokenized as a text."""

import re
from typing import Any

from mmkit import Image, Modality, ModelSpec, Scope, batched, embed, hf, item, later, proc, replace, tok

IMAGE = 32044  # the checkpoints name it nowhere
CROP = 336


@later
def count_tokens(processor: Any, width: int, height: int) -> int:
    """Return the positions of an image of a size."""
    count: int = processor.calc_num_image_tokens_from_image_size(width, height)
    return count


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
        tokens=count_tokens(proc.image_processor, item.width, item.height),
        update=replace(tok.text("<|image_{}|>", item.index + 1)),
        fields={"pixel_values": batched(), "image_sizes": batched(keep_on_cpu=True)},
        process=hf(proc.image_processor),
        embeds=embed(IMAGE) * item.rows,
    ),
    prompt=in_pieces,
)
