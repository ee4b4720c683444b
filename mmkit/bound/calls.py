"""Calls of Hugging Face processors."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError
from ..items import unscoped
from ..node import mapped

if TYPE_CHECKING:
    from .intake import Taken
    from .modality import BoundModality

logger = logging.getLogger(__name__)


_signature = lru_cache(inspect.signature)


class LazyProcessor:
    """The model's Hugging Face processor, loaded at its first use by an expression or a function:
    many models have none."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load

    @cached_property
    def loaded(self) -> Any:
        """The processor itself."""
        return self._load()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` and `pickle` probe for these
            raise AttributeError(name)
        return getattr(self.loaded, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.loaded(*args, **kwargs)


class Callee:
    """A Hugging Face processor, or an object that is called like one. Its signature is read once.

    Attributes:
        is_part: whether it is called in place of the model's processor. It then gets those of the
            items and fixed arguments that it has arguments for.
    """

    def __init__(self, processor: Callable[..., Any], *, is_part: bool) -> None:
        self._processor, self.is_part = processor, is_part
        # nearly all are objects of a class that says how they are called
        call: Any = type(processor).__call__
        signature = _signature(call) if inspect.isfunction(call) else inspect.signature(processor)
        parameters = signature.parameters.values()
        self._named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        self._takes_any = len(self._named) < len(parameters)

    def takes(self, name: str) -> bool:
        """Whether the processor has an argument of that name."""
        return self._takes_any or name in self._named

    def __call__(
        self, inputs: Mapping[str, Any], options: Mapping[str, Any], dtype: torch.dtype | None
    ) -> dict[str, Any]:
        """Its outputs, as vLLM has them: with the options that it takes.

        Args:
            inputs: items and fixed arguments.
            options: the others.
            dtype: that of floats; None leaves them as they are.
        """
        if self.is_part:
            inputs = {name: value for name, value in inputs.items() if self.takes(name)}
        taken = {name: value for name, value in options.items() if self.takes(name)}
        if dropped := sorted(set(options).difference(taken)):
            kind = type(self._processor).__name__
            logger.warning("%s takes none of the options %s", kind, dropped)
        if self.takes("return_tensors"):
            taken.setdefault("return_tensors", "pt")
        outputs = self._processor(**inputs, **taken)
        return mapped(partial(_in_dtype, dtype=dtype), outputs)  # type: ignore[no-any-return]


def _in_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    is_cast = dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_cast else value


def outputs_of(items: Mapping[BoundModality, Taken]) -> Mapping[str, Any]:
    """The outputs of a Hugging Face processor, or an object called like one, for the items of the
    modalities that share it.

    Args:
        items: canonical items, by modality. All have one `HF.key`.

    Raises:
        InputError: the processor raises, or the options of the request state a fixed argument.
        SpecError: there is no processor, or it does not have a fixed argument.
    """
    first = next(iter(items))
    processing, options = first.processing, first.options
    hf, callee, text = processing.hf, processing.callee, processing.hf_text
    assert hf is not None
    if stated := set(hf.kwargs).intersection(options):
        at, option = f"{first.where}, mm_processor_kwargs", min(stated)
        raise InputError(at, f"no {option}, which the spec fixes", repr(options[option]))
    inputs: dict[str, Any] = (
        {} if text is None else {"text": text * sum(len(own.values) for own in items.values())}
    )
    inputs |= hf.kwargs
    for modality, own in items.items():
        inputs.update(zip(modality.processing.arguments, _columns(modality, own), strict=True))
    if "text" in inputs:  # as many placeholders as items, however long they make it
        options = {"truncation": False, **options}
    if callee.is_part:
        options = unscoped(options, [modality.item for modality in items])
    try:
        return callee(inputs, options, first.dtype)
    except Exception as error:
        where = ", ".join(modality.where for modality in items)
        got = f"{type(error).__name__}: {error}".rstrip(".")
        remedy = ""
        if not callee.is_part and "text" not in inputs and "text" in str(error):
            remedy = "Name a part, for example hf(proc.image_processor), or give hf(text=...)."
        expected = "items that the Hugging Face processor takes"
        raise InputError(where, expected, got, remedy) from error


def _columns(modality: BoundModality, taken: Taken) -> list[list[Any]]:
    """The items, or each of their parts."""
    parts, values = modality.item.parts, taken.values
    return [[value[part] for value in values] for part in parts] if parts else [list(values)]
