"""Fuyu: rows of patches that end in a newline, then the beginning-of-sequence token. They take the place of the token
with which the tokenizer begins a text, or stand in front of a prompt without it.

Every prompt ends with the token that begins the answer.
"""

from collections.abc import Callable
from math import floor
from typing import Any

from mmkit import (
    Image,
    Modality,
    ModelSpec,
    ceil_div,
    cfg,
    derived,
    embed,
    ending_with,
    fields,
    flat,
    hf,
    insert,
    item,
    kwargs,
    later,
    minimum,
    proc,
    replace,
    tok,
)

size, patch = kwargs.get("size", proc.image_processor.size), proc.image_processor.patch_size
scale = minimum(1, size["height"] / item.height, size["width"] / item.width)
columns = ceil_div(floor(item.width * scale), patch["width"])
rows = ceil_div(floor(item.height * scale), patch["height"])


@later
def flat_patches(processor: Any) -> Callable[..., dict[str, Any]]:
    """Called like the processor. Up to transformers 5.10 its patches have another dimension, of one."""
    return lambda **inputs: {"image_patches": processor(**inputs)["image_patches"].flatten(0, -2)}


FUYU = ModelSpec(
    "fuyu",
    Modality(
        "image",
        item=Image(largest=(size["width"], size["height"])),
        layout=(embed(tok["|SPEAKER|"]) * columns + tok["|NEWLINE|"]) * rows + cfg.bos_token_id,
        update=[replace(tok["|ENDOFTEXT|"]), insert(at="start")],
        fields={
            "image_patches": flat(fields.patches_per_image),
            "patches_per_image": derived(columns * rows, dtype="int64"),
        },
        process=hf(flat_patches(proc)),
        limit=1,
    ),
    prompt=ending_with(tok["<0x04>"]),
)
