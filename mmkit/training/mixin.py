"""The model side for training: a language model of transformers that reads items."""

from __future__ import annotations

from itertools import chain
from typing import Any, ClassVar

import torch

from ..errors import InputError, MmkitError
from ..language.spec import Declaration
from ..plan.encoder_rows import encoder_rows
from .batch import token_types


class MultiModalMixin:
    """Mixin for a causal language model of transformers, the training side of
    `mmkit.MultiModalModel`; put it first among the bases, and set `mm_spec`.

    For each modality the class defines ``embed_<modality>(self, **fields)``, the same method as in
    the class for vLLM: it receives the fields of a `Processor` and returns one (rows, hidden_size)
    tensor per item, as a list or stacked. vLLM loads the checkpoints of a class of the same name.

    >>> class WavesForCausalLM(MultiModalMixin, LlamaForCausalLM):
    ...     mm_spec = WAVES
    ...
    ...     def __init__(self, config):
    ...         super().__init__(config)
    ...         self.encoder = PatchEncoder(config)
    ...         self.post_init()
    ...
    ...     def embed_series(self, series):
    ...         return [self.encoder(one) for one in series]

    `forward` and `generate` take a batch of a `Processor` or a `Collator` as it is, ``model(
    **batch)``: `input_ids`, `mm_token_type_ids`, `placeholders` and the fields.
    """

    mm_spec: ClassVar[Declaration]

    def forward(self, input_ids: torch.Tensor | None = None, **inputs: Any) -> Any:
        """The language model's result for a batch, with encoder rows at the placeholders.

        Args:
            input_ids: int64 (prompts, length), expanded.
            inputs: the rest of the batch, for example `labels`, and arguments of the language
                model.

        Raises:
            InputError: items without `mm_token_type_ids`.
            MmkitError: an `embed_<modality>` returned rows for another number of items, another
                number of rows than the prompts have positions, or rows of another width than the
                language model's.
        """
        return super().forward(**self._embedded(input_ids, **inputs))  # type: ignore[misc]

    def generate(self, inputs: torch.Tensor | None = None, **options: Any) -> Any:
        """The ids that transformers' `generate` adds to the prompts of a batch. Pad prompts on the
        left.

        vLLM never samples a placeholder. For the same here, pass
        ``suppress_tokens=sorted(processor.plan.embed_ids)``, or set it in `generation_config`.

        Args:
            inputs: `input_ids`, if they do not come by name.
            options: the rest of the batch, and arguments of `generate`.

        Raises:
            InputError: as for `forward`.
            MmkitError: as for `forward`.
        """
        input_ids = options.pop("input_ids", inputs)
        embedded = self._embedded(input_ids, **options)
        return super().generate(**{**embedded, "input_ids": input_ids})  # type: ignore[misc]

    def _embedded(self, input_ids: torch.Tensor | None, **rest: Any) -> dict[str, Any]:
        """The inputs of the language model: embeddings for a batch with items, else ids."""
        spec, sent = self.mm_spec, {}
        types, placeholders = rest.pop("mm_token_type_ids", None), rest.pop("placeholders", None)
        for m in spec.modalities:
            names = [f"{m.name}_embeds", *m.fields]
            sent[m.name] = {key: own for key in names if (own := rest.pop(key, None)) is not None}
        given = [name for name, fields in sent.items() if fields]
        if not given:
            return {"input_ids": input_ids, **rest}
        if input_ids is None or types is None:
            expected = "input_ids and mm_token_type_ids beside items"
            raise InputError(spec.name, expected, f"{', '.join(given)} without", "Pass **batch.")
        embeds = self.get_input_embeddings()(input_ids)  # type: ignore[attr-defined]
        placed = None if placeholders is None else [*chain.from_iterable(placeholders)]
        for name, number in token_types(spec).items():
            where, is_own = f"{spec.name}.{name}, embed_{name}", types == number
            counts = placed and [at.tokens.num_embeds for at in placed if at.modality == name]
            fields, key = sent[name], f"{name}_embeds"
            returned = fields.get(key, [])
            if fields and key not in fields:
                returned = getattr(self, f"embed_{name}")(**fields)
            encoded = encoder_rows(returned, where, counts, embeds.shape[-1])
            rows = [one.to(embeds) for one in encoded]
            if (got := sum(map(len, rows))) != (positions := int(is_own.sum())):
                raise MmkitError(where, f"{positions} encoder rows in all", str(got))
            if rows:
                embeds = embeds.masked_scatter(is_own[..., None], torch.cat(rows))
        return {"inputs_embeds": embeds, **rest}
