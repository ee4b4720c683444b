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
    where,
)

DEFAULTS = Gemma3ProcessorKwargs._defaults["images_kwargs"]


@later
def views(processor: Any) -> Callable[..., dict[str, Any]]:
    """Return the image processor, with the defaults of the whole processor.

    Only the image processor returns the number of crops.
    """

    def process(**inputs: Any) -> dict[str, Any]:
        return dict(processor.image_processor(**(DEFAULTS | inputs)))

    return process


@later
def image_text(view: str, crops: int) -> str:
    """Return the text of an image: only its view, or a sentence with it and its crops."""
    if not crops:
        return view
    views = " ".join([view] * crops)
    return f"Here is the original image {view} and here are some crops to help you see better {views}"


def option(name):
    """Return an option of `do_pan_and_scan`."""
    return kwargs.get(f"pan_and_scan_{name}", DEFAULTS[f"pan_and_scan_{name}"])


IS_CROPPED = kwargs.get("do_pan_and_scan", DEFAULTS["do_pan_and_scan"])
CROPS = where(IS_CROPPED, fields.num_crops, 0)
SIDE = maximum(proc.image_processor.size["height"], option("min_crop_size"))

GEMMA3 = ModelSpec(
    "gemma3",
    Modality(
        "image",
        item=Image(largest=(SIDE, SIDE * option("max_num_crops"))),
        layout=select(tok.text(image_text(proc.full_image_sequence, CROPS)), embed=tok[proc.tokenizer.image_token]),
        update=replace(tok[proc.boi_token]),
        fields={
            "num_crops": batched(hidden=True),
            "num_patches": derived(CROPS + 1, dtype="int64", keep_on_cpu=True),
            "pixel_values": flat(fields.num_patches),
        },
        process=hf(views(proc)),
    ),
    merges="\n",
)
