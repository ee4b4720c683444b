"""The mixin of vLLM model classes, which makes their spec hold on the device too."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from functools import cached_property, partial, wraps
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from ..errors import MmkitError, SpecError
from ..language.field import Batching
from ..language.spec import Declaration
from ..plan.allowed_ids import AllowedIds
from ..plan.containment import Reporter, zero_unsound_rows
from ..plan.encoder_rows import row_count_field, split_encoder_rows, split_rows_or_zero
from ..plan.modality import BoundModality
from ..plan.plan import Plan
from ..plan.soundness import compute_largest_magnitude
from ..vllm_api import models
from ..vllm_api.hooks import check
from ..vllm_api.normalization import normalize_bytes, read_normalization_of_all
from . import sampling

logger = logging.getLogger(__name__)

_HEADS = {"score", "classifier", "pooler"}
"""Modules that vLLM adds to a model that it converts. The checkpoint may lack their weights."""

MAX_NAMES_SHOWN = 20
"""The most names in a message."""


class MultiModalModel(models.ModelInterface):
    """Mixin for a vLLM model class.

    Put it first among the bases, and decorate the class with `ModelSpec.register`.

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

    mm_bytes_norm: nn.Module | None
    """What rescales and normalises bytes, where the class supports `mm_device_do_normalize`."""

    def __init__(self, *, vllm_config: Any = None, prefix: str = "", **options: Any) -> None:
        model_class = self._model_class
        if vllm_config is None:  # nn.Module
            model_class.__init__(**options)
        else:
            # a multimodal class marks its own parts
            is_multimodal = getattr(model_class, "supports_multimodal", False)
            marking = nullcontext() if is_multimodal else self._mark_language_model(vllm_config)
            with marking:
                model_class.__init__(vllm_config=vllm_config, prefix=prefix, **options)
        current = models.get_current_model()
        self.mm_engine = current.vllm_config
        self.mm_plan = current.plan
        self._dtype = current.dtype
        self._width = current.width
        self.mm_bytes_norm = None
        if getattr(self, "supports_mm_device_do_normalize", False):
            self.mm_bytes_norm = read_normalization_of_all(current.info).make_module()
        self._bound = compute_largest_magnitude(self._dtype)
        self._reporter: Reporter | None = None
        if current.is_first:
            self._reporter = Reporter(self.mm_plan.spec.name, self._bound, self.mm_plan.modalities)
        if sampling.samples_drafts_wrongly(self.mm_engine):
            text = (
                "mmkit: %s: on a CPU this vLLM samples drafts at arbitrary temperatures, and "
                "placeholder ids among them. Start the engine without speculative_config, or ask "
                "for temperature 0 alone."
            )
            logger.warning(text, self.mm_plan.spec.name)
        sampling.MODELS.add(self)

    def __init_subclass__(cls, **options: Any) -> None:
        """Mask placeholder ids in the logits of a class that defines `compute_logits` itself.

        Its method hides `MultiModalModel.compute_logits`, which masks them otherwise.
        """
        super().__init_subclass__(**options)
        if "compute_logits" in vars(cls):
            cls.compute_logits = _mask_result(cls.compute_logits)  # type: ignore[method-assign]

    @cached_property
    def allowed_ids(self) -> AllowedIds:
        """The ids that may be sampled."""
        return AllowedIds(self.mm_plan)

    @property
    def _model_class(self) -> Any:
        """A `super()` that begins behind vLLM's interface, at the class that is made multimodal.

        The interface stands between it and the mixin in the method resolution order. It is a
        Protocol, whose methods do not pass a call on to the next class, as `super()` needs it.
        """
        order = type(self).__mro__
        last: type = MultiModalModel
        for base in order[order.index(MultiModalModel) + 1 :]:
            if base not in models.ModelInterface.__mro__:
                break
            last = base
        return super(last, self)

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """Return the text of an item in a chat message.

        It is the target of `replace` where that is a text, for example ``tok["<image>"]``; else
        None, which adds no text.

        Args:
            modality: name of the modality, or of its embeddings.
            i: the item's number, from 1.
        """
        return cls.mm_spec.placeholder_text(modality.removesuffix("_embeds"), i - 1)

    def normalize_pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return pixels in the model's dtype, normalised.

        Bytes are rescaled and normalised as the checkpoint's image processor says; floats are
        normalised already. vLLM sends bytes from 0.28 on, unless it is started with
        ``--no-mm-device-do-normalize``, where the class says ``supports_mm_device_do_normalize =
        True``; so a class that says it calls this at the begin of `embed_<modality>`.

        Args:
            pixels: uint8 or floats (..., channels, height, width), or (rows, channels * values), as
                patches are.

        Raises:
            SpecError: bytes of another shape, or of a class that does not say it.
        """
        if pixels.is_floating_point():
            return pixels.to(self._dtype)
        where = f"{type(self).__name__}.normalize_pixels"
        if self.mm_bytes_norm is None or pixels.dtype != torch.uint8:
            expected = "floats, or uint8 and supports_mm_device_do_normalize = True in the class"
            raise SpecError(where, expected, str(pixels.dtype))
        return normalize_bytes(self.mm_bytes_norm, pixels, self._dtype, where)

    @override
    def embed_multimodal(self, **kwargs: Any) -> list[torch.Tensor]:
        """Return the encoder rows of items, one (rows, hidden_size) tensor per item, in order.

        The rows of an item are zeros where a value is not finite or too large (see
        `mmkit.plan.soundness.compute_largest_magnitude`), or where `embed_<modality>` returned rows
        for another number of items, another number of rows than the layout has positions, or rows
        of another width than the language model's.

        Args:
            kwargs: the fields of the items.

        Raises:
            MmkitError: rows of another number or width, while the engine starts: then nobody is
                served, and the mistake must be seen.
        """
        rows: list[torch.Tensor] = []
        for name, modality in self.mm_plan.modalities.items():
            encoded: list[torch.Tensor] = modality.parser.split_embeddings(kwargs)
            fields = {key: kwargs[key] for key in modality.fields if kwargs.get(key) is not None}
            # with embeddings, only the fields that their layout reads come
            has_raw_items = bool(fields.keys() - modality.parser.companions.keys())
            if has_raw_items:
                counts = self._count_rows(modality, fields, kwargs.get(row_count_field(name)))
                encoded += self._encode_items(modality, fields, counts)
            if encoded:
                sound, num_unsound = zero_unsound_rows(encoded, self._bound)
                rows += sound
                if self._reporter is not None:
                    self._reporter.add(name, num_unsound)
        return rows

    def _count_rows(
        self, modality: BoundModality, fields: dict[str, Any], row_counts: Any
    ) -> list[int | None] | None:
        """Return the rows that each item must have, None for an item where they are not known.

        Args:
            modality: of the items.
            fields: of the items, batched.
            row_counts: the numbers of rows, integers (items,), where items differ in them.

        Returns:
            The counts; None where not even the number of items is known.
        """
        if row_counts is not None:
            # they lie in the host's memory: nobody waits for the device
            return [int(count) for count in row_counts]
        for name, value in fields.items():
            if modality.fields[name].batching is Batching.STACKED:
                return [modality.layout_evaluator.fixed_rows] * len(value)
        return None

    def _encode_items(
        self, modality: BoundModality, fields: dict[str, Any], counts: list[int | None] | None
    ) -> list[torch.Tensor]:
        """Return the rows that the model's `embed_<modality>` makes, one tensor per item."""
        returned = getattr(self, f"embed_{modality.name}")(**fields)
        where = f"{modality.where}, embed_{modality.name}"
        expected = [count for count in counts or () if count is not None]
        has_all_counts = counts is not None and len(expected) == len(counts)
        if not has_all_counts or not self._is_serving:
            return split_encoder_rows(returned, where, counts, self._width)
        device = next(self.parameters()).device
        zeros = torch.zeros(self._width, dtype=self._dtype, device=device)
        encoded, errors = split_rows_or_zero(returned, where, expected, zeros)
        if errors and self._reporter is not None:
            self._reporter.add_errors(modality.name, errors)
        return encoded

    @property
    def _is_serving(self) -> bool:
        """Whether the engine has started.

        vLLM counts the blocks of its KV cache last, after it has tried the encoder on the largest
        items.
        """
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
        """Return token embeddings with the encoder rows in their positions; zeros for raw input.

        Further arguments, for example `handle_oov_mm_token` before vLLM 0.18, concern ids outside
        the vocabulary and are ignored.

        Args:
            input_ids: integers (tokens,); an id outside the vocabulary is embedded as id 0.
            multimodal_embeddings: (rows, hidden_size) tensors, in the order of their positions, or
                None.
            is_multimodal: bool (tokens,), true at one position per row.

        Returns:
            (tokens, hidden_size).
        """
        if self._reporter is not None:
            self._reporter.poll()
        if self.mm_plan.spec.is_raw:
            return torch.zeros(len(input_ids), self._width, device=input_ids.device)
        is_valid_id = (input_ids >= 0) & (input_ids < self.mm_plan.vocab_size)
        language_model = self.get_language_model()
        if language_model is self:
            language_model = self._model_class
        embeds: torch.Tensor = language_model.embed_input_ids(
            torch.where(is_valid_id, input_ids, 0)
        )
        if multimodal_embeddings is None or is_multimodal is None or not len(multimodal_embeddings):
            return embeds
        merged: torch.Tensor = models.merge_embeddings(embeds, multimodal_embeddings, is_multimodal)
        return merged

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Return the logits of the next token, from the class itself or from its language model.

        vLLM's sampler masks placeholder ids (`mmkit.model.sampling`), so reported log probabilities
        are the model's. Where vLLM has no logits processors, for example with speculative decoding,
        placeholder ids have minus infinity here, and reported log probabilities cover the other ids
        only. Both hold for the `compute_logits` of a subclass, too.

        Args:
            hidden_states: (tokens, hidden_size), in the model's dtype.

        Returns:
            (tokens, vocabulary size), or None on ranks that do not sample.
        """
        compute = getattr(super(), "compute_logits", None)
        if compute is None:
            compute = self.get_language_model().compute_logits
        return self._mask_placeholders(compute(hidden_states))

    def _mask_placeholders(self, logits: torch.Tensor | None) -> torch.Tensor | None:
        """Give minus infinity to placeholder ids, in place, unless vLLM masks them itself."""
        if logits is not None and not sampling.has_logits_processor(self):
            self.allowed_ids.mask_placeholders(logits)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint.

        It is loaded by the class's own `load_weights`, or by vLLM's `AutoWeightsLoader` and the
        class's `hf_to_vllm_mapper`.

        Args:
            weights: names and tensors: all of the model's while vLLM loads it, some of them later.

        Returns:
            The names of the parameters that were loaded.

        Raises:
            MmkitError: names the parameters that were not loaded, while vLLM loads the model.
            ValueError: of vLLM, names a weight that the model has no use for.
        """
        load = getattr(super(), "load_weights", None)
        if load is None:
            load = models.make_weights_loader(self)
        loaded: set[str] = load(weights)
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
        return partial(models.find_module_names, self, language_model)

    def get_mm_lora_token_counts(
        self, *, modality: str, mm_kwargs: Any, num_mm_embeds: int
    ) -> tuple[int, int]:
        """Return the numbers of positions that tower and connector compute for an item, for LoRA.

        Both are the item's rows in the layout; a class whose tower computes more positions
        overrides this.
        """
        return num_mm_embeds, num_mm_embeds

    def get_num_mm_encoder_tokens(self, num_mm_embeds: int) -> int:
        """Return the number of positions that the tower computes, for vLLM before 0.32."""
        return num_mm_embeds

    get_num_mm_connector_tokens = get_num_mm_encoder_tokens

    @property
    def compute_logits_local(self) -> Any:
        """Absent: vLLM would sample from the shards of the head, whose ids are local to a shard."""
        raise AttributeError("compute_logits_local")


