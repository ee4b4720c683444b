"""The mixin of SGLang model classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from sglang.srt.managers.mm_utils import general_mm_embed_routine

from ..language.spec import Declaration
from ..plan.allowed_ids import AllowedIds
from ..plan.containment import Reporter, zero_unsound_rows
from ..plan.encoder_rows import split_rows_or_zero
from ..plan.modality import BoundModality
from ..plan.plan import Plan
from ..plan.soundness import compute_largest_magnitude
from .binding import bind_spec
from .processor import FEATURE, FIELDS, MODALITY


class MultiModalModel:
    """Mixin for a model class of SGLang.

    Put it first among the bases, and decorate the class with `register`.

    For each modality the class defines ``embed_<modality>(self, **fields)``, as for vLLM: a batched
    field is one stacked tensor, or a list where the items' shapes differ; a flat field is one
    concatenated tensor. It returns one (rows, hidden_size) tensor per item, as a list or stacked.
    The mixin replaces the rows of an item by zeros where they are not as many as its layout has
    positions, or not of the language model's width, or not finite or too large for the model's
    dtype; the log counts such items. It masks placeholder ids in the logits, so that none is
    sampled.

    The language model is the class behind the mixin or, if there is one, the attribute
    `language_model`. Its `forward` takes `input_ids`, `positions`, `forward_batch` and
    `input_embeds`, as those of SGLang do.
    """

    mm_spec: ClassVar[Declaration]
    """Set by `register`."""

    mm_plan: Plan
    """The spec, bound to this model's config and tokenizer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        config = args[0] if args else options.get("config")
        if config is not None:  # else it is `nn.Module`, which takes none
            self.bind(config)

    def bind(self, config: Any) -> None:
        """Bind the spec; a class that makes its parts itself calls this in its `__init__`.

        Args:
            config: the Hugging Face config of the model.
        """
        self._dtype = torch.get_default_dtype()  # SGLang sets it while it makes a model
        self.mm_plan = bind_spec(self.mm_spec, config, self._dtype)
        self._bound = compute_largest_magnitude(self._dtype)
        self._reporter = Reporter(self.mm_plan.spec.name, self._bound, self.mm_plan.modalities)

    @cached_property
    def allowed_ids(self) -> AllowedIds:
        """The ids that may be sampled."""
        return AllowedIds(self.mm_plan)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        get_embedding: bool = False,
    ) -> Any:
        """Return what the language model makes of a batch, with placeholder ids masked."""
        if forward_batch.mrope_positions is not None:
            positions = forward_batch.mrope_positions
        inner: Any = getattr(self, "language_model", None)
        if inner is None:
            language_model = _LanguageModel(self, super().forward, input_ids)  # type: ignore[misc]
        else:
            language_model = _LanguageModel(inner, inner.forward, input_ids)
        options = {"get_embedding": True} if get_embedding else {}
        output = general_mm_embed_routine(
            input_ids=input_ids,
            forward_batch=forward_batch,
            language_model=language_model,
            multimodal_model=self,
            positions=positions,
            **options,
        )
        logits = getattr(output, "next_token_logits", None)
        if logits is not None:
            self.allowed_ids.mask_placeholders(logits)
        return output

    def pad_input_ids(self, input_ids: Any, mm_inputs: Any) -> Any:
        """Return the ids of a prompt with values in place of placeholders that tell items apart.

        SGLang's cache of prefixes compares these. They are far outside the vocabulary.

        Args:
            input_ids: an array of int64.
            mm_inputs: SGLang's items of the request.
        """
        padded = input_ids[:]
        for item in mm_inputs.mm_items:
            for first, last in item.offsets:
                values = item.padding_sequence(last - first + 1)
                for position, value in enumerate(values, start=first):
                    if position < len(padded):  # SGLang may have cut the prompt
                        padded[position] = value
        return padded

    def get_audio_feature(self, items: Sequence[Any]) -> list[torch.Tensor]:
        """Return the encoder rows of items, one (rows, hidden_size) tensor per item, in order.

        Args:
            items: SGLang's.
        """
        rows: list[Any] = [None] * len(items)
        for name, modality in self.mm_plan.modalities.items():
            numbers: dict[bool, list[int]] = {True: [], False: []}
            for number, item in enumerate(items):
                if item.model_specific_data[MODALITY] == name:
                    is_embedding = item.model_specific_data[FEATURE] not in modality.fields
                    numbers[is_embedding].append(number)
            for is_embedding, numbers_of_kind in numbers.items():
                if not numbers_of_kind:
                    continue
                chosen = [items[number] for number in numbers_of_kind]
                encoded = self._compute_rows(modality, chosen, is_embedding=is_embedding)
                for number, rows_of_item in zip(numbers_of_kind, encoded, strict=True):
                    rows[number] = rows_of_item
        return rows

    get_image_feature = get_audio_feature
    get_video_feature = get_audio_feature

    def _compute_rows(
        self, modality: BoundModality, items: Sequence[Any], *, is_embedding: bool
    ) -> list[torch.Tensor]:
        """Return the rows of items of one modality, zeros for an unsound item."""
        language_model: Any = getattr(self, "language_model", self)
        embeddings = language_model.get_input_embeddings()
        device = embeddings.weight.device
        if is_embedding:
            encoded = [item.feature.to(device) for item in items]
        else:
            fields = _batch_fields(modality, items, device)
            where = f"{modality.where}, embed_{modality.name}"
            returned = getattr(self, f"embed_{modality.name}")(**fields)
            zeros = torch.zeros(embeddings.embedding_dim, dtype=self._dtype, device=device)
            counts = [_count_positions(item) for item in items]
            encoded, errors = split_rows_or_zero(returned, where, counts, zeros)
            if errors:
                self._reporter.add_errors(modality.name, errors)
        sound, num_unsound = zero_unsound_rows(encoded, self._bound)
        self._reporter.add(modality.name, num_unsound)
        return sound


class _LanguageModel:
    """The language model, in the form in which `general_mm_embed_routine` calls it.

    It passes no ids, which SGLang's logits need; so they come from here.

    Args:
        model: has the embeddings.
        forward: what is called.
        input_ids: of the batch.
    """

    def __init__(self, model: Any, forward: Callable[..., Any], input_ids: torch.Tensor) -> None:
        self.get_input_embeddings = model.get_input_embeddings
        if hasattr(model, "pp_group"):  # it asks whether there is one
            self.pp_group = model.pp_group
        self._forward = forward
        self._input_ids = input_ids

    def __call__(self, *, input_ids: None, **options: Any) -> Any:
        return self._forward(input_ids=self._input_ids, **options)


def _count_positions(item: Any) -> int:
    count = 0
    for first, last in item.offsets:
        count += last - first + 1
    return count


def _batch_fields(
    modality: BoundModality, items: Sequence[Any], device: torch.device
) -> dict[str, Any]:
    """Return the fields of items as the model's method gets them, on the model's device."""
    columns: dict[str, list[Any]] = {}
    for item in items:
        data = item.model_specific_data
        fields = {data[FEATURE]: item.feature, **data[FIELDS]}
        for name, value in fields.items():
            if isinstance(value, torch.Tensor) and not modality.fields[name].keep_on_cpu:
                value = value.to(device, non_blocking=True)
            columns.setdefault(name, []).append(value)
    batch = {}
    for name, field in modality.fields.items():
        if name in columns:
            batch[name] = field.batch(columns[name])
    return batch
