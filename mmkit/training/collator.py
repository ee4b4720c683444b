"""Prompts with items and the answers to them, as a batch for training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.feature_extraction_utils import BatchFeature

from ..errors import InputError
from .batch import Padding, batch_of
from .processor import Processor

IGNORED = -100
"""The label of what is not learned, as in transformers."""


class Collator:
    """Makes a batch of samples: the `collate_fn` of a `torch.utils.data.DataLoader`, or the
    `data_collator` of a `transformers.Trainer`.

    A sample is a dict with the prompt, as `text` or `input_ids`, the `answer` to it, as a text or
    ids, and its items by modality. The prompt is what a server takes; the answer what the model is
    to write, with the token that ends it. A text of an answer is tokenized by itself, without
    special tokens.

    Args:
        processor: of the spec.
        padding_side: "right" or "left".
        pad_to_multiple_of: what the padded length is a multiple of.
    """

    def __init__(
        self, processor: Processor, padding_side: str = "right", pad_to_multiple_of: int = 1
    ) -> None:
        if processor.spec.decoder_prompt is not None or processor.spec.is_raw:
            where, expected = processor.spec.name, "a model that goes on with its prompt"
            raise InputError(where, expected, "an encoder-decoder model, or one without a prompt")
        self.processor = processor
        token = processor.pad_token_id
        self._padding = Padding(True, token, padding_side, multiple=pad_to_multiple_of)

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> BatchFeature:
        """The batch: what `Processor.__call__` returns, padded, and

        - `labels`: int64 (samples, length), the ids of the answers, and -100 for prompts,
          placeholders and padding.

        Raises:
            InputError: a sample without an answer, an answer with a placeholder, or a prompt that
                vLLM would refuse.
        """
        plan, where = self.processor.plan, f"{self.processor.spec.name}.answer"
        previews, answers = [], []
        for sample in samples:
            fields = dict(sample)
            text, ids = fields.pop("text", None), fields.pop("input_ids", None)
            answer = plan.encode(fields.pop("answer", ()), add_special_tokens=False)
            if not answer:
                raise InputError(where, "a text or ids", "none")
            plan.check_bare(answer)
            prompt = self.processor.preview(text, ids, fields)
            whole = [*prompt.prompt_token_ids, *answer]
            previews.append(replace(prompt, prompt_token_ids=whole))
            answers.append(len(answer))
        batch = batch_of(plan, previews, self._padding)
        learned = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
        for row, mask, count in zip(learned, batch["attention_mask"], answers, strict=True):
            row[mask.nonzero()[-count:, 0]] = True
        labels = batch["input_ids"].masked_fill(~learned, IGNORED)
        return BatchFeature({**batch, "labels": labels})
