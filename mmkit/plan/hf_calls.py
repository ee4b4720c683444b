"""Calls of Hugging Face processors."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Hashable, Mapping
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError, SpecError
from ..language.expr import evaluate
from ..language.field import HF
from ..language.items import SCOPES, ItemType, options_of
from ..language.node import map_values
from .memo import options_key

if TYPE_CHECKING:
    from .modality import BoundModality
    from .parsing import Taken

logger = logging.getLogger(__name__)


_signature = lru_cache(inspect.signature)


class LazyProcessor:
    """The model's Hugging Face processor, loaded at its first use by an expression or a function:
    many models have none.

    Args:
        load: loads it, with options as keyword arguments.
        options: those `mm_processor_kwargs` of a request that configure it.
    """

    def __init__(self, load: Callable[..., Any], options: Mapping[str, Any] | None = None) -> None:
        self._load, self._options = load, options or {}

    @cached_property
    def loaded(self) -> Any:
        """The processor itself."""
        return self._load(**self._options)

    def configured_for(self, kind: ItemType) -> LazyProcessor:
        """Return the processor with those options alone that concern the items of a type."""
        options = options_of(kind, self._options)
        return self if options == self._options else LazyProcessor(self._load, options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` and `pickle` probe for these
            raise AttributeError(name)
        return getattr(self.loaded, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.loaded(*args, **kwargs)


class HFCall:
    """The call of a Hugging Face processor, or of an object that is called like one, for the items
    of one modality. Its signature is read once.

    Attributes:
        hf: the declaration.
        modality: the modality.
    """

    def __init__(self, modality: BoundModality, hf: HF) -> None:
        self.modality, self.hf = modality, hf
        names = {"audios": "audio", **hf.inputs}
        self._arguments = [names.get(name, name) for name in modality.spec.arguments]

    @cached_property
    def part(self) -> Any:
        """What is called in place of the model's processor; None for that itself. It gets those of
        the items that it has arguments for."""
        return self._evaluated(self.hf.processor)

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """Those `mm_processor_kwargs` of a request that it gets: a part of a processor knows no
        scopes; a whole one refuses an option that is in a scope and outside of it, too."""
        if self.part is not None:
            return self.modality.static.kwargs
        options = self.modality.options
        in_scopes = {name for scope in SCOPES for name in options.get(scope) or ()}
        return {name: value for name, value in options.items() if name not in in_scopes}

    @cached_property
    def key(self) -> Hashable:
        """The identity of the call: modalities with equal keys share one, and no others do."""
        # options that JSON lacks, and objects without a hash, are shared with no other modality
        try:
            key = self.hf.key, options_key(self.options)
            hash(key)
        except TypeError:
            return self.modality.name
        return key

    @cached_property
    def text(self) -> Any:
        """The text of one item, or None."""
        return self._evaluated(self.hf.text)

    def _evaluated(self, value: Any) -> Any:
        with self.modality.at("process"):
            return evaluate(value, self.modality.static)

    @cached_property
    def processor(self) -> Callable[..., Any]:
        """What is called.

        Raises:
            SpecError: there is no processor.
        """
        own = self.modality.static.proc if self.part is None else self.part
        if own is None:
            where, remedy = f"{self.modality.model}, process", "Bind the spec with processor=."
            raise SpecError(where, "a Hugging Face processor for hf()", "none", remedy)
        own = own.loaded if isinstance(own, LazyProcessor) else own
        if isinstance(own, type) or not callable(own):
            expected = "an object that is called like a Hugging Face processor, for hf()"
            remedy = "Give an instance of the class." if isinstance(own, type) else ""
            raise SpecError(f"{self.modality.where}, process", expected, repr(own), remedy)
        return own  # type: ignore[no-any-return]

    @cached_property
    def takes(self) -> Callable[[str], bool]:
        """Tells whether the processor has an argument of some name."""
        # nearly all are objects of a class that says how they are called
        call: Any = type(self.processor).__call__
        known = _signature(call) if inspect.isfunction(call) else inspect.signature(self.processor)
        parameters = known.parameters.values()
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
        names = {one.name for one in parameters}
        return lambda name: takes_any or name in names

    def __call__(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The outputs, floats in the dtype of the modality. No option takes the place of an input:
        Python refuses a name that is in both."""
        in_dtype = partial(_in_dtype, dtype=self.modality.dtype)
        return map_values(in_dtype, self.processor(**inputs, **options))  # type: ignore[no-any-return]

    def outputs(self, items: Mapping[HFCall, Taken]) -> Mapping[str, Any]:
        """The outputs for the items of the modalities that share the call, as vLLM has them: with
        those options of the request that the processor takes.

        Args:
            items: canonical items, by the calls of their modalities. All have one `key`.

        Raises:
            InputError: the processor raises, or the options of the request state a fixed argument.
            SpecError: there is no processor.
        """
        hf, options = self.hf, self.options
        requested = {**options, **self.modality.static.kwargs}
        if stated := set(hf.kwargs).intersection(requested):
            at, option = f"{self.modality.where}, mm_processor_kwargs", min(stated)
            raise InputError(at, f"no {option}, which the spec fixes", repr(requested[option]))
        inputs: dict[str, Any] = {}
        if self.text is not None:
            inputs["text"] = self.text * sum(len(own.values) for own in items.values())
        if "text" in inputs or "text" in hf.kwargs:
            # as many placeholders as items, however long they make it
            options = {"truncation": False, **options}
        for call, own in items.items():
            inputs |= call._columns(own)
        if self.part is not None:
            inputs = {name: value for name, value in inputs.items() if self.takes(name)}
        taken = {name: value for name, value in options.items() if self.takes(name)}
        if dropped := sorted(set(options).difference(taken)):
            kind = type(self.processor).__name__
            logger.warning("%s takes none of the options %s", kind, dropped)
        if self.takes("return_tensors"):
            taken.setdefault("return_tensors", "pt")
        try:
            return self({**inputs, **hf.kwargs}, taken)
        except Exception as error:
            where = ", ".join(call.modality.where for call in items)
            said = " ".join(str(error).split()).rstrip(".")
            got = f"{type(error).__name__}: {said}"
            if isinstance(error, ValueError):  # as Python has it for what is of the wrong value
                got = f"some that it refuses: {said}"
            remedy = ""
            if self.part is None and "text" not in inputs and "text" in str(error):
                remedy = "Name a part, for example hf(proc.image_processor), or give hf(text=...)."
            expected = "items that the Hugging Face processor takes"
            raise InputError(where, expected, got, remedy) from error

    def _columns(self, taken: Taken) -> dict[str, list[Any]]:
        """The arguments for some items: they, or each of their parts."""
        parts, values = self.modality.item.parts, taken.values
        columns = [[value[part] for value in values] for part in parts] or [list(values)]
        return dict(zip(self._arguments, columns, strict=True))


def _in_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    is_cast = dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_cast else value
