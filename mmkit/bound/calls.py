"""The processing of one request's items."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

import torch

from ..errors import InputError, SpecError, of_spec
from ..expr import Scope
from ..items import ItemType, unscoped
from ..node import mapped
from .intake import Taken
from .modality import BoundModality
from .processing import Processed

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

    Args:
        processor: the object.
        kinds: the item types that a part of the model's processor takes, with those arguments of
            vLLM's that it has; None for the processor itself, which takes all of them.
    """

    def __init__(
        self, processor: Callable[..., Any], kinds: Sequence[ItemType] | None = None
    ) -> None:
        self._processor, self._kinds = processor, kinds
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
        if self._kinds is not None:
            options = unscoped(options, self._kinds)
            inputs = {name: value for name, value in inputs.items() if self.takes(name)}
        taken = {name: value for name, value in options.items() if self.takes(name)}
        if dropped := sorted(set(options).difference(taken)):
            kind = type(self._processor).__name__
            logger.warning("%s takes none of the options %s", kind, dropped)
        if self.takes("return_tensors"):
            taken.setdefault("return_tensors", "pt")
        outputs = self._processor(**inputs, **taken)
        return mapped(partial(_in_dtype, dtype=dtype), outputs)  # type: ignore[no-any-return]


class Calls:
    """Processes the items of requests.

    Args:
        where: names the spec in errors.
        modalities: the bound modalities, by name.
        scope: has the model's Hugging Face processor, or None, and as its `kwargs` the arguments of
            every call that the spec does not fix.
        dtype: that of the floats of Hugging Face processors; None leaves them as they are.
    """

    def __init__(
        self,
        where: str,
        modalities: Mapping[str, BoundModality],
        scope: Scope,
        dtype: torch.dtype | None,
    ) -> None:
        self._where, self._modalities, self._dtype = where, modalities, dtype
        self._own, self._options = scope.proc, scope.kwargs
        self._callees: dict[tuple[str, ...], Callee] = {}

    def process(self, items: Mapping[str, Taken]) -> dict[str, Processed]:
        """The processed fields of items; modalities without items are left out.

        Raises:
            InputError: None in place of an item, or the Hugging Face processor raises.
            SpecError: the outputs contradict the declared fields.
        """
        done: dict[str, Processed] = {}
        groups: dict[Any, dict[str, Sequence[Any]]] = {}
        for name, taken in items.items():
            modality, values, total = self._modalities[name], taken.values, taken.total
            processing = modality.processing
            modality.intake.check_present(values, "None, and no such item in the cache")
            if not values:
                continue
            if taken.embeds:
                done[name] = values
            elif taken.are_largest and (zeros := processing.zeros(values, total)):
                done[name] = zeros
            elif processing.hf is None:
                done[name] = processing.run(values, total)
            elif processing.hf.one_by_one:
                raws = [self._outputs({name: [value]}) for value in values]
                done[name] = processing.finish_each(raws, values, total)
            else:
                groups.setdefault(processing.hf.key, {})[name] = values
        for group in groups.values():
            raw = self._outputs(group)
            for name, values in group.items():
                finish = self._modalities[name].processing.finish
                done[name] = finish(raw, values, items[name].total)
        return done

    def of_spec(self, name: str, value: Any) -> Mapping[str, Any]:
        """The processed fields of an item that the spec itself states.

        Raises:
            SpecError: the item is refused, or the outputs contradict the declared fields.
        """
        with of_spec():
            return self.process({name: Taken.whole([value])})[name][0]

    def _outputs(self, items: Mapping[str, Sequence[Any]]) -> Mapping[str, Any]:
        """The outputs of a Hugging Face processor, or an object called like one, for the items of
        the modalities that share it."""
        modalities = [self._modalities[name] for name in items]
        callee = self._callee(modalities)
        inputs, options = self._inputs(items), self._options
        if "text" in inputs:  # as many placeholders as items, however long they make it
            options = {"truncation": False, **options}
        try:
            return callee(inputs, options, self._dtype)
        except Exception as error:
            where = ", ".join(modality.where for modality in modalities)
            got = f"{type(error).__name__}: {error}".rstrip(".")
            is_own = modalities[0].processing.hf_processor is None
            remedy = ""
            if is_own and "text" not in inputs and "text" in str(error):
                remedy = "Name a part, for example hf(proc.image_processor), or give hf(text=...)."
            expected = "items that the Hugging Face processor takes"
            raise InputError(where, expected, got, remedy) from error

    def _callee(self, modalities: Sequence[BoundModality]) -> Callee:
        """The processor that some modalities share: the model's own, or a part of it."""
        part = modalities[0].processing.hf_processor
        key = () if part is None else tuple(modality.name for modality in modalities)
        if (known := self._callees.get(key)) is not None:
            return known
        if part is None:
            if self._own is None:
                where, expected = f"{self._where}, process", "a Hugging Face processor for hf()"
                raise SpecError(where, expected, "none", "Bind the spec with processor=.")
            is_lazy = isinstance(self._own, LazyProcessor)
            callee = Callee(self._own.loaded if is_lazy else self._own)
        else:
            callee = Callee(part, [modality.item for modality in modalities])
            for modality in modalities:
                fixed = modality.processing.hf.kwargs if modality.processing.hf else {}
                if odd := [name for name in fixed if not callee.takes(name)]:
                    expected = "hf(kwargs=...) to name arguments of the processor"
                    raise SpecError(f"{modality.where}, process", expected, repr(odd[0]))
        self._callees[key] = callee
        return callee

    def _inputs(self, items: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """The arguments of one call: the items of some modalities, their text if the spec has one,
        and the fixed arguments.

        Raises:
            InputError: the options state a fixed argument.
        """
        inputs: dict[str, Any] = {}
        texts = []
        for name, values in items.items():
            modality = self._modalities[name]
            hf, text = modality.processing.hf, modality.processing.hf_text
            assert hf is not None
            if stated := set(hf.kwargs).intersection(self._options):
                where = f"{modality.where}, mm_processor_kwargs"
                expected = f"no {min(stated)}, which the spec fixes"
                raise InputError(where, expected, repr(self._options[min(stated)]))
            inputs.update(hf.kwargs)
            for key, own in _arguments(modality, values).items():
                inputs[hf.inputs.get(key, "audio" if key == "audios" else key)] = own
            if text is not None:
                texts.append(text * len(values))
        return {"text": "".join(texts), **inputs} if texts else inputs


def _arguments(modality: BoundModality, values: Sequence[Any]) -> dict[str, list[Any]]:
    """The items under the names that vLLM has for them."""
    if modality.item.media:
        return {f"{modality.item.media}s": list(values)}
    if parts := modality.item.part_names:
        return {name: [value[name] for value in values] for name in parts}
    return {modality.name: list(values)}


def _in_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    is_cast = dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_cast else value
