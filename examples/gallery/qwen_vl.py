"""Qwen-VL: a fixed number of queries between a start and an end token.

What a prompt has between the two, the picture's path or padding, is dropped.
"""

from transformers import CLIPImageProcessor

from mmkit import Image, Modality, ModelSpec, Scope, batched, cfg, embed, hf, later, literal, replace, tok

SIZE = cfg.visual["image_size"]


@later
def pictures(side: int) -> CLIPImageProcessor:
    """Return CLIP's processing at the model's size, without the crop."""
    return CLIPImageProcessor(size={"height": side, "width": side}, do_center_crop=False)


def without_paths(s: Scope) -> list[int]:
    """Return the prompt with ``<img></img>`` for every ``<img>...</img>``."""
    begin = s.tok["<img>"]
    end = s.tok["</img>"]
    ids: list[int] = []
    position = 0
    while begin in s.prompt[position:]:
        start = s.prompt.index(begin, position)
        if end not in s.prompt[start:]:
            break
        ids += s.prompt[position:start] + [begin, end]
        position = s.prompt.index(end, start) + 1
    return ids + s.prompt[position:]


QWEN_VL = ModelSpec(
    "qwen_vl",
    Modality(
        "image",
        item=Image(largest=(SIZE, SIZE)),
        layout=tok["<img>"] + embed(tok["<imgpad>"]) * (SIZE // cfg.visual["patch_size"] // 2) ** 2 + tok["</img>"],
        update=replace(literal(tok["<img>"], tok["</img>"])),
        fields={"pixel_values": batched()},
        process=hf(pictures(SIZE)),
        embeds=True,
    ),
    prompt=without_paths,
)
