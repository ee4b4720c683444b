"""What a model accepts, for clients that have not read its spec."""

from __future__ import annotations

from typing import Any

import torch

from ..bound.modality import BoundModality
from ..items import Audio, Between, Image, Tensor, Video
from ..updates import AlreadyExpanded
from .protocol import ModalityInfo
from .wire import encode


def describe(modality: BoundModality, limit: int | None) -> ModalityInfo:
    """A modality in the answer of ``GET /v1/mm/modalities``."""
    kind, known, placeholders = modality.item, not modality.needs_hf, modality.placeholders
    written = set()
    for value in kind.extremes() if known else ():
        scope = modality.scope(value, 0, _fields(modality, value))
        written.add(tuple(placeholders.alternatives(scope)[0].written))
    shape = None
    if isinstance(kind, Tensor):
        shape = [[size.least, size.most] if isinstance(size, Between) else size for size in kind.shape]
    return ModalityInfo(
        name=modality.name,
        expected=kind.expected,
        shape=shape,
        dtype=kind.dtype if isinstance(kind, Tensor) else None,
        limit=limit,
        largest_tokens=modality.largest()[1] if known else None,
        placeholder=list(written.pop()) if len(written) == 1 and not placeholders.depends_on_index else None,
        in_place=isinstance(placeholders.updates[0], AlreadyExpanded),
        embeds=modality.intake.embeds_field if modality.intake.takes_embeds else None,
        example=_example(modality),
    )


_WRITTEN_OUT = 32
"""Numbers of an example that are lists; more are base64."""


def _fields(modality: BoundModality, value: Any) -> Any:
    return modality.processing.run([value]).parts[0] if modality.processing.hf is None else None


def _example(modality: BoundModality) -> Any:
    match modality.item:
        case Tensor():
            smallest = modality.item.extremes()[-1]
            if smallest.numel() <= _WRITTEN_OUT:
                return smallest.tolist()
            # eight bits are the shortest form that every dtype but bool takes
            short = smallest if smallest.dtype == torch.bool else smallest.to(torch.int8)
            return encode({"item": short})["item"]
        case Image():
            from PIL import Image as PILImage

            return encode({"image": PILImage.new("RGB", (32, 32))})["image"][0]
        case Video():
            return {"video_url": {"url": "data:video/mp4;base64,..."}}
        case Audio():
            return {"audio_url": {"url": "data:audio/wav;base64,..."}}
    return None
