"""Calls of Hugging Face processors."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from ..errors import InputError, SpecError, locate_errors
from ..language.expr import Scope, evaluate
from ..language.field import HF
from ..language.items import SCOPES, ItemType, select_options
from ..language.node import map_values
from .memo import options_key
from .parsing import ItemBatch

logger = logging.getLogger(__name__)

_read_signature = lru_cache(inspect.signature)


class LazyProcessor:
    """The model's Hugging Face processor, loaded at its first use by an expression or a function.

    Many models have none.

    Args:
        load: loads it, with options as keyword arguments.
        options: the `mm_processor_kwargs` of a request that configure it.
    """

    def __init__(self, load: Callable[..., Any], options: Mapping[str, Any] | None = None) -> None:
        self._load = load
        self._options = options or {}

    @cached_property
    def loaded(self) -> Any:
        """The processor itself."""
        return self._load(**self._options)

    def with_options(self, options: Mapping[str, Any]) -> LazyProcessor:
        """Return the processor that the options of a request configure."""
        return LazyProcessor(self._load, options)

    def select_for(self, kind: ItemType) -> LazyProcessor:
        """Return the processor with only those options that concern the items of a type."""
        options = select_options(kind, self._options)
        if options == self._options:
            return self
        return LazyProcessor(self._load, options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` and `pickle` probe for these
            raise AttributeError(name)
        return getattr(self.loaded, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.loaded(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class HFCall:
    """The call of a Hugging Face processor for the items of one modality.

    An object that is called like such a processor may take its place. Its signature is read once.

    Attributes:
        hf: the declaration.
        name: the name of the modality.
        model: names the spec in errors.
        where: names the modality in errors.
        item_type: the item type.
        part_names: vLLM's names of the parts of an item, as `HF.inputs` has them.
        static: the scope without an item.
        modality_options: the `mm_processor_kwargs` of the plan that concern the modality.
        dtype: the dtype of the floats that are returned; None leaves them as they are.
    """

    hf: HF
    name: str
    model: str
    where: str
    item_type: ItemType
    part_names: Sequence[str]
    static: Scope
    modality_options: Mapping[str, Any]
    dtype: torch.dtype | None

    @cached_property
    def part(self) -> Any:
        """What is called in place of the model's processor; None for the processor itself.

        It gets only the inputs that it has arguments for.
        """
        return self._evaluate(self.hf.processor)

    @cached_property
    def text(self) -> Any:
        """The text of one item, or None."""
        return self._evaluate(self.hf.text)

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """The `mm_processor_kwargs` of a request that it gets.

        A part of a processor knows no scopes. A whole processor refuses an option that is both in a
        scope and outside of it.
        """
        if self.part is not None:
            return self.static.kwargs
        scoped_names: set[str] = set()
        for scope in SCOPES:
            scoped_names.update(self.modality_options.get(scope) or ())
        options = dict(self.modality_options)
        for name in scoped_names:
            options.pop(name, None)
        return options

    @cached_property
    def accepted_options(self) -> Mapping[str, Any]:
        """The options among `options` that the processor takes, and with which mmkit calls it.

        They are the same for all requests of a plan.

        Raises:
            InputError: the options name a fixed argument.
            SpecError: there is no processor.
        """
        _check_fixed_arguments(self)
        return _choose_options(self)

    @cached_property
    def key(self) -> Hashable:
        """The identity of the call: modalities with equal keys share one, and no others do."""
        key = (self.hf.key, options_key(self.options))
        try:
            hash(key)
        except TypeError:
            # options that JSON lacks, and objects without a hash: the call is shared with no other
            # modality
            return self.name
        return key

    @cached_property
    def processor(self) -> Callable[..., Any]:
        """What is called.

        Raises:
            SpecError: there is no processor.
        """
        processor = self.part
        if processor is None:
            processor = self.static.proc
        if processor is None:
            where, remedy = f"{self.model}, process", "Bind the spec with processor=."
            raise SpecError(where, "a Hugging Face processor for hf()", "none", remedy)
        if isinstance(processor, LazyProcessor):
            processor = processor.loaded
        is_class = isinstance(processor, type)
        if is_class or not callable(processor):
            expected = "an object that is called like a Hugging Face processor, for hf()"
            remedy = "Give an instance of the class." if is_class else ""
            raise SpecError(f"{self.where}, process", expected, repr(processor), remedy)
        return processor  # type: ignore[no-any-return]

    def takes(self, name: str) -> bool:
        """Return whether the processor has an argument of this name."""
        return self._takes_any_name or name in self._argument_names

    def __call__(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the outputs of the processor, floats in the dtype of the modality.

        No option takes the place of an input: Python refuses a name that is in both.
        """
        outputs = self.processor(**inputs, **options)
        return map_values(self._cast, outputs)  # type: ignore[no-any-return]

    def make_arguments(self, values: Sequence[Any]) -> dict[str, list[Any]]:
        """Return the processor's arguments for canonical items.

        One argument has the items. For records, one argument for each part has that part of all
        items.
        """
        parts = self.item_type.parts
        if not parts:
            (argument,) = self._arguments
            return {argument: list(values)}
        arguments: dict[str, list[Any]] = {}
        for argument, part in zip(self._arguments, parts, strict=True):
            arguments[argument] = [value[part] for value in values]
        return arguments

    @cached_property
    def _arguments(self) -> list[str]:
        """The processor's names of the parts of an item."""
        names = {"audios": "audio", **self.hf.inputs}
        arguments: list[str] = []
        for name in self.part_names:
            arguments.append(names.get(name, name))
        return arguments

    @cached_property
    def _parameters(self) -> Sequence[inspect.Parameter]:
        # nearly all processors are objects of a class that says how they are called, so that the
        # signature of the class can be cached
        method: Any = type(self.processor).__call__
        if inspect.isfunction(method):
            signature = _read_signature(method)
        else:
            signature = inspect.signature(self.processor)
        return list(signature.parameters.values())

    @cached_property
    def _argument_names(self) -> frozenset[str]:
        return frozenset(parameter.name for parameter in self._parameters)

    @cached_property
    def _takes_any_name(self) -> bool:
        for parameter in self._parameters:
            if parameter.kind is parameter.VAR_KEYWORD:
                return True
        return False

    def _evaluate(self, value: Any) -> Any:
        with locate_errors(f"{self.where}, process"):
            return evaluate(value, self.static)

    def _cast(self, value: Any) -> Any:
        if self.dtype is None or not isinstance(value, torch.Tensor):
            return value
        if not value.is_floating_point():
            return value
        return value.to(self.dtype)


