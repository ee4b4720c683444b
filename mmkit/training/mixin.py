"""The model side for training: a language model of transformers that reads items."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from ..errors import InputError, MmkitError
from ..language.spec import Declaration
from ..plan.encoder_rows import split_encoder_rows
from .batch import number_modalities
from .saving import load_document, select_file_options

logger = logging.getLogger(__name__)

MAX_NAMES_SHOWN = 5
"""The most names of weights in a message."""


class MultiModalMixin:
    """Mixin for a causal language model of transformers, for training.

    It is the counterpart of `mmkit.MultiModalModel`. Put it first among the bases, and set
    `mm_spec`; or leave that out, and `from_pretrained` reads the ``mmkit.json`` of the checkpoint.

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
    ...         return [self.encoder(steps) for steps in series]

    `forward` and `generate` take a batch of a `Processor` or a `Collator` as it is, ``model(
    **batch)``: `input_ids`, `mm_token_type_ids`, `placeholders` and the fields.

    Attributes:
        mm_spec: the spec.
        vllm_towers: for `mmkit.serve_transformers`: the dotted names of modules beside the language
            model that get vLLM's layers as well, so that tensor parallelism shares them out.
    """

    mm_spec: ClassVar[Declaration]
    vllm_towers: ClassVar[Sequence[str]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Let checkpoints of transformers' class load into its subclass.

        Transformers renames published weights by the name of the class.
        """
        super().__init_subclass__(**options)
        _inherit_renamings(cls)

    @classmethod
    def from_pretrained(cls, *names: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """Load a checkpoint, as transformers does.

        A warning names weights of the language model that the checkpoint lacks: they stay random.
        The weights of a new encoder are not among them.

        A model of a class without `mm_spec` gets the spec of the checkpoint's ``mmkit.json``.

        Args:
            names: of the checkpoint, and further arguments of transformers.
            output_loading_info: whether to return what transformers says about the weights, too.
            options: of transformers.

        Raises:
            InputError: neither the class nor the checkpoint has a spec.
            SpecError: the document is malformed, or names functions.
        """
        load: Any = super().from_pretrained  # type: ignore[misc]
        model, info = load(*names, output_loading_info=True, **options)
        if not hasattr(cls, "mm_spec"):
            model.mm_spec = load_document(names[0], select_file_options(options))
        missing = _find_missing_language_weights(model, info["missing_keys"])
        if missing:
            shown = ", ".join(missing[:MAX_NAMES_SHOWN])
            text = (
                "mmkit: %s, %s.from_pretrained(%r): expected all weights of the language model, "
                "got none for %d, which stay random: %s. If the checkpoint has them under other "
                "names, pass key_mapping."
            )
            logger.warning(text, model.mm_spec.name, cls.__name__, names[0], len(missing), shown)
        if output_loading_info:
            return model, info
        return model

    def forward(self, input_ids: torch.Tensor | None = None, **inputs: Any) -> Any:
        """Return the language model's result for a batch, with encoder rows at the placeholders.

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
        embedded = self._embed_batch(input_ids, inputs)
        return super().forward(**embedded)  # type: ignore[misc]

    def generate(self, inputs: torch.Tensor | None = None, **options: Any) -> Any:
        """Return the ids that transformers' `generate` adds to the prompts of a batch.

        Pad prompts on the left. vLLM does not sample placeholders. For the same here, pass
        ``suppress_tokens=sorted(processor.plan.embed_ids)``, or set it in `generation_config`.

        Args:
            inputs: `input_ids`, if they do not come by name.
            options: the rest of the batch, and arguments of `generate`.

        Raises:
            InputError: as for `forward`.
            MmkitError: as for `forward`; or the `prepare_inputs_for_generation` of the class drops
                the embeddings, so that the model would answer without its items.
        """
        input_ids = options.pop("input_ids", inputs)
        embedded = self._embed_batch(input_ids, options)
        embedded["input_ids"] = input_ids
        if "inputs_embeds" not in embedded:
            return super().generate(**embedded)  # type: ignore[misc]
        try:
            with self._require_embeds_at_first_step():
                return super().generate(**embedded)  # type: ignore[misc]
        except ValueError as error:
            # by transformers, where that method has no argument of this name
            if "inputs_embeds" in str(error) and not isinstance(error, MmkitError):
                raise self._make_embeds_error() from error
            raise

    def _make_embeds_error(self) -> MmkitError:
        return MmkitError(
            f"{self.mm_spec.name}, {type(self).__name__}.prepare_inputs_for_generation",
            "inputs_embeds for the first step, which hold the items",
            "none",
            "Let it pass them on, or take GenerationMixin.prepare_inputs_for_generation.",
        )

    @contextmanager
    def _require_embeds_at_first_step(self) -> Iterator[None]:
        """Raise an error if the next call of the model comes without embeddings.

        Code that was written for transformers 4 passes them on only where there is no cache yet,
        and transformers 5 makes the cache before the first step.
        """

        def check_inputs(_: Any, __: Any, inputs: dict[str, Any]) -> None:
            hook.remove()  # later steps have the cache, and pass ids
            if inputs.get("inputs_embeds") is None:
                raise self._make_embeds_error()

        module: Any = self
        hook = module.register_forward_pre_hook(check_inputs, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def _embed_batch(
        self, input_ids: torch.Tensor | None, inputs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the inputs of the language model: embeddings for a batch with items, else ids.

        Args:
            input_ids: int64 (prompts, length), expanded.
            inputs: the rest of the batch, and arguments that go to the language model.
        """
        spec = self.mm_spec
        inputs = dict(inputs)
        types = inputs.pop("mm_token_type_ids", None)
        placeholders = inputs.pop("placeholders", None)
        fields = _take_fields(spec, inputs)
        if not fields:
            return {"input_ids": input_ids, **inputs}
        if input_ids is None or types is None:
            expected = "input_ids and mm_token_type_ids beside items"
            raise InputError(spec.name, expected, f"{', '.join(fields)} without", "Pass **batch.")
        embeds = self.get_input_embeddings()(input_ids)  # type: ignore[attr-defined]
        for name, number in number_modalities(spec).items():
            if spec[name].is_ids_only:
                continue
            where = f"{spec.name}.{name}, embed_{name}"
            encoded = self._encode_items(name, fields.get(name, {}))
            counts = _count_rows(name, placeholders)
            rows = split_encoder_rows(encoded, where, counts, embeds.shape[-1])
            is_embed = types == number
            num_rows = sum(len(tensor) for tensor in rows)
            num_positions = int(is_embed.sum())
            if num_rows != num_positions:
                expected = f"{num_positions} encoder rows in all"
                raise MmkitError(where, expected, str(num_rows))
            if rows:
                source = torch.cat([tensor.to(embeds) for tensor in rows])
                embeds = embeds.masked_scatter(is_embed[..., None], source)
        return {"inputs_embeds": embeds, **inputs}

    def _encode_items(self, modality: str, fields: dict[str, Any]) -> Any:
        """Return what `embed_<modality>` makes of the fields of a batch.

        Precomputed embeddings are returned as they are. For a batch without items of the modality
        the result is an empty list.
        """
        if not fields:
            return []
        embeds_field = f"{modality}_embeds"
        if embeds_field in fields:
            return fields[embeds_field]
        return getattr(self, f"embed_{modality}")(**fields)


def _take_fields(spec: Declaration, inputs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Remove the fields of items from the inputs, and return them by modality, if it has any."""
    fields: dict[str, dict[str, Any]] = {}
    for modality in spec.modalities:
        if modality.is_ids_only:
            continue
        for name in (f"{modality.name}_embeds", *modality.fields):
            value = inputs.pop(name, None)
            if value is not None:
                fields.setdefault(modality.name, {})[name] = value
    return fields


def _count_rows(
    modality: str, placeholders: Sequence[Sequence[Any]] | None
) -> list[int | None] | None:
    """Return the encoder rows of each item of a modality; None for a batch that does not tell."""
    if placeholders is None:
        return None
    counts: list[int | None] = []
    for placements in placeholders:
        for placement in placements:
            if placement.modality == modality:
                counts.append(placement.tokens.num_embeds)
    return counts


# -- weights ---------------------------------------------------------------------------------------


def _inherit_renamings(cls: Any) -> None:
    """Register how transformers renames published weights of a class for its subclass, too.

    Transformers 5 finds the renamings by the name of a class, or else by the model type of its
    config, and ignores both for classes of other packages that are not registered. Transformers 4
    has them as an attribute, which is inherited.
    """
    try:
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
    except ModuleNotFoundError:
        return
    for base in cls.__mro__[1:]:
        if not base.__module__.startswith("transformers.models."):
            continue
        key = cls.__name__
        renamings = mapping.get_checkpoint_conversion_mapping(base.__name__)
        if renamings is None:
            # by the model type for the subclass, too: by its name, transformers would rename once
            # more for each part with the same config
            key = _find_model_type(cls)
            renamings = mapping.get_checkpoint_conversion_mapping(_find_model_type(base))
        if renamings is not None:
            mapping.register_checkpoint_conversion_mapping(key, renamings, overwrite=True)
        return


def _find_model_type(model_class: Any) -> str | None:
    return getattr(model_class.config_class, "model_type", None)


def _find_missing_language_weights(model: Any, missing: Sequence[str]) -> list[str]:
    """Return the names of missing weights that belong to the decoder or to the head."""
    language_weights = {id(weight) for weight in model.get_decoder().parameters()}
    head = model.get_output_embeddings()
    if head is not None:
        language_weights.update(id(weight) for weight in head.parameters())
    names: list[str] = []
    for name, weight in model.named_parameters():
        if name in missing and id(weight) in language_weights:
            names.append(name)
    return names
