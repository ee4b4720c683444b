"""The mixin of vLLM model classes, which makes their spec hold on the device too."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from typing_extensions import override

from ..errors import MmkitError
from ..language.field import Batched
from ..language.spec import Declaration
from ..plan.encoder_rows import encoder_rows, encoder_rows_or_zeros, rows_field
from ..plan.modality import BoundModality
from ..plan.plan import Plan
from ..plan.soundness import compute_largest_magnitude
from ..vllm_api import models
from ..vllm_api.hooks import check
from . import sampling
from .sound import Reporter, contained

logger = logging.getLogger(__name__)

_HEADS = {"score", "classifier", "pooler"}
"""Modules that vLLM adds to a model that it converts; their weights may come from elsewhere than
the checkpoint."""

_NAMED = 20
"""The most names in a message."""


class MultiModalModel(models.ModelInterface):
    """Mixin for a vLLM model class; put it first among the bases, and decorate the class with
    `ModelSpec.register`.

    For each modality the class defines ``embed_<modality>(self, **fields)``. The method receives
    the modality's fields as vLLM batches them (a batched field is one stacked tensor, or a list
    where the items' shapes differ; a flat field is one concatenated tensor) and returns one (rows,
    hidden_size) tensor per item, as a list or stacked. The mixin

    - compares items and rows with the layouts; vLLM would cut off a surplus row silently, and a
      missing one would end the engine. While the engine starts, a difference is an error;
    - replaces the rows of an item by zeros where they are not as many as its layout has positions,
      or not of the language model's width, and where a value is not finite, or too large for the
      model's dtype. So no item ends the engine, and none reaches the answers of other requests
      through the KV cache. The log and the metric `mmkit:unsound_items` count such items. This
      holds for precomputed embeddings, too;
    - embeds an id that the model lacks as id 0 instead of reading outside the table, so a request
      that passed no processor cannot end the engine;
    - masks placeholder ids where tokens are sampled; reported log probabilities are the model's.

    For a modality whose items take no positions the class defines
    ``forward(self, ..., **fields)`` instead. vLLM passes it the fields of all requests of a batch,
    batched as above, one item per request, in the order of the requests. `forward` returns one row
    per request.
    """

    mm_spec: ClassVar[Declaration]
    """Set by `ModelSpec.register`."""

    mm_plan: Plan
    """The spec, bound to this model's config and tokenizer."""

    mm_engine: Any
    """vLLM's configuration of the engine that the model was made for."""

    def __init__(self, *, vllm_config: Any = None, prefix: str = "", **options: Any) -> None:
        model, beside = self._beside()
        initialise = beside.__init__
        if vllm_config is None:  # nn.Module
            initialise(**options)
        else:
            multimodal = getattr(model, "supports_multimodal", False)  # it marks its own parts
            with nullcontext() if multimodal else self._mark_language_model(vllm_config):
                initialise(vllm_config=vllm_config, prefix=prefix, **options)
        self.mm_engine, self.mm_plan, self._dtype, self._width, counts = models.current_model()
        self._bound = compute_largest_magnitude(self._dtype)
        self._unsound = self._reporter() if counts else None
        if sampling.samples_drafts_wrongly(self.mm_engine):
            text = (
                "mmkit: %s: on a CPU this vLLM samples drafts at arbitrary temperatures, and "
                "placeholder ids among them. Start the engine without speculative_config, or ask "
                "for temperature 0 alone."
            )
            logger.warning(text, self.mm_plan.spec.name)
        sampling.MODELS.add(self)
        self.compute_logits = partial(self._masked, self.compute_logits)  # type: ignore[method-assign]

    def _reporter(self) -> Reporter:
        return Reporter(self.mm_plan.spec.name, self._bound, self.mm_plan.modalities)

    @cached_property
    def allowed_ids(self) -> sampling.AllowedIds:
        """The ids that may be sampled."""
        return sampling.AllowedIds(self.mm_plan)

    def _beside(self) -> tuple[type, Any]:
        """The class that the mixin stands before, and its methods: a Protocol's own do not pass a
        call on to the next base."""
        mro: Any = type(self).__mro__
        bases = pairwise(mro[mro.index(MultiModalModel) :])
        last, model = next(pair for pair in bases if pair[1] not in models.ModelInterface.__mro__)
        return model, super(last, self)

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """The text of an item in a chat message: the target of `replace` where it is a text, for
        example ``tok["<image>"]``; else None, which adds no text.

        Args:
            modality: name of the modality, or of its embeddings.
            i: the item's number, from 1.
        """
        return cls.mm_spec.placeholder_text(modality.removesuffix("_embeds"), i - 1)

    @override
    def embed_multimodal(self, **kwargs: Any) -> list[torch.Tensor]:
        """Encoder rows of the items whose fields are given, in order: one (rows, hidden_size)
        tensor per item, all zeros where a value is not finite or too large
        (`mmkit.plan.soundness.compute_largest_magnitude`), or where `embed_<modality>` returned
        rows for another number of items, another number of rows than the layout has positions, or
        rows of another width than the language model's.

        Raises:
            MmkitError: rows of another number or width, while the engine starts: then nobody is
                served, and the mistake must be seen.
        """
        rows: list[torch.Tensor] = []
        for name, modality in self.mm_plan.modalities.items():
            encoded: list[torch.Tensor] = modality.parser.split_rows(kwargs)
            fields = {key: kwargs[key] for key in modality.fields if kwargs.get(key) is not None}
            # with embeddings, the fields that their layout reads come alone
            if not fields.keys() <= modality.parser.companions.keys():
                encoded += self._encoded(modality, fields, kwargs.get(rows_field(modality.name)))
            if encoded:
                sound, unsound = contained(encoded, self._bound)
                rows += sound
                if self._unsound is not None:
                    self._unsound.add(name, unsound)
        return rows

    def _encoded(
        self, modality: BoundModality, fields: dict[str, Any], rows: Any
    ) -> list[torch.Tensor]:
        """The rows that the model's `embed_<modality>` returns, one tensor per item."""
        returned = getattr(self, f"embed_{modality.name}")(**fields)
        batched = (fields[key] for key in fields if isinstance(modality.fields[key], Batched))
        counts: list[int | None] | None = None
        if rows is not None:
            counts = [int(count) for count in rows]  # of the host, without waiting for the device
        elif (first := next(batched, None)) is not None:
            counts = [modality.layout_evaluator.fixed_rows] * len(first)
        where = f"{modality.where}, embed_{modality.name}"
        expected = [count for count in counts or () if count is not None]
        if not self._is_serving or counts is None or len(expected) < len(counts):
            return encoder_rows(returned, where, counts, self._width)
        zeros = torch.zeros(self._width, dtype=self._dtype, device=next(self.parameters()).device)
        encoded, errors = encoder_rows_or_zeros(returned, where, expected, zeros)
        if errors and self._unsound is not None:
            self._unsound.add_errors(modality.name, errors)
        return encoded

    @property
    def _is_serving(self) -> bool:
        """Whether the engine has started: vLLM counts the blocks of its KV cache last, after it has
        tried the encoder on the largest items."""
        return self.mm_engine.cache_config.num_gpu_blocks is not None

    @override
    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Any = None,
        *,
        is_multimodal: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Token embeddings (tokens, hidden_size), with the encoder rows where `is_multimodal` is
        true; zeros for raw input.

        Further arguments, for example `handle_oov_mm_token` before vLLM 0.18, concern ids outside
        the vocabulary and are ignored.

        Args:
            input_ids: integers (tokens,); an id outside the vocabulary is embedded as id 0.
            multimodal_embeddings: (rows, hidden_size) tensors, in the order of their positions, or
                None.
            is_multimodal: bool (tokens,), true at one position per row.
        """
        if self._unsound is not None:
            self._unsound.poll()
        if self.mm_plan.spec.is_raw:
            return torch.zeros(len(input_ids), self._width, device=input_ids.device)
        known = (input_ids >= 0) & (input_ids < self.mm_plan.vocab_size)
        language_model = self.get_language_model()
        if language_model is self:
            language_model = self._beside()[1]
        embeds: torch.Tensor = language_model.embed_input_ids(torch.where(known, input_ids, 0))
        if multimodal_embeddings is None or is_multimodal is None or not len(multimodal_embeddings):
            return embeds
        merged: torch.Tensor = models.merge_embeddings(embeds, multimodal_embeddings, is_multimodal)
        return merged

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits of the next token, from the class itself or from its language model.

        vLLM's sampler masks placeholder ids (`mmkit.model.sampling`), so reported log probabilities
        are the model's. Where vLLM has no logits processors, for example with speculative decoding,
        placeholder ids have minus infinity here, and reported log probabilities cover the other ids
        only. Both hold for the `compute_logits` of a subclass, too.

        Args:
            hidden_states: (tokens, hidden_size), in the model's dtype.

        Returns:
            (tokens, vocabulary size), or None on ranks that do not sample.
        """
        own = getattr(super(), "compute_logits", None)
        compute: Callable[..., torch.Tensor | None]
        compute = own or self.get_language_model().compute_logits
        return compute(hidden_states)

    def _masked(self, compute: Any, *args: Any, **options: Any) -> torch.Tensor | None:
        """What `compute_logits` returns, with minus infinity for placeholder ids, unless vLLM masks
        them itself."""
        logits: torch.Tensor | None = compute(*args, **options)
        if logits is not None and not sampling.is_masked(self):  # None on ranks that do not sample
            self.allowed_ids.mask(logits)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint, by the class's own `load_weights` or by vLLM's `AutoWeightsLoader` and
        the class's `hf_to_vllm_mapper`.

        Args:
            weights: names and tensors: all of the model's while vLLM loads it, some of them later.

        Returns:
            The names of the parameters that were loaded.

        Raises:
            MmkitError: names the parameters that were not loaded, while vLLM loads the model.
            ValueError: of vLLM, names a weight that the model has no use for.
        """
        load = getattr(super(), "load_weights", None) or models.weights_loader(self)
        loaded = load(weights)
        if self.training and loaded is not None:  # later, an update may bring some of them
            _check_loaded(self, loaded)
        return loaded

    @property
    def get_mm_mapping(self) -> Callable[[], Any]:
        """For LoRA: the names of the language model and, as towers, of the modules beside it.

        Absent where the class is a language model itself: one mapping of tokens to adapters then
        holds for all of its layers.
        """
        language_model = self.get_language_model()
        if language_model is self or not hasattr(language_model, "compute_logits"):
            raise AttributeError("get_mm_mapping")
        return partial(models.module_names, self, language_model)

    def get_mm_lora_token_counts(
        self, *, modality: str, mm_kwargs: Any, num_mm_embeds: int
    ) -> tuple[int, int]:
        """For LoRA on towers: the numbers of positions that the tower and the connector compute for
        an item. Both are the item's rows in the layout; a class whose tower computes more positions
        overrides this."""
        return num_mm_embeds, num_mm_embeds

    def get_num_mm_encoder_tokens(self, num_mm_embeds: int) -> int:
        """The number of positions that the tower computes, and the connector, for vLLM before
        0.32."""
        return num_mm_embeds

    get_num_mm_connector_tokens = get_num_mm_encoder_tokens

    @property
    def compute_logits_local(self) -> Any:
        """Absent: vLLM would sample from the shards of the head, whose ids are not those of the
        vocabulary."""
        raise AttributeError("compute_logits_local")


def _check_loaded(model: Any, loaded: Collection[str]) -> None:
    """Refuse a model of which a parameter was not loaded, by its name in the model. A quantised one
    may lack parameters, which vLLM fills itself.

    Raises:
        MmkitError: names them.
    """
    if model.mm_engine.quant_config is not None:
        return
    names: dict[int, list[str]] = {}  # a tied parameter has several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    missing = [own[0] for own in names.values() if not {*own} & {*loaded}]
    where = f"{model.mm_spec.name}.load_weights"
    if getattr(model, "is_pooling_model", False):
        heads = [name for name in missing if not _HEADS.isdisjoint(name.split("."))]
        if heads:
            text = "%s: %s not in the checkpoint: arbitrary, unless vLLM or an adapter brings them."
            logger.warning(text, where, ", ".join(heads))
        missing = [name for name in missing if name not in heads]
    if missing:
        shown = ", ".join(sorted(missing)[:_NAMED])
        raise MmkitError(where, "the weights of the model", f"{len(missing)} missing: {shown}")


check([MultiModalModel, sampling.PlaceholderMask])
