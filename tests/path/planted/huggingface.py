"""Bugs that the laws of mmkit/testing/laws/huggingface.py catch: other ids, fields and positions than the model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PIL import Image as PILImage

from mmkit import MultiModalModel, cfg, embed, hf, proc, tok
from mmkit.model.mrope import get_mrope_input_positions
from mmkit.testing import Subject
from mmkit.testing.options import BYTES_OPTIONS
from tests.oracles import SYSTEMS

from .base import Encoders, llava, qwen
from .bug import override, planted

# -- reference ---------------------------------------------------------------------------------------------------------


@planted("reference", r"the Hugging Face processor and vLLM, of '.*<image>.*': ids: ")
def token_that_the_reference_lacks() -> Subject:
    return llava(layout=embed(cfg.image_token_index) * 16 + tok["</s>"])


@planted("reference", r"the Hugging Face processor and vLLM, of '.*<image>.*': ids: \d+ and \d+ long")
def positions_beside_the_reference() -> Subject:
    return llava(layout=embed(cfg.image_token_index) * 17)


@planted("reference", r"of '.*<image>.*': the field 'pixel_values' has other values")
def channels_in_another_order() -> Subject:
    def process(items, scope):
        result = scope.proc.image_processor(list(items), return_tensors="pt")
        return {"pixel_values": result["pixel_values"].flip(-3)}

    return llava(process=process)


@planted("reference", r"of '.*<image>.*': the field 'pixel_values' has other values")
def bytes_by_another_filter() -> Subject:
    options = {**BYTES_OPTIONS, "resample": PILImage.Resampling.BILINEAR}
    return llava(process=hf(proc.image_processor, kwargs=options))


# -- positions ---------------------------------------------------------------------------------------------------------


class Rotated(MultiModalModel, Encoders):
    """Qwen2-VL as far as its positions go."""

    get_mrope_input_positions = get_mrope_input_positions

    def embed_image(self, **fields: Any) -> Any: ...
    def embed_video(self, **fields: Any) -> Any: ...


def with_positions(change: Callable[..., Any]) -> Subject:
    """Return Qwen2-VL with a model class that computes other positions, a function of the correct ones."""
    return qwen(override(Rotated, "get_mrope_input_positions", change))


@planted("positions", r"token \d+ is at \[\d+, \d+, \d+\], and in Qwen2VLModel at \[\d+, \d+, \d+\]")
def height_and_width_swapped() -> Subject:
    for modality in SYSTEMS["qwen2_vl"].load_spec().modalities:
        if modality.name == "image":
            time, height, width = modality.positions
    return qwen(positions={"image": (time, width, height)})


@planted("positions", r"the token after the prompt is at \d+, and in Qwen2VLModel at \d+")
def next_token_one_too_far() -> Subject:
    def compute_positions(correct, ids, items):
        positions, delta = correct(ids, items)
        return positions, delta + 1

    return with_positions(compute_positions)


@planted("positions", r"token \d+ is at \[(\d+), \1, \1\], and in Qwen2VLModel at \[")
def second_item_numbered_as_text() -> Subject:
    def compute_positions(correct, ids, items):
        return correct(ids, items[:1])

    return with_positions(compute_positions)


@planted("positions", r"token \d+ is at \[.*\], and of the first \d+ alone at \[")
def positions_of_what_follows() -> Subject:
    def compute_positions(correct, ids, items):
        positions, delta = correct(ids, items)
        if items:
            place = items[0].mm_position
            positions[:, place.offset : place.offset + place.length] += len(items) - 1
        return positions, delta

    return with_positions(compute_positions)
