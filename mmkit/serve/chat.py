"""Items in chat messages: content parts ``{"type": "cloud", "cloud": ...}``, with an item in one of
the forms of ``POST /v1/mm/generate``.

vLLM's routes check each number of a body several times over. So items are decoded here, with the
limits of our own routes, and what vLLM reads refers to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw

from ..vllm_api.chat import REFERENCE, Load, modalities
from .door import Door
from .parsing import decoded, decoder

_OBJECT: Any = decoder(dict[str, Raw])
_LIST: Any = decoder(list[Raw])

Sent = Sequence[tuple[str, Load]]
"""Items, each with its modality."""


async def apart(body: bytes, door: Door) -> tuple[bytes, Sent]:
    """A request to one of vLLM's routes without the items in its messages, and what gives these.

    Raises:
        InputError: an item is malformed; or a message is, and there are items.
        TooLarge: the items are beyond a limit.
    """
    names = modalities(door.plan.spec)
    if b'"messages"' not in body or not any(f'"{name}"'.encode() in body for name in names):
        return body, []
    return await asyncio.to_thread(_apart, body, door, names)


def _apart(body: bytes, door: Door, names: list[str]) -> tuple[bytes, Sent]:
    request = decoded(_OBJECT, body)
    conversation = _Conversation(names)
    request["messages"] = conversation.messages(request.get("messages", Raw(b"null")))
    if not conversation.order:
        return body, []
    data = door.parts(conversation.items)
    turns = {name: iter(values) for name, values in data.items()}
    loaded = door.engine.loaded
    sent = [(name, partial(loaded, next(turns[name]), where)) for name, where in conversation.order]
    return msgspec.json.encode(request), sent


class _Conversation:
    """The messages of a request, whose items are gathered while they are read.

    Attributes:
        items: their JSON, by modality.
        order: the modality of each, and its path in errors.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self.items: dict[str, list[Raw]] = {}
        self.order: list[tuple[str, str]] = []

    def messages(self, raw: Raw) -> Raw:
        """The messages with references in place of items."""
        return _each(raw, self._message)

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
        if name not in self._names or name not in part:
            return raw
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


def _starts(raw: Raw, sign: bytes) -> bool:
    return bytes(memoryview(raw)[:1]) == sign


def _encoded(value: Any) -> Raw:
    return Raw(msgspec.json.encode(value))
