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
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import vllm
from vllm.multimodal.processing import BaseMultiModalProcessor

from ..errors import SpecError, VllmApiError
from .compat import INSTALLED, REMEDY, ProcessorInputs
from .exchange import CACHE_METHODS

_OURS = __name__.removesuffix("vllm_api.hooks")

_CALLERS = (
    "multimodal/processing/*.py",
    "v1/worker/gpu_model_runner.py",
    *(f"{folder}/**/*.py" for folder in ("multimodal", "renderers", "inputs", "v1", "entrypoints")),
)
"""The files in which vLLM calls these methods: first those of the known versions, then all that may
call them."""


def check(classes: Iterable[type]) -> None:
    """Refuse a vLLM without a method that these classes override: the most derived definition of
    each, with that of vLLM which it replaces.

    Raises:
        VllmApiError: names the methods.
    """
    differences: dict[str, tuple[str, str]] = {}
    for cls in classes:
        ours = [base for base in cls.__mro__ if base.__module__.startswith(_OURS)]
        theirs = [base for base in cls.__mro__ if base not in ours]
        definitions = {name: value for one in reversed(ours) for name, value in vars(one).items()}
        for name, value in definitions.items():
            if getattr(value, "__override__", False):
                last = [base for base in theirs if base.__module__.startswith("vllm.")][-1]
                base = next((base for base in theirs if name in vars(base)), last)
                if difference := _difference(value, vars(base).get(name)):
                    differences[f"{base.__name__}.{name}"] = difference
    if differences:
        (method, (expected, got)), *others = differences.items()
        more = f"Different, too: {', '.join(name for name, _ in others)}. " if others else ""
        raise VllmApiError(f"{INSTALLED}, {method}", expected, got, more + REMEDY)


def _difference(ours: Callable[..., Any], theirs: Any) -> tuple[str, str] | None:
    """What mmkit expects of vLLM's method, and what there is; None where it is as expected."""
    own = inspect.signature(ours)
    arguments = [str(p).split(":")[0].split(" =")[0] for p in own.parameters.values()]
    listed = ", ".join(arguments[1:])
    if theirs is None:
        return f"a method with the arguments ({listed})", "none"
    given = list(inspect.signature(theirs).parameters)
    try:
        own.bind(None, **dict.fromkeys(given[1:]))
    except TypeError:
        return f"the arguments ({listed})", f"({', '.join(given[1:])})"
    return None if _is_called(ours.__name__) else ("a method that vLLM calls", "no call of it")


@cache
def _is_called(name: str) -> bool:
    """Whether vLLM calls a method anywhere, except by ``super()`` in an override."""
    call = f".{name}("
    return any(text.count(call) > text.count(f"super(){call}") for text in _texts())


def _texts() -> Iterator[str]:
    root = Path(vllm.__file__).parent
    return (_text(path) for pattern in _CALLERS for path in sorted(root.glob(pattern)))


_text = cache(partial(Path.read_text, encoding="utf-8"))


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


def unknown() -> list[str]:
    """The steps of a request through vLLM's processor, and the options of one, that mmkit does not
    know: it takes no such step, and only hashes such an option."""
    theirs = inspect.getsource(sys.modules[BaseMultiModalProcessor.__module__])
    calls = set(re.findall(r"\bcache\.(\w+)\(", theirs)) - CACHE_METHODS
    names = {own.name for own in fields(ProcessorInputs)} - REQUEST_FIELDS
    return sorted([f"cache.{name}()" for name in calls] + [f"the option {n}" for n in names])


_DEAD = {
    name
    for name, value in vars(BaseMultiModalProcessor).items()
    if inspect.isfunction(value) and re.match("_[a-z]", name)
} - {"_to_mm_items", "_get_data_parser"}
"""The hooks of vLLM's own `apply`, which nothing calls here; before 0.16 two parse a request."""

_INSTEAD = {
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
    above = cls.__mro__[: cls.__mro__.index(base)]
    own = [vars(one).keys() for one in above if not one.__module__.startswith("vllm.")]
    for name in sorted(_DEAD.intersection(chain.from_iterable(own))):
        place = next(place for word, place in _INSTEAD.items() if word in name)
        where, got = f"{cls.__name__}.{name}", "one that only vLLM's own apply calls"
        raise SpecError(where, "a method that mmkit calls", got, f"State {place}.")
