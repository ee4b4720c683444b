"""Gemma 3: an image and, with `do_pan_and_scan`, its crops, in a sentence.

Each view stands between two newlines and two more, which merge with newlines of the prompt.
"""

from collections.abc import Callable
from typing import Any

from transformers.models.gemma3.processing_gemma3 import Gemma3ProcessorKwargs

from mmkit import (
    Image,
    Modality,
    ModelSpec,
    batched,
    derived,
    fields,
    flat,
    hf,
    kwargs,
    later,
    maximum,
    proc,
    replace,
    select,
    tok,
)

DEFAULTS = Gemma3ProcessorKwargs._defaults["images_kwargs"]


@later
def views(processor: Any) -> Callable[..., dict[str, Any]]:
    """The image processor, with the defaults of the whole processor: it alone tells the number of crops."""
    return lambda **inputs: dict(processor.image_processor(**{**DEFAULTS, **inputs}))


@later
def written(view: str, crops: int) -> str:
    """The text of an image: it alone, or a sentence with it and its crops."""
    if not crops:
        return view
    return f"Here is the original image {view} and here are some crops to help you see better " + " ".join(
        [view] * crops
    )


def option(name):
    return kwargs.get(f"pan_and_scan_{name}", DEFAULTS[f"pan_and_scan_{name}"])


side = maximum(proc.image_processor.size["height"], option("min_crop_size"))

GEMMA3 = ModelSpec(
    "gemma3",
    Modality(
        "image",
        item=Image(largest=(side, side * option("max_num_crops"))),
        layout=select(
            tok.text(written(proc.full_image_sequence, fields.num_crops)), embed=tok[proc.tokenizer.image_token]
        ),
        update=replace(tok[proc.boi_token]),
        fields={
            "num_crops": batched(hidden=True),
            "num_patches": derived(fields.num_crops + 1, dtype="int64", keep_on_cpu=True),
            "pixel_values": flat(fields.num_patches),
        },
        process=hf(views(proc)),
    ),
    merges="\n",
)
