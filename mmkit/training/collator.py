"""Prompts with items and the answers to them, as a batch for training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers.feature_extraction_utils import BatchFeature

from ..errors import InputError
from .batch import Padding, batch_of
from .processor import Processor

IGNORED = -100
"""The label of ids that are not learned, as in transformers."""


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
