"""Everything of vLLM that mmkit replaces, where vLLM has no hook: CONTRIBUTING.md has the table.

It is replaced when a process makes its first processor of a spec, so in no process that serves
none, and only where the release needs it. What replaces a part hands on all that is not a spec's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple

from . import admission, chat
from .compat import PROMPTS_ARE_IDS


class Patch(NamedTuple):
    """One replacement.

    Attributes:
        places: a module of vLLM and what is replaced in it; from the newest release to the oldest,
            and the first that there is counts.
        by: for each name, a function from vLLM's part to that in its place.
        until_ids: whether only releases need it in which the prompt of a request may be a text,
            those before 0.29.
    """

    places: tuple[tuple[str, ...], ...]
    by: tuple[Callable[[Any], Any], ...]
    until_ids: bool = False

    def found(self) -> tuple[Any, tuple[str, ...]] | None:
        """The module, and the names in it; None where this vLLM has or needs nothing of it."""
        for path, *names in () if self.until_ids and PROMPTS_ARE_IDS else self.places:
            try:
                module = import_module(f"vllm.{path}")
                attrgetter(*names)(module)
            except (ModuleNotFoundError, AttributeError):
                continue
            return module, tuple(names)
        return None


_RENDERER = "renderers.base"
_CHAT = ("MultiModalItemTracker.resolve_items", "AsyncMultiModalItemTracker.resolve_items")

PATCHES = (
    Patch(
        (("v1.engine.input_processor", "InputProcessor.process_inputs"),),
        (admission.with_admission,),
    ),
    Patch(
        ((_RENDERER, "BaseRenderer._process_tokens", "BaseRenderer._process_tokens_async"),),
        (admission.with_tenants, admission.with_tenants),
    ),
    Patch(
        (
            ("renderers.chat_utils.chat_message", "parse_chat_message_content_part", *_CHAT),
            ("renderers.chat_utils", "_parse_chat_message_content_part", *_CHAT),
            ("entrypoints.chat_utils", "_parse_chat_message_content_part", *_CHAT),
        ),
        (chat.reading, chat.gathering, chat.gathering),
    ),
    Patch(
        ((_RENDERER, "BaseRenderer.default_chat_tok_params"),),
        (admission.begun_once,),
        until_ids=True,
    ),
    Patch(
        ((_RENDERER, "BaseRenderer._process_mm_uuids"),),
        (admission.keeping_uuids,),
        until_ids=True,
    ),
)


def needed() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """What this vLLM needs: the module or class, the name of the part, and what replaces it."""
    for patch in PATCHES:
        if (found := patch.found()) is None:
            continue
        module, names = found
        for name, by in zip(names, patch.by, strict=True):
            owner, _, part = name.rpartition(".")
            yield (attrgetter(owner)(module) if owner else module), part, by


@cache
def install() -> None:
    """Replace it, once."""
    for owner, name, by in needed():
        setattr(owner, name, by(vars(owner)[name]))
