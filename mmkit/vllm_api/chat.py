"""Chat messages with items of any modality of a spec: ``{"type": "cloud", "cloud": ...}``.

vLLM's content parts are a closed table. What reads one part, and what gathers the items of a
conversation, are put before vLLM's own functions; a part that is none of a spec's goes on to them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from functools import cache, wraps
from typing import Any

from ..errors import InputError
from ..layout import Insert
from ..messages import gather_items
from ..spec import Declaration
from .compat import find
from .processor import CommonProcessor

MODULES = ("renderers.chat_utils.chat_message", "renderers.chat_utils", "entrypoints.chat_utils")
"""Where vLLM reads messages, from the newest release to the oldest."""

SENT: dict[str, tuple[str, Any]] = {}
"""The items of the requests that a server reads, each with its modality, by the URL of the
``image_url`` part that stands for it: in every version, vLLM's routes accept only parts of vLLM's
own types, and some read them in other threads. No client can guess a URL."""


class _Item(tuple[Any, "str | None"]):
    """An item and its uuid, as vLLM's tracker of a request keeps them, and as what that of a server
    calls or awaits."""

    __hash__ = object.__hash__  # asyncio.gather wants one; items have none

    def __call__(self) -> _Item:
        return self

    def __await__(self) -> Generator[Any, None, tuple[Any, str | None]]:
        yield from ()
        item, uuid = self
        return item, uuid


def reading(theirs: Any) -> Any:
    """vLLM's function that reads one part of a message, which also reads the parts of a spec."""
    marks = theirs.__globals__["MODALITY_PLACEHOLDERS_MAP"]

    @wraps(theirs)
    def read(part: Any, parser: Any, **options: Any) -> Any:
        tracker = parser._tracker
        spec: Declaration | None = getattr(tracker.model_cls, "mm_spec", None)
        if spec is None or not isinstance(part, Mapping):
            return theirs(part, parser, **options)
        part = _resolved(part)
        name: Any = part.get("type")
        where = f"{spec.name}.{name}"
        if name not in modalities(spec):
            if isinstance(name, str) and name not in _of_vllm():
                known = ", ".join(["text", *modalities(spec)])
                raise InputError("messages", f"parts of a type among {known}", repr(name))
            return theirs(part, parser, **options)
        if name not in part:
            raise InputError(where, f'the item of a part "{name}" as its "{name}"', "none")
        uuid = part.get("uuid")
        placeholder = tracker.add(name, _Item((part[name], None if uuid is None else str(uuid))))
        if options["wrap_dicts"]:
            return {key: value for key, value in part.items() if key not in (name, "uuid")}
        if placeholder is None and not all(isinstance(u, Insert) for u in spec[name].update):
            expected = "a placeholder with a text in messages"
            remedy = "Use a chat template that reads parts, or write the prompt yourself."
            raise InputError(where, expected, "one that is an id", remedy)
        # stands in the text of a message until its parts are put together
        mark = marks.get(name, f"<##{name.upper()}##>")
        if not placeholder:
            return None
        parser._placeholder_storage[mark].append(placeholder)
        return mark if options["interleave_strings"] else None

    return read


def modalities(spec: Declaration) -> list[str]:
    """The modalities of a spec that have a content part of their own: none that is named as one of
    vLLM's parts."""
    return [modality.name for modality in spec.modalities if modality.name not in _of_vllm()]


@cache
def _of_vllm() -> Mapping[str, Any]:
    """The types of vLLM's parts."""
    types: Mapping[str, Any] = find(*(f"{module}:MM_PARSER_MAP" for module in MODULES))
    return types


def _resolved(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part with the item that it refers to, if it does."""
    url = part.get("image_url")
    sent = SENT.get(str(url.get("url") if isinstance(url, Mapping) else url))
    if sent is None:
        return part
    name, item = sent
    rest = {key: value for key, value in part.items() if key not in ("type", "image_url")}
    return {**rest, "type": name, name: item}


def gathering(theirs: Any) -> Any:
    """vLLM's function that gathers the items of a conversation, which also gathers a spec's."""

    @wraps(theirs)
    def gather(items: Mapping[str, Any], processor: Any, *more: Any) -> Any:
        data, uuids = theirs(items, processor, *more)
        if not isinstance(processor, CommonProcessor):
            return data, uuids
        for name in (modality.name for modality in processor.spec.modalities):
            if name in items and name not in data:
                values, names = zip(*items[name], strict=True)
                data[name], uuids[name] = list(values), list(names)
            if isinstance(data.get(name), list):
                where = f"{processor.spec.name}.{name}"
                data[name] = gather_items(where, f"{name}_embeds", data[name])
        return data, uuids

    return gather
