"""Everything of vLLM that mmkit replaces, where vLLM has no hook: CONTRIBUTING.md has the table.

It is replaced when a process makes its first processor of a spec, so in no process that serves
none, and only where the release needs it. What replaces a part hands on all that is not a spec's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from . import admission, chat
from .compat import PROMPTS_ARE_IDS, find


class Patch(NamedTuple):
    """One replacement.

    Attributes:
        by: a function from vLLM's part to that in its place.
        places: ``module:name`` of the part, from the newest release to the oldest; the first that
            there is counts.
        until_ids: whether only releases need it in which the prompt of a request may be a text,
            those before 0.29.
    """

    by: Callable[[Any], Any]
    places: tuple[str, ...]
    until_ids: bool = False


_RENDERER = "renderers.base:BaseRenderer"
_ITEMS, _ITEMS_LATER, _PARTS = (
    tuple(f"{module}:{name}" for module in chat.MODULES)
    for name in (
        "MultiModalItemTracker.resolve_items",
        "AsyncMultiModalItemTracker.resolve_items",
        "_parse_chat_message_content_part",
    )
)

PATCHES = (
    Patch(admission.with_admission, ("v1.engine.input_processor:InputProcessor.process_inputs",)),
    Patch(admission.with_tenants, (f"{_RENDERER}._process_tokens",)),
    Patch(admission.with_tenants, (f"{_RENDERER}._process_tokens_async",)),
    Patch(chat.reading, (f"{chat.MODULES[0]}:parse_chat_message_content_part", *_PARTS)),
    Patch(chat.gathering, _ITEMS),
    Patch(chat.gathering, _ITEMS_LATER),
    Patch(admission.begun_once, (f"{_RENDERER}.default_chat_tok_params",), until_ids=True),
    Patch(admission.keeping_uuids, (f"{_RENDERER}._process_mm_uuids",), until_ids=True),
)


def needed() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """What this vLLM needs: the module or class, the name of the part, and what replaces it."""
    for by, places, until_ids in PATCHES:
        known = (place for place in places if find(place, default=None) is not None)
        if (place := next(known, None)) and not (until_ids and PROMPTS_ARE_IDS):
            module, _, path = place.partition(":")
            owner, _, name = path.rpartition(".")
            yield find(f"{module}:{owner}") if owner else import_module(f"vllm.{module}"), name, by


@cache
def install() -> None:
    """Replace it, once."""
    for owner, name, by in needed():
        setattr(owner, name, by(vars(owner)[name]))
