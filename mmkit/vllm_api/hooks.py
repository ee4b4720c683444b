"""Checks that vLLM still has, and calls, the methods that mmkit overrides.

If vLLM renames a method of a processor class, no error follows: vLLM calls its own new method, and
mmkit's override is silently dead. `typing_extensions.override` therefore marks each method that
vLLM calls, and mmkit compares it with the overridden class before it uses any of them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from .compat import ProcessorInputs, installed

_OURS = __name__.removesuffix("vllm_api.hooks")

_CALLERS = (
    "multimodal/processing/*.py",
    "v1/worker/gpu_model_runner.py",
    "multimodal/**/*.py",
    "renderers/**/*.py",
    "inputs/**/*.py",
    "v1/**/*.py",
    "entrypoints/**/*.py",
)
"""The files in which vLLM calls these methods: first those of the known versions, then all that may
call them."""


def complaints(classes: Iterable[type]) -> list[tuple[str, str, str]]:
    """The mistakes in the marked methods of mmkit's classes: where, expected, got.

    Each class is checked with all that it inherits, and not again as a base of another class.
    """
    listed = list(dict.fromkeys(classes))
    bases = {base for cls in listed for base in cls.__mro__[1:]}
    collected: dict[tuple[str, str, str], None] = {}
    for cls in (own for own in listed if own not in bases):
        theirs = [base for base in cls.__mro__ if not base.__module__.startswith(_OURS)]
        ours = [base for base in cls.__mro__ if base not in theirs]
        # vLLM calls the most derived definition; the one that it replaces may differ
        definitions = {name: value for one in reversed(ours) for name, value in vars(one).items()}
        for name, value in definitions.items():
            if getattr(value, "__override__", False):
                base = next((b for b in theirs if name in vars(b)), None)
                if complaint := _compared(name, value, theirs, base):
                    collected[complaint] = None
    return list(collected)


def _compared(
    name: str, ours: Callable[..., Any], theirs: Sequence[type], base: type | None
) -> tuple[str, str, str] | None:
    arguments = list(inspect.signature(ours).parameters.values())[1:]
    listed = ", ".join(str(p).split(":")[0].split(" =")[0] for p in arguments)
    if base is None:
        parent = [one for one in theirs if one.__module__.startswith("vllm.")][-1]
        return f"{installed()}, {parent.__name__}", f"a method {name}({listed}) to override", "none"
    parameters = list(inspect.signature(vars(base)[name]).parameters.values())[1:]
    where, flexible = f"{installed()}, {base.__name__}.{name}", {p.kind for p in arguments}
    taken, given = {p.name for p in arguments}, {p.name for p in parameters}
    surplus = (
        [] if inspect.Parameter.VAR_KEYWORD in flexible else [n for n in given if n not in taken]
    )
    fixed = [
        p.name for p in arguments if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    if surplus or not given.issuperset(fixed):
        return where, f"the arguments ({listed})", f"({', '.join(p.name for p in parameters)})"
    if not _called(name):
        return where, "a method that vLLM calls", "no call of it"
    return None


@cache
def _called(name: str) -> bool:
    """Whether vLLM calls a method anywhere, except by ``super()`` in an override."""
    call = f".{name}("
    return any(text.count(call) > text.count(f"super(){call}") for text in _texts())


def _texts() -> Iterator[str]:
    import vllm

    root = Path(vllm.__file__).parent
    return (_text(path) for pattern in _CALLERS for path in sorted(root.glob(pattern)))


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


CACHE_CALLS = {
    "is_cached",
    "touch_sender_cache_item",
    "get_and_update_item",
    "release_sender_touches",
}
"""What a processor does with vLLM's cache."""

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
    import vllm.multimodal.processing.processor as theirs

    calls = set(re.findall(r"\bcache\.(\w+)\(", inspect.getsource(theirs))) - CACHE_CALLS
    names = {own.name for own in fields(ProcessorInputs)} - REQUEST_FIELDS
    return sorted([f"cache.{name}()" for name in calls] + [f"the option {n}" for n in names])
