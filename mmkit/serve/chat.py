"""Items in chat messages: content parts ``{"type": "cloud", "cloud": ...}``, with an item in one of
the forms of ``POST /v1/mm/generate``.

vLLM's routes check each number of a body several times over. So items are decoded here, with the
limits of our own routes, and what vLLM reads refers to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw

from ..errors import InputError
from ..vllm_api.chat import REFERENCE, Load
from .parsing import decoded, decoder
from .weigh import Scale
from .wire import Media, TooLarge

if TYPE_CHECKING:
    from .door import Door

_OBJECT: Any = decoder(dict[str, Raw])
_LIST: Any = decoder(list[Raw])

FEW = 2**14
"""Values in the JSON that vLLM reads of a request, beside those of a prompt."""

Sent = Sequence[tuple[str, Load]]
"""Items, each with its modality."""

_ITEMS = ("multi_modal_data", "items")
"""Fields under which items are sent elsewhere."""

_MEDIA = {"image_url": "image", "video_url": "video"}
"""Fields of vLLM's own parts, which vLLM loads, and the kinds of their media."""

_CHAT = "/v1/chat/completions"

_ROUTES = ("/v1/completions", _CHAT, "/v1/embeddings", "/pooling", "/classify")
"""Routes of vLLM that would leave them out of a request without a word."""


async def apart(path: str, body: bytes, door: Door) -> tuple[bytes, Sent]:
    """A request to one of vLLM's routes without the items in its messages, and what gives these.

    Raises:
        InputError: an item is malformed; or a message is, and there are items; or there are items
            where nothing reads them; or messages, and no tokenizer.
        TooLarge: the items are beyond a limit.
    """
    if path == _CHAT and not door.engine.has_tokenizer:
        expected = "a prompt at /v1/mm/generate, since the server has no tokenizer"
        raise InputError("messages", expected, "messages")
    in_messages = _holds(body, ["messages"]) and _holds(body, [*door.in_messages, *_MEDIA])
    if in_messages or (path in _ROUTES and _holds(body, _ITEMS)):
        return await asyncio.to_thread(_apart, path, body, door)
    return body, []


def _holds(body: bytes, names: Sequence[str]) -> bool:
    """Whether a body may hold one of these names; an escape may spell any letter."""
    return b"\\u" in body or any(f'"{name}"'.encode() in body for name in names)


def _apart(path: str, body: bytes, door: Door) -> tuple[bytes, Sent]:
    request = decoded(_OBJECT, body)
    if path in _ROUTES and (name := next((name for name in _ITEMS if name in request), None)):
        remedy = "Send items to /v1/mm/generate or /v1/mm/pooling, or as parts of messages."
        raise InputError(name, f"no items at {path}", "some", remedy)
    conversation = _Conversation(door.in_messages)
    request["messages"] = conversation.messages(request.get("messages", Raw(b"null")))
    sent = conversation.sent(door)
    return (msgspec.json.encode(request), sent) if sent else (body, [])


class _Message(msgspec.Struct):
    """The part of a message that is checked before vLLM reads it."""

    role: str
    content: str | list[str | dict[str, Raw]] | None = None


def messages(raw: Raw, door: Door) -> tuple[list[Any], Sent]:
    """Messages of a request to one of our routes, without their items, and what gives these.

    Raises:
        InputError: they are malformed, or an item is.
        TooLarge: they are beyond a limit.
    """
    if not decoded(decoder(list[_Message]), raw, where="messages"):
        raise InputError("messages", "at least one", "none")
    conversation = _Conversation(door.in_messages)
    rest = bytes(conversation.messages(raw))
    scale = Scale(door.limits, "messages")
    scale.add(rest)
    if scale.listed > FEW:
        raise TooLarge("messages", f"at most {FEW} values in JSON beside items", "more")
    read = decoded(decoder(list[dict[str, Any]]), rest, where="messages")
    for message in read:  # the older name, which vLLM's route takes as well
        message.setdefault("reasoning", message.pop("reasoning_content", None))
    return read, conversation.sent(door)


class _Conversation:
    """The messages of a request, whose items are gathered while they are read.

    Attributes:
        items: their JSON, by modality.
        order: the modality of each, and its path in errors.
        media: what vLLM loads.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self.items: dict[str, list[Raw]] = {}
        self.order: list[tuple[str, str]] = []
        self.media: list[Media] = []

    def messages(self, raw: Raw) -> Raw:
        """The messages with references in place of items."""
        return _each(raw, self._message)

    def sent(self, door: Door) -> Sent:
        """The items of the messages in the order in which they were read: per item its modality,
        and a function that loads it.

        Raises:
            InputError: as for `Door.parts`.
        """
        data = door.parts(self.items, self.media)
        turns = {name: iter(values) for name, values in data.items()}
        loaded = door.engine.loaded
        return [(name, partial(loaded, next(turns[name]), where)) for name, where in self.order]

    def _message(self, raw: Raw) -> Raw:
        if not _starts(raw, b"{"):
            return raw
        message = decoded(_OBJECT, raw, where="messages")
        if "content" not in message:
            return raw
        return _encoded({**message, "content": _each(message["content"], self._part)})

    def _part(self, raw: Raw) -> Raw:
        if not _starts(raw, b"{"):
            return raw
        part = decoded(_OBJECT, raw, where="messages")
        name = msgspec.json.decode(part.get("type", b"null"))
        if name not in self._names:
            self.media += [Media(kind, _url(part[at])) for at, kind in _MEDIA.items() if at in part]
            return raw
        if name not in part:
            raise InputError("messages", f'the item of a part "{name}" as its "{name}"', "none")
        known = self.items.setdefault(name, [])
        reference = {"url": f"{REFERENCE}{len(self.order)}"}
        self.order.append((name, f"items.{name}[{len(known)}]"))
        known.append(part.pop(name))
        return _encoded({**part, "type": "image_url", "image_url": reference})


def _each(raw: Raw, read: Any) -> Raw:
    """A list whose values are read; anything else as it is, for vLLM to refuse."""
    if not _starts(raw, b"["):
        return raw
    return _encoded([read(one) for one in decoded(_LIST, raw, where="messages")])


def _url(raw: Raw) -> str:
    """The URL of a part; empty for what vLLM refuses."""
    value = msgspec.json.decode(raw)
    url = value.get("url") if isinstance(value, dict) else value
    return url if isinstance(url, str) else ""


def _starts(raw: Raw, sign: bytes) -> bool:
    return bytes(memoryview(raw)[:1]) == sign


def _encoded(value: Any) -> Raw:
    return Raw(msgspec.json.encode(value))
