"""Samples of a batch, as the tensors that a model receives; `Collator` adds the answers to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.feature_extraction_utils import BatchFeature

from ..errors import InputError
from ..plan import Plan, Preview
from ..spec import Declaration

if TYPE_CHECKING:
    from .processor import Processor

MEDIA = {"image": 1, "video": 2, "audio": 3}
"""The numbers of the modalities that transformers knows."""

IGNORED = -100
"""The label of ids that are not learned, as in transformers."""


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
        lengths = {len(row) for row in rows}
        longest = max(*lengths, self.length)
        if self.is_wanted:
            longest = -(-longest // self.multiple) * self.multiple
        elif len(lengths) > 1:
            expected, got = "prompts of one length", f"lengths {sorted(lengths)}"
            raise InputError(where, expected, got, "Write padding=True.")
        padded = []
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


class Collator:
    """Makes a batch of samples: the `collate_fn` of a `torch.utils.data.DataLoader`, or the
    `data_collator` of a `transformers.Trainer`.

    A sample is a dict with the prompt, as `text` or `input_ids`, the `answer`, as a text or ids,
    and the prompt's items by modality. The prompt is a prompt as a server takes it. The answer
    holds the tokens that the model learns to write, the end token included. The text of an answer
    is tokenized alone, without special tokens.

    Args:
        processor: the spec's processor.
        padding_side: "right" or "left".
        pad_to_multiple_of: the padded length is a multiple of this number.
    """

    def __init__(
        self, processor: Processor, padding_side: str = "right", pad_to_multiple_of: int = 1
    ) -> None:
        if processor.spec.decoder_prompt is not None or processor.spec.is_raw:
            where, expected = processor.spec.name, "a model that goes on with its prompt"
            raise InputError(where, expected, "an encoder-decoder model, or one without a prompt")
        token = processor.pad_token_id
        self.processor = processor
        self._padding = Padding(True, token, padding_side, multiple=pad_to_multiple_of)

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> BatchFeature:
        """The batch: the padded result of `Processor.__call__`, and

        - `labels`: int64 (samples, length), the ids of the answers, and -100 for prompts,
          placeholders and padding.

        Raises:
            InputError: a sample without an answer, an answer with a placeholder, or a prompt that
                vLLM would refuse.
        """
        plan, previews, answers = self.processor.plan, [], []
        for sample in samples:
            items = {key: own for key, own in sample.items() if key != "answer"}
            answer = plan.encode(sample.get("answer", ()), add_special_tokens=False)
            if not answer:
                raise InputError(f"{plan.spec.name}.answer", "a text or ids", "none")
            plan.check_bare(answer)
            prompt = self.processor.preview(**items)
            whole = [*prompt.prompt_token_ids, *answer]
            previews.append(replace(prompt, prompt_token_ids=whole))
            answers.append(len(answer))
        batch = batch_of(plan, previews, self._padding)
        labels = batch["input_ids"].clone()
        for row, mask, count in zip(labels, batch["attention_mask"], answers, strict=True):
            end = int(mask.nonzero()[-1]) + 1
            row[: end - count] = row[end:] = IGNORED
        return BatchFeature({**batch, "labels": labels})
