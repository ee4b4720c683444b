"""Samples of a batch, as the tensors that a model receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import pad

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

    def widths(self, prompts: Sequence[Sequence[int]], where: str) -> list[tuple[int, int]]:
        """The numbers of padding ids before and after each prompt.

        Raises:
            InputError: prompts of several lengths without padding.
        """
        lengths = [len(prompt) for prompt in prompts]
        longest = max(*lengths, self.length or 0, 0)
        if self.is_wanted:
            longest = -(-longest // self.multiple) * self.multiple
        elif len({*lengths}) > 1:
            expected, got = "prompts of one length", f"lengths {sorted({*lengths})}"
            raise InputError(where, expected, got, "Write padding=True.")
        is_left = self.side == "left"
        gaps = [longest - length for length in lengths]
        return [(gap, 0) if is_left else (0, gap) for gap in gaps]


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
    ids, mask = [], []
    for prompt, width in zip(prompts, padding.widths(prompts, where), strict=True):
        row = torch.tensor(prompt, dtype=torch.long)
        ids.append(pad(row, width, value=padding.token))
        mask.append(pad(torch.ones_like(row), width))
    prefix = name.removesuffix("input_ids")
    return {name: torch.stack(ids), f"{prefix}attention_mask": torch.stack(mask)}


def batch_of(plan: Plan, samples: Sequence[Preview], padding: Padding) -> dict[str, Any]:
    """The samples of a batch as tensors; see `Processor.__call__`."""
    where, numbers = f"{plan.spec.name}.prompt", token_types(plan.spec)
    prompts = [sample.prompt_token_ids for sample in samples]
    types: list[torch.Tensor] = []
    placeholders: list[list[Placement]] = []
    for sample, width in zip(samples, padding.widths(prompts, where), strict=True):
        row = torch.zeros(len(sample.prompt_token_ids), dtype=torch.long)
        for at in sample.placements:
            mask = torch.tensor(list(at.placeholder.mask), dtype=torch.long)
            row[at.start : at.start + len(mask)] = mask * numbers[at.modality]
        types.append(pad(row, width))
        placeholders.append([replace(at, start=at.start + width[0]) for at in sample.placements])
    batch = prompts_of("input_ids", prompts, padding, where)
    batch |= {"mm_token_type_ids": torch.stack(types), "placeholders": placeholders}
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