def _mask_result(compute_logits: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method `compute_logits` of a subclass, with placeholder ids masked in its result."""

    @wraps(compute_logits)
    def compute_masked_logits(self: MultiModalModel, *args: Any, **options: Any) -> Any:
        return self._mask_placeholders(compute_logits(self, *args, **options))

    return compute_masked_logits


def _check_loaded(model: Any, loaded: Collection[str]) -> None:
    """Refuse a model of which a parameter was not loaded, by its name in the model.

    A quantised model may lack parameters, which vLLM fills itself.

    Raises:
        MmkitError: names them.
    """
    if model.mm_engine.quant_config is not None:
        return
    names_of_parameters: dict[int, list[str]] = {}  # a tied parameter has several names
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of_parameters.setdefault(id(parameter), []).append(name)
    missing: list[str] = []
    for names in names_of_parameters.values():
        if set(names).isdisjoint(loaded):
            missing.append(names[0])
    where = f"{model.mm_spec.name}.load_weights"
    if getattr(model, "is_pooling_model", False):
        heads = [name for name in missing if not _HEADS.isdisjoint(name.split("."))]
        if heads:
            text = "%s: %s not in the checkpoint: arbitrary, unless vLLM or an adapter brings them."
            logger.warning(text, where, ", ".join(heads))
        missing = [name for name in missing if name not in heads]
    if missing:
        shown = ", ".join(sorted(missing)[:MAX_NAMES_SHOWN])
        raise MmkitError(where, "the weights of the model", f"{len(missing)} missing: {shown}")


check([MultiModalModel, sampling.PlaceholderMask])