def call_together(batches: Mapping[HFCall, ItemBatch]) -> Mapping[str, Any]:
    """Call a Hugging Face processor once for the items of all modalities that share the call.

    As in vLLM, it gets the options of the request that it takes.

    Args:
        batches: canonical items, by the calls of their modalities, all with one `key`.

    Returns:
        The outputs of the processor by name.

    Raises:
        InputError: the processor raises, or the options of the request name a fixed argument.
        SpecError: there is no processor.
    """
    first = next(iter(batches))
    options = first.accepted_options
    inputs = _make_inputs(first, batches)
    try:
        return first({**inputs, **first.hf.kwargs}, options)
    except Exception as error:
        where = ", ".join([call.where for call in batches])
        message = " ".join(str(error).split()).rstrip(".")
        got = f"{type(error).__name__}: {message}"
        if isinstance(error, ValueError):  # as Python has it for what is of the wrong value
            got = f"some that it refuses: {message}"
        remedy = ""
        if first.part is None and "text" not in inputs and _asks_for_text(error):
            remedy = "Name a part, for example hf(proc.image_processor), or give hf(text=...)."
        expected = "items that the Hugging Face processor takes"
        raise InputError(where, expected, got, remedy) from error


def _asks_for_text(error: Exception) -> bool:
    """Tell whether a processor raised for want of a text.

    Those of transformers say "You have to specify text." or "You must provide either `text` or
    `images`."; Python says "missing 1 required positional argument: 'text'".
    """
    return re.search(r"\b(specify|provide|missing)\b.*\btext\b", str(error)) is not None


def _check_fixed_arguments(call: HFCall) -> None:
    """Refuse options of a request that the spec fixes.

    Raises:
        InputError: names the first.
    """
    requested = {**call.options, **call.static.kwargs}
    fixed_names = set(call.hf.kwargs).intersection(requested)
    if not fixed_names:
        return
    name = min(fixed_names)
    where = f"{call.where}, mm_processor_kwargs"
    raise InputError(where, f"no {name}, which the spec fixes", repr(requested[name]))


def _make_inputs(first: HFCall, batches: Mapping[HFCall, ItemBatch]) -> dict[str, Any]:
    """Return the arguments of one call for the items of several modalities."""
    inputs: dict[str, Any] = {}
    if first.text is not None:
        num_items = 0
        for batch in batches.values():
            num_items += len(batch.values)
        inputs["text"] = first.text * num_items
    for call, batch in batches.items():
        inputs.update(call.make_arguments(batch.values))
    if first.part is not None:
        for name in list(inputs):
            if not first.takes(name):
                del inputs[name]
    return inputs


def _choose_options(call: HFCall) -> dict[str, Any]:
    """Return the options of one call: the request's options that the processor takes."""
    options = dict(call.options)
    if call.text is not None or "text" in call.hf.kwargs:
        # as many placeholders as items, however long they make it
        options.setdefault("truncation", False)
    unused_names: list[str] = []
    for name in sorted(options):
        if not call.takes(name):
            unused_names.append(name)
            del options[name]
    if unused_names:
        processor_class = type(call.processor).__name__
        logger.warning("%s takes none of the options %s", processor_class, unused_names)
    if call.takes("return_tensors"):
        options.setdefault("return_tensors", "pt")
    return options
