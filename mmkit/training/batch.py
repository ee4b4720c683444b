"""Samples of a batch, as the tensors that a model receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import InputError
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
        length: the least length.
        multiple: the length is a multiple of this number.
    """

    is_wanted: bool
    token: int
    side: str
    length: int = 0
    multiple: int = 1

    def filled(self, rows: Sequence[Sequence[int]], value: int, where: str) -> torch.Tensor:
        """Rows of one length, int64 (rows, length): `value` stands for padding.

        Raises:
            InputError: rows of several lengths without padding.
        """
        lengths = [len(row) for row in rows]
        longest, padded = max(*lengths, self.length), []
        if self.is_wanted:
            longest = -(-longest // self.multiple) * self.multiple
        elif len({*lengths}) > 1:
            expected, got = "prompts of one length", f"lengths {sorted({*lengths})}"
            raise InputError(where, expected, got, "Write padding=True.")
        for row in rows:
            gap = [value] * (longest - len(row))
            padded.append([*gap, *row] if self.side == "left" else [*row, *gap])
        return torch.tensor(padded, dtype=torch.long)


def prompts_of(
    name: str, prompts: Sequence[Sequence[int]], padding: Padding, where: str
) -> dict[str, Any]:
    """Prompts as a tensor, with their attention mask."""
    mask = padding.filled([[1] * len(prompt) for prompt in prompts], 0, where)
    ids = padding.filled(prompts, padding.token, where)
    return {name: ids, f"{name.removesuffix('input_ids')}attention_mask": mask}


def token_types(spec: Declaration) -> dict[str, int]:
    """The numbers of modalities in `mm_token_type_ids`: 1 for images, 2 for videos, 3 for audio,
    and from 4 on for others, in the order of the spec."""
    numbers = {m.name: MEDIA.get(m.item.media or "") for m in spec.modalities}
    others = [name for name, number in numbers.items() if number is None]
    return {name: number or 4 + others.index(name) for name, number in numbers.items()}


def batch_of(plan: Plan, samples: Sequence[Preview], padding: Padding) -> dict[str, Any]:
    """The samples of a batch as tensors; see `Processor.__call__`."""
    where, numbers = f"{plan.spec.name}.prompt", token_types(plan.spec)
    batch = prompts_of("input_ids", [one.prompt_token_ids for one in samples], padding, where)
    length = batch["input_ids"].shape[1]
    types, placeholders = [], []
    for sample in samples:
        row = [0] * len(sample.prompt_token_ids)
        before = length - len(row) if padding.side == "left" else 0
        for at in sample.placements:
            row[at.start : at.end] = [numbers[at.modality] * one for one in at.placeholder.mask]
        types.append(row)
        placeholders.append([replace(at, start=at.start + before) for at in sample.placements])
    batch |= {"mm_token_type_ids": padding.filled(types, 0, where), "placeholders": placeholders}
    return batch | _fields(plan, samples)


def _fields(plan: Plan, samples: Sequence[Preview]) -> dict[str, Any]:
    """The fields of all items, sample by sample, as a model receives them.

    Raises:
        InputError: precomputed embeddings of a modality beside its raw items.
    """
    batch: dict[str, Any] = {}
    for name, modality in plan.modalities.items():
        parts = [part for sample in samples for part in sample.fields.get(name, ())]
        sent = sum(modality.intake.embeds_field in part for part in parts)
        if 0 < sent < len(parts):
            expected = "raw items or precomputed embeddings in one batch"
            raise InputError(modality.where, expected, "both")
        if sent:
            batch |= {key: [part[key] for part in parts] for key in parts[0]}
        elif parts:
            fields = modality.fields.items()
            batch |= {key: field.batch([part[key] for part in parts]) for key, field in fields}
    return batch
