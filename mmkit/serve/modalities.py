"""The modalities of a model, for clients that have not read its spec."""

from __future__ import annotations

from typing import Any

import torch

from ..bound.modality import BoundModality
from ..bound.output import BoundOutput
from ..items import ItemType
from ..updates import AlreadyExpanded
from .protocol import ModalityInfo, OutputInfo, PartInfo
from .wire import encode


def describe(modality: BoundModality, limit: int | None) -> ModalityInfo:
    """A modality in the answer of ``GET /v1/mm/modalities``."""
    kind, known, placeholders = modality.item, not modality.needs_hf, modality.placeholders
    written = set()
    for value in (*kind.candidates(), *kind.smallest()) if known else ():
        scope = modality.scope(value, 0, modality.fields_of([value])[0])
        written.add(tuple(placeholders.alternatives(scope)[0].written))
    return ModalityInfo(
        name=modality.name,
        expected=kind.expected,
        **kind.schema(),
        limit=limit,
        largest_tokens=modality.largest()[1] if known else None,
        placeholder=list(written.pop())
        if len(written) == 1 and not placeholders.depends_on_index
        else None,
        in_place=isinstance(placeholders.updates[0], AlreadyExpanded),
        embeds=modality.intake.embeds_field if modality.intake.takes_embeds else None,
        embeds_with={
            name: PartInfo(expected=part.expected, **part.schema())
            for name, part in modality.intake.companions.items()
        },
        example=_example(kind),
    )


def describe_output(output: BoundOutput) -> OutputInfo:
    """An output in the same answer."""
    return OutputInfo(
        name=output.name,
        tokens=output.num_tokens,
        shape=list(output.shape),
        dtype=output.dtype,
        png=output.is_image,
    )


_WRITTEN_OUT = 32
"""Numbers of an example that are lists; more are base64."""


def _example(kind: ItemType) -> Any:
    """A small item in JSON; of one that comes as a file, how the JSON begins."""
    if kind.mime:
        return {f"{kind.media}_url": {"url": f"data:{kind.mime};base64,..."}}
    return _in_json(next(reversed(kind.small()), None))


def _in_json(example: Any) -> Any:
    if isinstance(example, dict):
        return {name: _in_json(part) for name, part in example.items()}
    if isinstance(example, torch.Tensor):
        if example.numel() <= _WRITTEN_OUT:
            return example.tolist()
        if example.dtype != torch.bool:  # eight bits are the shortest form that every other takes
            example = example.to(torch.int8)
    return encode({"item": [example]})["item"][0]
