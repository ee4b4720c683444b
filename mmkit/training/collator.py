"""`Collator`: a batch of samples with the labels of their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers.feature_extraction_utils import BatchFeature

from ..errors import InputError
from ..language.names import SAMPLE_KEYS
from ..language.vocabulary import describe_id
from ..plan.plan import Preview
from .batch import make_batch
from .padding import parse_padding
from .processor import Processor

IGNORED = -100
"""The label of ids that are not learned, as in transformers."""


class Collator:
    """Makes a batch of samples.

    It is the `collate_fn` of a `torch.utils.data.DataLoader`, or the `data_collator` of a
    `transformers.Trainer`.

    A sample is a dict with the prompt, as `text` or `input_ids`, the `answer`, as a text or ids,
    and the prompt's items by modality. The prompt is a prompt as a server takes it. The answer
    holds the tokens that the model learns to write, the end token included. The text of an answer
    is tokenized by itself, without special tokens.

    Args:
        processor: the spec's processor.
        padding_side: "right" or "left".
        pad_to_multiple_of: the padded length is a multiple of this number.
    """

    def __init__(
        self, processor: Processor, padding_side: str = "right", pad_to_multiple_of: int = 1
    ) -> None:
        spec = processor.spec
        if spec.decoder_prompt is not None or spec.is_raw:
            got = "an encoder-decoder model, or one without a prompt"
            raise InputError(spec.name, "a model that goes on with its prompt", got)
        self.processor = processor
        self._padding = parse_padding(
            processor.plan,
            processor.tokenizer,
            padding=True,
            padding_side=padding_side,
            pad_to_multiple_of=pad_to_multiple_of,
        )

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> BatchFeature:
        """Return the padded result of `Processor.__call__` for the prompts and their answers.

        Besides, it has `labels`: int64 (samples, length), the ids of the answers, and -100 for
        prompts, placeholders and padding.

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
            answer = self._parse_answer(sample.get("answer"), f"{where}.answer")
            preview = self._process_prompt(sample, where)
            prompt = preview.prompt_token_ids
            previews.append(replace(preview, prompt_token_ids=prompt + answer))
            labels.append([IGNORED] * len(prompt) + answer)
        batch = make_batch(plan, previews, self._padding)
        batch["labels"] = self._padding.pad_rows(labels, IGNORED)
        return BatchFeature(batch)

    def _check_keys(self, sample: Any, where: str) -> None:
        """Refuse a sample that is no dict, and keys that nothing reads."""
        if not isinstance(sample, Mapping):
            raise InputError(where, "a dict", type(sample).__name__)
        keys = {*SAMPLE_KEYS, *self.processor.item_names}
        for key in sample:
            # the processor tells what to do about embeddings by a name of their own
            if key not in keys and not str(key).endswith("_embeds"):
                raise InputError(where, f"keys among {sorted(keys)}", repr(key))

    def _process_prompt(self, sample: Mapping[str, Any], where: str) -> Preview:
        """Return the prompt of a sample with its items."""
        arguments = {key: value for key, value in sample.items() if key != "answer"}
        prompts = self.processor.split_samples(**arguments)
        if len(prompts) != 1:
            raise InputError(where, "one prompt", str(len(prompts)), "Give each its sample.")
        return self.processor.plan.preview(prompts[0].prompt, prompts[0].items)

    def _parse_answer(self, answer: Any, where: str) -> list[int]:
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
        is_list = isinstance(ids, (list, tuple))
        if not is_list or not ids:
            got = "none" if is_list or ids is None else repr(answer)
            raise InputError(where, "a text or token ids", got)
        for position, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < plan.vocab_size:
                expected = f"a token id from 0 to {plan.vocab_size - 1}"
                raise InputError(f"{where}[{position}]", expected, describe_id(token))
        try:
            plan.check_bare(ids)
        except InputError as error:
            expected = "no placeholder and no target, since items stand in the prompt"
            raise InputError(where, expected, f"one of {error.where}") from error
        return list(ids)
