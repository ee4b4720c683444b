"""The samples of a batch, as the tensors that a model receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import InputError
from ..language.spec import Declaration
from ..plan.modality import BoundModality
from ..plan.plan import Plan, Preview
from .padding import Padding

MEDIA = {"image": 1, "video": 2, "audio": 3}
"""The numbers of the modalities that transformers has."""

FIRST_NUMBER_OF_OTHERS = 4
"""The number of a spec's first modality that transformers does not have."""


def make_batch(plan: Plan, samples: Sequence[Preview], padding: Padding) -> dict[str, Any]:
    """Return the samples of a batch as tensors; see `Processor.__call__`."""
    prompts = [sample.prompt_token_ids for sample in samples]
    batch: dict[str, Any] = {}
    batch.update(padding.pad_prompts("input_ids", prompts, plan.spec.name))
    if plan.spec.is_raw:
        # The model reads no prompt, and one of its fields may have the name of the mask.
        del batch["attention_mask"]
    else:
        batch.update(_place_items(plan.spec, batch["input_ids"], samples, padding.side))
    for name, modality in plan.modalities.items():
        items: list[Mapping[str, Any]] = []
        for sample in samples:
            items.extend(sample.fields.get(name, ()))
        if items:
            batch.update(_batch_fields(modality, items))
    return batch


def number_modalities(spec: Declaration) -> dict[str, int]:
    """Return the number of each modality in `mm_token_type_ids`.

    Images have 1, videos 2, audio 3; others have the numbers from 4 on, in the order of the spec.
    """
    numbers: dict[str, int] = {}
    next_number = FIRST_NUMBER_OF_OTHERS
    for modality in spec.modalities:
        if modality.item.vllm_modality in MEDIA:
            numbers[modality.name] = MEDIA[modality.item.vllm_modality]
        else:
            numbers[modality.name] = next_number
            next_number += 1
    return numbers


def _place_items(
    spec: Declaration, input_ids: torch.Tensor, samples: Sequence[Preview], side: str
) -> dict[str, Any]:
    """Return `mm_token_type_ids` and `placeholders` of a batch.

    Args:
        spec: the declaration.
        input_ids: int64 (prompts, length), padded.
        samples: their placements count from the first id that is no padding.
        side: the side of the padding.
    """
    numbers = number_modalities(spec)
    types = torch.zeros_like(input_ids)
    placeholders = []
    for row, sample in zip(types, samples, strict=True):
        shift = 0
        if side == "left":
            shift = len(row) - len(sample.prompt_token_ids)
        placements = []
        for placement in sample.placements:
            moved = replace(placement, start=placement.start + shift)
            mask = torch.tensor(list(moved.tokens.mask))
            row[moved.start : moved.end] = numbers[moved.modality] * mask
            placements.append(moved)
        placeholders.append(placements)
    return {"mm_token_type_ids": types, "placeholders": placeholders}


def _batch_fields(modality: BoundModality, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of the items of a modality, sample by sample, as a model receives them.

    Raises:
        InputError: precomputed embeddings beside raw items.
    """
    num_embeds = sum(modality.parser.embeds_field in fields for fields in items)
    if 0 < num_embeds < len(items):
        expected = "raw items or precomputed embeddings in one batch"
        raise InputError(modality.where, expected, "both")
    batch: dict[str, Any] = {}
    if num_embeds:
        for name in items[0]:
            batch[name] = [fields[name] for fields in items]
    else:
        for name, field in modality.fields.items():
            batch[name] = field.batch([fields[name] for fields in items])
    return batch
