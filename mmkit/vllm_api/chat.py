"""Chat messages with items of any modality of a spec: ``{"type": "cloud", "cloud": ...}``.

vLLM's content parts are a closed table. What reads one part, and what gathers the items of a
conversation, are put before vLLM's own functions; a part that is none of a spec's goes on to them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from functools import cache, wraps
from typing import Any, NamedTuple

from ..errors import InputError
from ..language.layout import Insert
from ..language.messages import gather_items
from ..language.spec import Declaration
from .compat import find
from .incoming import REQUEST
from .pipeline import has_pipeline

MODULES = ("renderers.chat_utils.chat_message", "renderers.chat_utils", "entrypoints.chat_utils")
"""Where vLLM reads messages, from the newest release to the oldest."""


class SentItem(NamedTuple):
    """An item in the messages of a request that a server reads.

    Attributes:
        modality: its name.
        item: as in `multi_modal_data`; None for an item that its uuid names.
        uuid: its name in the caches, if it has one.
    """

    modality: str
    item: Any
    uuid: str | None


SENT: dict[str, SentItem] = {}
"""The items of the requests that a server reads, by the URL of the ``image_url`` part that stands
for each: in every version, vLLM's routes accept only parts of vLLM's own types, and some read them
in other threads. No client can guess a URL."""


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
        sent = _sent_item(part)
        if sent is not None:
            part = {"type": sent.modality, sent.modality: sent.item, "uuid": sent.uuid}
        name: Any = part.get("type")
        where = f"{spec.name}.{name}"
        if name not in modalities(spec):
            check_type(spec, name, "messages")
            return theirs(part, parser, **options)
        if name not in part:
            raise InputError(where, f'a part with the item in its field "{name}"', "none")
        if sent is None and REQUEST.get() is not None:
            # a server decodes items itself, within its limits, on the routes that it knows
            raise InputError(where, f'no part of type "{name}" on this route', "one")
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


def check_type(spec: Declaration, name: object, where: str) -> None:
    """Refuse the type of a part of a message that is neither vLLM's nor a modality.

    Args:
        spec: that of the model.
        name: the type.
        where: the path of the part in errors.

    Raises:
        InputError: it is neither.
    """
    if isinstance(name, str) and name not in _of_vllm() and name not in modalities(spec):
        known = ", ".join(["text", *modalities(spec)])
        raise InputError(where, f"a part of a type among {known}", repr(name))


def modalities(spec: Declaration) -> list[str]:
    """The modalities of a spec that have a content part of their own: none that is named as one of
    vLLM's parts."""
    return [modality.name for modality in spec.modalities if modality.name not in _of_vllm()]


@cache
def _of_vllm() -> Mapping[str, Any]:
    """The types of vLLM's parts."""
    types: Mapping[str, Any] = find(*(f"{module}:MM_PARSER_MAP" for module in MODULES))
    return types


def _sent_item(part: Mapping[str, Any]) -> SentItem | None:
    """Return the item for which a part stands; None for a part that stands for none."""
    url = part.get("image_url")
    if isinstance(url, Mapping):
        url = url.get("url")
    return SENT.get(url) if isinstance(url, str) else None


def gathering(theirs: Any) -> Any:
    """vLLM's function that gathers the items of a conversation, which also gathers a spec's."""

    @wraps(theirs)
    def gather(items: Mapping[str, Any], processor: Any, *more: Any) -> Any:
        data, uuids = theirs(items, processor, *more)
        if not has_pipeline(processor):
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
