"""Checks that vLLM still has, and calls, the methods that mmkit overrides.

If vLLM renames a method of a processor class, no error follows: vLLM calls its own new method, and
mmkit's override is silently dead. `typing_extensions.override` therefore marks each method that
vLLM calls, and mmkit compares it with the overridden class before it uses any of them.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import vllm
from vllm.multimodal.processing import BaseMultiModalProcessor

from ..errors import SpecError, VllmApiError
from .compat import INSTALLED, REMEDY, ProcessorInputs
from .exchange import CACHE_METHODS

_OUR_PACKAGE = __name__.removesuffix("vllm_api.hooks")

_CALLERS = (
    "multimodal/processing/*.py",
    "v1/worker/gpu_model_runner.py",
    "multimodal/**/*.py",
    "renderers/**/*.py",
    "inputs/**/*.py",
    "v1/**/*.py",
    "entrypoints/**/*.py",
)
"""The files in which vLLM calls these methods: first those of the releases that mmkit was tested
with, then all that may call them."""


class _Difference(NamedTuple):
    """A method of vLLM that is not as mmkit expects it.

    Attributes:
        method: its class and name.
        expected: what mmkit expects of it.
        got: what vLLM has.
    """

    method: str
    expected: str
    got: str


def check(classes: Iterable[type]) -> None:
    """Refuse a vLLM without a method that these classes override.

    The most derived definition of a method is compared with the method of vLLM that it replaces.

    Raises:
        VllmApiError: names the methods.
    """
    differences: dict[str, _Difference] = {}
    for cls in classes:
        for difference in _find_differences(cls):
            differences[difference.method] = difference
    if not differences:
        return
    first, *more = differences.values()
    remedy = REMEDY
    if more:
        names = ", ".join(difference.method for difference in more)
        remedy = f"Different, too: {names}. {REMEDY}"
    where = f"{INSTALLED}, {first.method}"
    raise VllmApiError(where, first.expected, first.got, remedy)


def _find_differences(cls: type) -> Iterator[_Difference]:
    """Yield how vLLM's methods differ from what the overrides of a class expect."""
    our_bases = [base for base in cls.__mro__ if base.__module__.startswith(_OUR_PACKAGE)]
    their_bases = [base for base in cls.__mro__ if base not in our_bases]
    last_of_vllm = [base for base in their_bases if base.__module__.startswith("vllm.")][-1]
    definitions: dict[str, Any] = {}
    for base in reversed(our_bases):
        definitions.update(vars(base))
    for name, method in definitions.items():
        if not getattr(method, "__override__", False):
            continue
        owner = last_of_vllm
        for base in their_bases:
            if name in vars(base):
                owner = base
                break
        difference = _compare(method, vars(owner).get(name), f"{owner.__name__}.{name}")
        if difference is not None:
            yield difference


def _compare(ours: Callable[..., Any], theirs: Any, method: str) -> _Difference | None:
    """Return how vLLM's method differs from what mmkit expects; None where it does not."""
    signature = inspect.signature(ours)
    arguments = []
    for parameter in signature.parameters.values():
        name, _, _ = str(parameter).partition(":")
        name, _, _ = name.partition(" =")
        arguments.append(name)
    expected_arguments = ", ".join(arguments[1:])
    if theirs is None:
        return _Difference(method, f"a method with the arguments ({expected_arguments})", "none")
    _, *their_arguments = inspect.signature(theirs).parameters
    try:
        signature.bind(None, **dict.fromkeys(their_arguments))
    except TypeError:
        expected = f"the arguments ({expected_arguments})"
        return _Difference(method, expected, f"({', '.join(their_arguments)})")
    if not _is_called(ours.__name__):
        return _Difference(method, "a method that vLLM calls", "no call of it")
    return None


@cache
def _is_called(name: str) -> bool:
    """Return whether vLLM calls a method anywhere, except by ``super()`` in an override."""
    call = f".{name}("
    for text in _find_callers():
        if text.count(call) > text.count(f"super(){call}"):
            return True
    return False


def _find_callers() -> Iterator[str]:
    root = Path(vllm.__file__).parent
    for pattern in _CALLERS:
        for path in sorted(root.glob(pattern)):
            yield _parse_file(path)


@cache
def _parse_file(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# -- what mmkit does in vLLM's place ---------------------------------------------------------------

REQUEST_FIELDS = {
    "prompt",
    "mm_data_items",
    "mm_uuid_items",
    "hf_processor_mm_kwargs",
    "media_io_kwargs",
    "tokenization_kwargs",
    "cache",
}
"""What a request consists of."""


def find_unknown_parts() -> list[str]:
    """Return the steps and the options of a request in vLLM's processor that mmkit does not know.

    mmkit does not take such a step, and only hashes such an option.
    """
    source = inspect.getsource(sys.modules[BaseMultiModalProcessor.__module__])
    unknown_methods = set(re.findall(r"\bcache\.(\w+)\(", source)) - CACHE_METHODS
    unknown_fields = {option.name for option in fields(ProcessorInputs)} - REQUEST_FIELDS
    unknown_parts = [f"cache.{name}()" for name in unknown_methods]
    unknown_parts += [f"the option {name}" for name in unknown_fields]
    return sorted(unknown_parts)


def _find_dead_hooks() -> set[str]:
    """Return the hooks of vLLM's own `apply`, which nothing calls here."""
    names: set[str] = set()
    for name, value in vars(BaseMultiModalProcessor).items():
        if inspect.isfunction(value) and re.match("_[a-z]", name):
            names.add(name)
    # before 0.16 these two parse a request
    return names - {"_to_mm_items", "_get_data_parser"}


_DEAD_HOOKS = _find_dead_hooks()

_REPLACEMENTS = {
    "update": "layout= and update= of the modality",
    "fields": "fields= of the modality",
    "hf": "process= of the modality",
    "hash": "cacheable= of the modality",
    "cache": "cacheable= of the modality",
    "prompt": "prompt= of the spec",
    "": "it in the spec",
}
"""What replaces such a hook, by the first of these words in its name."""


def refuse_dead(cls: type, base: type) -> None:
    """Refuse a subclass of mmkit's processor with a hook of vLLM that nothing calls.

    Raises:
        SpecError: it has one, itself or from a mixin.
    """
    names: set[str] = set()
    for subclass in cls.__mro__[: cls.__mro__.index(base)]:
        if not subclass.__module__.startswith("vllm."):
            names.update(vars(subclass))
    for name in sorted(_DEAD_HOOKS & names):
        where = f"{cls.__name__}.{name}"
        got = "one that only vLLM's own apply calls"
        remedy = f"State {_find_replacement(name)}."
        raise SpecError(where, "a method that mmkit calls", got, remedy)


def _find_replacement(name: str) -> str:
    for word, replacement in _REPLACEMENTS.items():
        if word in name:
            return replacement
    raise AssertionError("the last word is in every name")
