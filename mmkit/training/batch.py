"""Samples of a batch, as the tensors that a model receives; `Collator` adds the answers to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.feature_extraction_utils import BatchFeature

from ..errors import InputError
from ..language.names import SAMPLE_KEYS
from ..language.spec import Declaration
from ..language.vocabulary import id_text
from ..plan.plan import Plan, Preview

if TYPE_CHECKING:
    from .processor import Processor

MEDIA = {"image": 1, "video": 2, "audio": 3}
"""The numbers of the modalities that transformers knows."""

IGNORED = -100
"""The label of ids that are not learned, as in transformers."""


class Padding(NamedTuple):
    """Padding of prompts to one length.

    Attributes:
        token: the padding id.
        side: "left" or "right".
        length: the least length.
        multiple: the length is a multiple of this number.
        is_wanted: False refuses prompts of several lengths.
    """

    token: int
    side: str
    length: int = 0
    multiple: int = 1
    is_wanted: bool = True

    def prompts(self, name: str, rows: Sequence[Sequence[int]], spec: str) -> dict[str, Any]:
        """Prompts as a tensor, with their attention mask.

        Raises:
            InputError: prompts of several lengths without padding.
        """
        lengths = {len(row) for row in rows}
        if len(lengths) > 1 and not self.is_wanted:
            expected, got = "prompts of one length", f"lengths {sorted(lengths)}"
            raise InputError(f"{spec}.prompt", expected, got, "Write padding=True.")
        mask = self.filled([[1] * len(row) for row in rows], 0)
        ids = self.filled(rows, self.token)
        return {name: ids, f"{name.removesuffix('input_ids')}attention_mask": mask}

    def filled(self, rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
        """Rows of one length, int64 (rows, length): `value` stands for padding."""
        longest = max(*map(len, rows), self.length)
        longest = -(-longest // self.multiple) * self.multiple
        padded = []
        for row in rows:
            gap = [value] * (longest - len(row))
            padded.append([*gap, *row] if self.side == "left" else [*row, *gap])
        return torch.tensor(padded, dtype=torch.long)


def token_types(spec: Declaration) -> dict[str, int]:
    """The numbers of modalities in `mm_token_type_ids`: 1 for images, 2 for videos, 3 for audio,
    and from 4 on for others, in the order of the spec."""
    numbers = {m.name: MEDIA.get(m.item.media or "") for m in spec.modalities}
    others = [name for name, number in numbers.items() if number is None]
    return {name: number or 4 + others.index(name) for name, number in numbers.items()}


def batch_of(plan: Plan, samples: Sequence[Preview], padding: Padding) -> dict[str, Any]:
    """The samples of a batch as tensors; see `Processor.__call__`."""
    numbers, ids = token_types(plan.spec), [one.prompt_token_ids for one in samples]
    batch = padding.prompts("input_ids", ids, plan.spec.name)
    if plan.spec.is_raw:
        # the model reads no prompt, and a field may well be its attention mask
        return {"input_ids": batch["input_ids"], **_fields(plan, samples)}
    types, placeholders = torch.zeros_like(batch["input_ids"]), []
    for row, sample in zip(types, samples, strict=True):
        before = len(row) - len(sample.prompt_token_ids) if padding.side == "left" else 0
        placed = [replace(at, start=at.start + before) for at in sample.placements]
        for at in placed:
            row[at.start : at.end] = numbers[at.modality] * torch.tensor([*at.tokens.mask])
        placeholders.append(placed)
    batch |= {"mm_token_type_ids": types, "placeholders": placeholders}
    return batch | _fields(plan, samples)


def _fields(plan: Plan, samples: Sequence[Preview]) -> dict[str, Any]:
    """The fields of all items, sample by sample, as a model receives them.

    Raises:
        InputError: precomputed embeddings of a modality beside its raw items.
    """
    batch: dict[str, Any] = {}
    for name, modality in plan.modalities.items():
        parts = [part for sample in samples for part in sample.fields.get(name, ())]
        sent = sum(modality.parser.embeds_field in part for part in parts)
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
        self.processor = processor
        self._padding = processor.padded(True, None, padding_side, pad_to_multiple_of)

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> BatchFeature:
        """The batch: the padded result of `Processor.__call__`, and

        - `labels`: int64 (samples, length), the ids of the answers, and -100 for prompts,
          placeholders and padding.

        Raises:
            InputError: a sample without an answer, an answer with a placeholder, or a prompt that
                vLLM would refuse.
        """
        plan = self.processor.plan
        previews: list[Preview] = []
        labels: list[list[int]] = []
        for i, sample in enumerate(samples):
            where = f"{plan.spec.name}.samples[{i}]"
            self._check_keys(sample, where)
            answer = self._answer(sample.get("answer"), f"{where}.answer")
            parts = {key: value for key, value in sample.items() if key != "answer"}
            prompts = self.processor.samples(**parts)
            if len(prompts) != 1:
                raise InputError(where, "one prompt", f"{len(prompts)}", "Give each its sample.")
            request = plan.preview(*prompts[0])
            prompt = request.prompt_token_ids
            previews.append(replace(request, prompt_token_ids=[*prompt, *answer]))
            labels.append([IGNORED] * len(prompt) + answer)
        batch = batch_of(plan, previews, self._padding)
        return BatchFeature({**batch, "labels": self._padding.filled(labels, IGNORED)})

    def _check_keys(self, sample: Any, where: str) -> None:
        """Refuse a sample that is no dict, and keys that nothing reads."""
        if not isinstance(sample, Mapping):
            raise InputError(where, "a dict", type(sample).__name__)
        known = {*SAMPLE_KEYS, *self.processor.item_names}
        for key in sample:
            if key not in known and not str(key).endswith("_embeds"):
                raise InputError(where, f"keys among {sorted(known)}", repr(key))

    def _answer(self, answer: Any, where: str) -> list[int]:
        """Return the ids of an answer.

        Raises:
            InputError: it is no text and no list, array or tensor of ids, is empty, or has an id
                that the model lacks, a placeholder, or a target of items.
        """
        plan = self.processor.plan
        ids = answer
        if isinstance(answer, str):
            ids = plan.encode(answer, add_special_tokens=False)
        elif hasattr(answer, "tolist"):  # an array or a tensor
            ids = answer.tolist()
        if not isinstance(ids, (list, tuple)) or not ids:
            got = "none" if isinstance(ids, (list, tuple)) or ids is None else repr(answer)
            raise InputError(where, "a text or token ids", got)
        for position, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < plan.vocab_size:
                expected = f"a token id from 0 to {plan.vocab_size - 1}"
                raise InputError(f"{where}[{position}]", expected, id_text(token))
        try:
            plan.check_bare(ids)
        except InputError as error:
            expected = "no placeholder and no target, since items stand in the prompt"
            raise InputError(where, expected, f"one of {error.where}") from error
        return list(ids)
