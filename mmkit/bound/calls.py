"""The processing of one request's items, shared by `Plan.preview` and vLLM's path."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ..errors import InputError, SpecError
from ..items import SCOPES, ItemType, unscoped
from .modality import BoundModality
from .processing import Processed

logger = logging.getLogger(__name__)

Options = Mapping[str, Any]
"""`mm_processor_kwargs`."""


class Taken(NamedTuple):
    """The items of one modality to process.

    Attributes:
        values: canonical items, or precomputed embeddings.
        embeds: whether `values` are precomputed embeddings.
        total: number of items of the modality in the request, cached items included.
    """

    values: Sequence[Any]
    embeds: bool
    total: int


class LazyProcessor:
    """The model's Hugging Face processor, loaded at its first use by an expression or a function:
    many models have none."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load

    @cached_property
    def loaded(self) -> Any:
        """The processor itself."""
        return self._load()

    @property
    def is_loaded(self) -> bool:
        """Whether the processor has been used."""
        return "loaded" in vars(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` and `pickle` probe for these
            raise AttributeError(name)
        return getattr(self.loaded, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.loaded(*args, **kwargs)


class Part:
    """A part of a Hugging Face processor, or an object that is called like one. It takes options
    without scopes.

    Args:
        processor: the part.
        kinds: the item types that it processes.
    """

    def __init__(self, processor: Callable[..., Any], kinds: Sequence[ItemType]) -> None:
        self._processor, self._kinds = processor, kinds
        parameters = inspect.signature(processor).parameters.values()
        self._named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        self._takes_any = len(self._named) < len(parameters)
        # options are those that a signature names
        named = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters if p.name in self._named]
        scopes = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in SCOPES]
        others = [p for p in parameters if p.kind is p.VAR_KEYWORD]
        self.__signature__ = inspect.Signature([*named, *scopes, *others])

    def takes(self, name: str) -> bool:
        """Whether the processor has an argument of that name."""
        return self._takes_any or name in self._named

    def __call__(self, **kwargs: Any) -> Any:
        from transformers.feature_extraction_utils import BatchFeature

        options = unscoped(kwargs, self._kinds)
        taken = {name: value for name, value in options.items() if self.takes(name)}
        outputs = self._processor(**taken)
        # vLLM logs a warning for any other mapping
        return outputs if isinstance(outputs, BatchFeature) else BatchFeature(dict(outputs))


def part_of(modalities: Sequence[BoundModality]) -> Part:
    """The processor that some modalities share; its signature is read once."""
    key = tuple(modality.name for modality in modalities)
    return modalities[0].adapted.get(key, lambda: _part(modalities))


def _part(modalities: Sequence[BoundModality]) -> Part:
    part = Part(modalities[0].processing.hf_processor, [m.item for m in modalities])
    for modality in modalities:
        assert modality.processing.hf is not None
        for name in modality.processing.hf.kwargs:
            if not part.takes(name):
                expected = "hf(kwargs=...) to name arguments of the processor"
                raise SpecError(f"{modality.where}, process", expected, repr(name))
    return part


_TEXT_REMEDY = "Name a part, for example hf(proc.image_processor), or give hf(text=...)."


class Calls:
    """Processes the items of a request.

    Args:
        own: a function that returns the model's Hugging Face processor.
        call: a function of a processor, arguments and options that returns the outputs.
        options: the options for `call`; the request must not state arguments that the spec fixes.
    """

    def __init__(
        self,
        own: Callable[[], Any],
        call: Callable[[Any, Mapping[str, Any], Options], Mapping[str, Any]],
        options: Options,
    ) -> None:
        self._own, self._call, self._options = own, call, options

    def process(
        self, modalities: Mapping[str, BoundModality], items: Mapping[str, Taken]
    ) -> dict[str, Processed]:
        """The processed fields of a request's items; modalities without items are left out.

        Raises:
            InputError: None in place of an item, or the Hugging Face processor raises.
            SpecError: the outputs contradict the declared fields.
        """
        done: dict[str, Processed] = {}
        groups: dict[Any, dict[str, Taken]] = {}
        for name, taken in items.items():
            modality, values = modalities[name], taken.values
            processing = modality.processing
            modality.intake.check_present(values, "None, and no such item in the cache")
            if not values:
                continue
            if taken.embeds:
                done[name] = values
            elif processing.hf is None:
                done[name] = processing.run(values, taken.total)
            elif processing.hf.one_by_one:
                raws = [self._outputs([(modality, [value])]) for value in values]
                done[name] = processing.finish_each(raws, values, taken.total)
            else:
                groups.setdefault(processing.hf.key, {})[name] = taken
        for group in groups.values():
            raw = self._outputs([(modalities[name], own.values) for name, own in group.items()])
            for name, own in group.items():
                done[name] = modalities[name].processing.finish(raw, own.values, own.total)
        return done

    def _outputs(self, group: Sequence[tuple[BoundModality, Sequence[Any]]]) -> Mapping[str, Any]:
        """The outputs of a Hugging Face processor, or an object called like one, for the items of
        the modalities that share it."""
        modalities = [modality for modality, _ in group]
        is_own = modalities[0].processing.hf_processor is None
        processor = self._own() if is_own else part_of(modalities)
        inputs, options = hf_inputs(group, self._options), self._options
        if "text" in inputs:  # as many placeholders as items, however long they make it
            options = {"truncation": False, **options}
        try:
            return dict(self._call(processor, inputs, options))
        except Exception as error:
            where = ", ".join(modality.where for modality in modalities)
            got = f"{type(error).__name__}: {error}".rstrip(".")
            asks_for_text = is_own and "text" not in inputs and "text" in str(error)
            remedy = _TEXT_REMEDY if asks_for_text else ""
            expected = "items that the Hugging Face processor takes"
            raise InputError(where, expected, got, remedy) from error


def hf_inputs(
    group: Sequence[tuple[BoundModality, Sequence[Any]]], options: Options
) -> dict[str, Any]:
    """The arguments of one call of a Hugging Face processor: the items of some modalities, their
    text if the spec has one, and the fixed arguments.

    Raises:
        InputError: the options state a fixed argument.
    """
    inputs: dict[str, Any] = {}
    texts = []
    for modality, values in group:
        processing = modality.processing
        assert processing.hf is not None
        if stated := set(processing.hf.kwargs).intersection(options):
            where = f"{modality.where}, mm_processor_kwargs"
            expected = f"no {min(stated)}, which the spec fixes"
            raise InputError(where, expected, repr(options[min(stated)]))
        inputs.update(processing.hf.kwargs)
        renames = {"audios": "audio", **processing.hf.inputs}
        inputs.update({renames.get(key, key): own for key, own in _arguments(modality, values)})
        if processing.hf_text is not None:
            texts.append(processing.hf_text * len(values))
    return {"text": "".join(texts), **inputs} if texts else inputs


def _arguments(modality: BoundModality, values: Sequence[Any]) -> list[tuple[str, list[Any]]]:
    """The items under the names that vLLM has for them."""
    if modality.item.media:
        return [(f"{modality.item.media}s", list(values))]
    if parts := modality.item.part_names:
        return [(name, [value[name] for value in values]) for name in parts]
    return [(modality.name, list(values))]


def call(
    processor: Callable[..., Any],
    inputs: Mapping[str, Any],
    options: Options,
    dtype: torch.dtype | None = None,
) -> Mapping[str, Any]:
    """The outputs of a Hugging Face processor, called like in vLLM: with the options that it takes,
    and floats in the model's dtype.

    Args:
        processor: the processor.
        inputs: its arguments.
        options: `mm_processor_kwargs`.
        dtype: the model's dtype; None leaves floats as they are.
    """
    parameters = inspect.signature(processor).parameters.values()
    named = {parameter.name for parameter in parameters}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    taken = {name: value for name, value in options.items() if takes_any or name in named}
    if dropped := sorted(set(options).difference(taken)):
        logger.warning("%s takes none of the options %s", type(processor).__name__, dropped)
    outputs = processor(**inputs, **{"return_tensors": "pt", **taken})
    return {name: _in_dtype(value, dtype) for name, value in outputs.items()}


def _in_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value if dtype is None or not value.is_floating_point() else value.to(dtype)
    if isinstance(value, (list, tuple)):
        return type(value)(_in_dtype(part, dtype) for part in value)
    if isinstance(value, Mapping):
        return {name: _in_dtype(part, dtype) for name, part in value.items()}
    return value
