"""Qwen-VL: a fixed number of queries between a start and an end token.

What a prompt has between the two, the picture's path or padding, is dropped.
"""

from transformers import CLIPImageProcessor

from mmkit import Image, Modality, ModelSpec, Scope, batched, cfg, embed, hf, later, literal, replace, tok

size = cfg.visual["image_size"]


@later
def pictures(side: int) -> CLIPImageProcessor:
    """CLIP's processing at the model's size, without the crop."""
    return CLIPImageProcessor(size={"height": side, "width": side}, do_center_crop=False)


def without_paths(s: Scope) -> list[int]:
    """The prompt with ``<img></img>`` for every ``<img>...</img>``."""
    begin, end = s.tok["<img>"], s.tok["</img>"]
    remaining: list[int] = []
    position = 0
    while begin in s.prompt[position:] and end in (rest := s.prompt[s.prompt.index(begin, position) :]):
        remaining += [*s.prompt[position : len(s.prompt) - len(rest)], begin, end]
        position = len(s.prompt) - len(rest) + rest.index(end) + 1
    return remaining + s.prompt[position:]


QWEN_VL = ModelSpec(
    "qwen_vl",
    Modality(
        "image",
        item=Image(largest=(size, size)),
        layout=tok["<img>"] + embed(tok["<imgpad>"]) * (size // cfg.visual["patch_size"] // 2) ** 2 + tok["</img>"],
        update=replace(literal(tok["<img>"], tok["</img>"])),
        fields={"pixel_values": batched()},
        process=hf(pictures(size)),
        embeds=True,
    ),
    prompt=without_paths,
)
