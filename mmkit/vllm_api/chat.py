"""Chat messages with items of any modality of a spec: ``{"type": "cloud", "cloud": ...}``.

vLLM's content parts are a closed table. The functions here stand before vLLM's functions that read
one part, and that gather the items of a conversation. A part that is none of a spec's goes on to
vLLM's.
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
from .pipeline import has_pipeline
from .server_request import SERVER_REQUEST

_MODULES = ("renderers.chat_utils.chat_message", "renderers.chat_utils", "entrypoints.chat_utils")
"""Where vLLM reads messages, from the newest release to the oldest."""


class ChatItem(NamedTuple):
    """An item in the messages of a request that a server reads.

    Attributes:
        modality: the name of its modality.
        item: as in `multi_modal_data`; None for an item that its uuid names.
        uuid: its name in the caches, if it has one.
    """

    modality: str
    item: Any
    uuid: str | None


ITEMS_BY_REFERENCE: dict[str, ChatItem] = {}
"""The items of all requests that a server works on, by the reference to each, a URL.

In every version, vLLM's routes accept only parts of vLLM's own types. So mmkit's server replaces a
part with an item by an ``image_url`` part with such a URL (`mmkit.serve.messages.REFERENCE`), and
`wrap_read_part` looks the item up. It is no context variable, since some of vLLM's routes read
parts in other threads. No client can guess a URL.
"""


def wrap_read_part(read_part: Any) -> Any:
    """Make vLLM's function that reads one part of a message read the parts of a spec too."""
    # from the module of the function, which is another one in older releases of vLLM
    marks = read_part.__globals__["MODALITY_PLACEHOLDERS_MAP"]

    @wraps(read_part)
    def read_part_of_spec(part: Any, parser: Any, **options: Any) -> Any:
        spec: Declaration | None = getattr(parser._tracker.model_cls, "mm_spec", None)
        if spec is None or not isinstance(part, Mapping):
            return read_part(part, parser, **options)
        item_of_server = _find_item_of_server(part)
        if item_of_server is not None:
            name = item_of_server.modality
            part = {"type": name, name: item_of_server.item, "uuid": item_of_server.uuid}
        type_name: Any = part.get("type")
        if type_name not in list_part_types(spec):
            check_type(spec, type_name, "messages")
            return read_part(part, parser, **options)
        where = f"{spec.name}.{type_name}"
        if type_name not in part:
            expected = f'a part with the item in its field "{type_name}"'
            raise InputError(where, expected, "none")
        if item_of_server is None and SERVER_REQUEST.get() is not None:
            # a server decodes items itself, within its limits, on the routes that it knows
            raise InputError(where, f'no part of type "{type_name}" on this route', "one")
        return _add_item(spec, type_name, part, parser, marks, options)

    return read_part_of_spec


def _add_item(
    spec: Declaration,
    name: str,
    part: Mapping[str, Any],
    parser: Any,
    marks: Mapping[str, str],
    options: Mapping[str, Any],
) -> Any:
    """Give the item of a part to vLLM's tracker, and return what vLLM puts into the message.

    Args:
        spec: the spec of the model.
        name: the modality of the item.
        part: the part of the message.
        parser: vLLM's.
        marks: vLLM's marks of items in the text of a message, by modality.
        options: the options of vLLM's function that reads a part.
    """
    uuid = part.get("uuid")
    if uuid is not None:
        uuid = str(uuid)
    target = parser._tracker.add(name, _TrackedItem((part[name], uuid)))
    if options["wrap_dicts"]:
        return {key: value for key, value in part.items() if key not in (name, "uuid")}
    needs_target = not all(isinstance(update, Insert) for update in spec[name].update)
    if target is None and needs_target:
        expected = "a target with a text in messages"
        remedy = "Use a chat template that reads parts, or write the prompt yourself."
        raise InputError(f"{spec.name}.{name}", expected, "one that is an id", remedy)
    if not target:
        return None
    # stands in the text of a message until its parts are put together
    mark = marks.get(name, f"<##{name.upper()}##>")
    parser._placeholder_storage[mark].append(target)
    return mark if options["interleave_strings"] else None


class _TrackedItem(tuple[Any, "str | None"]):
    """An item and its uuid, as vLLM's trackers keep them.

    It can be called and awaited, too, because vLLM's tracker of a server does one or the other.
    """

    __hash__ = object.__hash__  # asyncio.gather wants one; items have none

    def __call__(self) -> _TrackedItem:
        return self

    def __await__(self) -> Generator[Any, None, tuple[Any, str | None]]:
        yield from ()
        item, uuid = self
        return item, uuid


def wrap_gather_items(gather_items_of_vllm: Any) -> Any:
    """Make vLLM's function that gathers the items of a conversation gather a spec's items too."""

    @wraps(gather_items_of_vllm)
    def gather_items_of_spec(items: Mapping[str, Any], processor: Any, *more: Any) -> Any:
        data, uuids = gather_items_of_vllm(items, processor, *more)
        if not has_pipeline(processor):
            return data, uuids
        spec: Declaration = processor.spec
        for modality in spec.modalities:
            name = modality.name
            if name in items and name not in data:
                data[name] = [item for item, _ in items[name]]
                uuids[name] = [uuid for _, uuid in items[name]]
            if isinstance(data.get(name), list):
                where = f"{spec.name}.{name}"
                data[name] = gather_items(where, f"{name}_embeds", data[name])
        return data, uuids

    return gather_items_of_spec


def check_type(spec: Declaration, name: object, where: str) -> None:
    """Refuse the type of a part of a message that is neither vLLM's nor a modality.

    Args:
        spec: the spec of the model.
        name: the type.
        where: the path of the part in errors.

    Raises:
        InputError: it is neither.
    """
    if not isinstance(name, str) or name in _find_types_of_vllm() or name in list_part_types(spec):
        return
    types = ", ".join(["text", *list_part_types(spec)])
    raise InputError(where, f"a part of a type among {types}", repr(name))


def list_part_types(spec: Declaration) -> list[str]:
    """Return the types of a spec's content parts: the names of its modalities.

    A modality that has the name of one of vLLM's types has no part.
    """
    types = _find_types_of_vllm()
    return [modality.name for modality in spec.modalities if modality.name not in types]


@cache
def _find_types_of_vllm() -> Mapping[str, Any]:
    """Return the types of vLLM's parts."""
    types: Mapping[str, Any] = find(*(f"{module}:MM_PARSER_MAP" for module in _MODULES))
    return types


def _find_item_of_server(part: Mapping[str, Any]) -> ChatItem | None:
    """Return the item that mmkit's server has put into a part, or None."""
    url = part.get("image_url")
    if isinstance(url, Mapping):
        url = url.get("url")
    return ITEMS_BY_REFERENCE.get(url) if isinstance(url, str) else None
