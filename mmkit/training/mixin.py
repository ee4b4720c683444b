"""The model side for training: a language model of transformers that reads items."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, ClassVar

import torch

from ..bound.placeholders import encoder_rows
from ..errors import InputError, MmkitError
from ..spec import Declaration
from .batch import token_types

_OF_BATCH = ("mm_token_type_ids", "placeholders")
"""The entries of a batch that locate the items."""


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
        return super().forward(**self._embedded(input_ids, inputs))  # type: ignore[misc]

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
        embedded = self._embedded(input_ids, options)
        return super().generate(**{**embedded, "input_ids": input_ids})  # type: ignore[misc]

    def _embedded(
        self, input_ids: torch.Tensor | None, inputs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The inputs of the language model: embeddings for a batch with items, else ids."""
        spec, sent = self.mm_spec, {}
        rest = {key: value for key, value in inputs.items() if key not in _OF_BATCH}
        for modality in spec.modalities:
            names = [f"{modality.name}_embeds", *modality.fields]
            fields = {key: own for key in names if (own := rest.pop(key, None)) is not None}
            if fields:
                sent[modality.name] = fields
        if not sent:
            return {"input_ids": input_ids, **rest}
        types, placeholders = (inputs.get(name) for name in _OF_BATCH)
        if input_ids is None or types is None:
            expected = "input_ids and mm_token_type_ids beside items"
            raise InputError(spec.name, expected, f"{', '.join(sent)} without", "Pass **batch.")
        embeds = self.get_input_embeddings()(input_ids)  # type: ignore[attr-defined]
        for name, number in token_types(spec).items():
            is_its_own = types == number
            rows = torch.empty(0, embeds.shape[-1])
            if name in sent:
                placed = chain.from_iterable(placeholders or ())
                counts = [at.placeholder.num_embeds for at in placed if at.modality == name]
                known = None if placeholders is None else counts
                rows = self._rows(name, sent[name], known, embeds.shape[-1])
            if len(rows) != (positions := int(is_its_own.sum())):
                where = f"{spec.name}.{name}, embed_{name}"
                raise MmkitError(where, f"{positions} encoder rows in all", str(len(rows)))
            embeds = embeds.masked_scatter(is_its_own[..., None], rows.to(embeds))
        return {"inputs_embeds": embeds, **rest}

    def _rows(
        self, name: str, fields: dict[str, Any], counts: list[int] | None, width: int
    ) -> torch.Tensor:
        """The rows of all items of a modality, (rows, width). `counts` are those of each item, None
        for a batch without `placeholders`."""
        declared = self.mm_spec[name].fields
        returned = fields.pop(f"{name}_embeds", None)
        if returned is None:
            received = {key: own for key, own in fields.items() if not declared[key].hidden}
            returned = getattr(self, f"embed_{name}")(**received)
        where = f"{self.mm_spec.name}.{name}, embed_{name}"
        return torch.cat(encoder_rows(returned, where, counts, width))
