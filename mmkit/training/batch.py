"""Samples of a batch, as the tensors that a model receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import InputError
from ..placement import Placement
from ..plan import Plan, Preview
from ..spec import Declaration

MEDIA = {"image": 1, "video": 2, "audio": 3}
"""The numbers of the modalities that transformers knows."""


@dataclass(frozen=True)
class Padding:
    """Padding of prompts to one length.

    Attributes:
        is_wanted: False refuses prompts of several lengths.
        token: the padding id.
        side: "left" or "right".
        length: the least length; None for the length of the longest prompt.
        multiple: the length is a multiple of this number.
    """

    is_wanted: bool
    token: int
    side: str
    length: int | None = None
    multiple: int = 1

    def of(self, prompts: Sequence[Sequence[int]], where: str) -> list[int]:
        """The number of padding ids of each prompt.

        Raises:
            InputError: prompts of several lengths without padding.
        """
        lengths = {len(prompt) for prompt in prompts}
        if not self.is_wanted:
            if len(lengths) > 1:
                expected, got = "prompts of one length", f"lengths {sorted(lengths)}"
                raise InputError(where, expected, got, "Write padding=True.")
            return [0] * len(prompts)
        longest = max(*lengths, self.length or 0)
        longest = -(-longest // self.multiple) * self.multiple
        return [longest - len(prompt) for prompt in prompts]


def token_types(spec: Declaration) -> dict[str, int]:
    """The numbers of modalities in `mm_token_type_ids`: 1 for images, 2 for videos, 3 for audio,
    and from 4 on for others, in the order of the spec."""
    numbers = {m.name: MEDIA.get(m.item.media or "") for m in spec.modalities}
    others = [name for name, number in numbers.items() if number is None]
    return {name: number or 4 + others.index(name) for name, number in numbers.items()}


def prompts_of(
    name: str, prompts: Sequence[Sequence[int]], padding: Padding, where: str
) -> dict[str, Any]:
    """Prompts as a tensor, with their attention mask."""
    missing = padding.of(prompts, where)
    prefix = name.removesuffix("input_ids")
    rows = [
        _padded(ids, n, padding, padding.token) for ids, n in zip(prompts, missing, strict=True)
    ]
    masks = [
        _padded([1] * len(ids), n, padding, 0) for ids, n in zip(prompts, missing, strict=True)
    ]
    tensors = {name: rows, f"{prefix}attention_mask": masks}
    return {key: torch.tensor(values, dtype=torch.long) for key, values in tensors.items()}


def _padded(values: Sequence[int], missing: int, padding: Padding, filler: int) -> list[int]:
    added = [filler] * missing
    return [*added, *values] if padding.side == "left" else [*values, *added]


def batch_of(plan: Plan, samples: Sequence[Preview], padding: Padding) -> dict[str, Any]:
    """The samples of a batch as tensors; see `Processor.__call__`."""
    where = f"{plan.spec.name}.prompt"
    prompts = [sample.prompt_token_ids for sample in samples]
    batch = prompts_of("input_ids", prompts, padding, where)
    types = torch.zeros_like(batch["input_ids"])
    placeholders: list[list[Placement]] = []
    numbers = token_types(plan.spec)
    for sample, row, missing in zip(samples, types, padding.of(prompts, where), strict=True):
        shift = missing if padding.side == "left" else 0
        placed = [replace(at, start=at.start + shift) for at in sample.placements]
        for at in placed:
            mask = torch.tensor(list(at.placeholder.mask), dtype=torch.long)
            row[at.start : at.start + len(mask)] = mask * numbers[at.modality]
        placeholders.append(placed)
    batch |= {"mm_token_type_ids": types, "placeholders": placeholders}
    return batch | fields_of(plan, samples)


def fields_of(plan: Plan, samples: Sequence[Preview]) -> dict[str, Any]:
    """The fields of all items, sample by sample, as a model receives them.

    Raises:
        InputError: precomputed embeddings of a modality beside its raw items.
    """
    batch: dict[str, Any] = {}
    for name, modality in plan.modalities.items():
        parts: list[Mapping[str, Any]] = [
            part for sample in samples for part in sample.fields.get(name, ())
        ]
        embeds = modality.intake.embeds_field
        sent = sum(embeds in part for part in parts)
        if 0 < sent < len(parts):
            expected = "raw items or precomputed embeddings in one batch"
            raise InputError(modality.where, expected, "both")
        if sent:
            batch |= {key: [part[key] for part in parts] for key in parts[0]}
        elif parts:
            for key, field in modality.fields.items():
                batch[key] = field.batch([part[key] for part in parts])
    return batch
