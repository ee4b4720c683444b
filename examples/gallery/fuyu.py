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

SIZE, PATCH = kwargs.get("size", proc.image_processor.size), proc.image_processor.patch_size
SCALE = minimum(1, SIZE["height"] / item.height, SIZE["width"] / item.width)
COLUMNS = ceil_div(floor(item.width * SCALE), PATCH["width"])
ROWS = ceil_div(floor(item.height * SCALE), PATCH["height"])


@later
def flat_patches(processor: Any) -> Callable[..., dict[str, Any]]:
    """Return a function that is called like the processor.

    Up to transformers 5.10 the processor's patches have another dimension, of one.
    """
    return lambda **inputs: {"image_patches": processor(**inputs)["image_patches"].flatten(0, -2)}


FUYU = ModelSpec(
    "fuyu",
    Modality(
        "image",
        item=Image(largest=(SIZE["width"], SIZE["height"])),
        layout=(embed(tok["|SPEAKER|"]) * COLUMNS + tok["|NEWLINE|"]) * ROWS + cfg.bos_token_id,
        update=[replace(tok["|ENDOFTEXT|"]), insert(at="start")],
        fields={
            "image_patches": flat(fields.patches_per_image),
            "patches_per_image": derived(COLUMNS * ROWS, dtype="int64"),
        },
        process=hf(flat_patches(proc)),
        limit=1,
    ),
    prompt=ending_with(tok["<0x04>"]),
)
