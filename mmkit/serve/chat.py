"""Items in the messages of vLLM's routes: content parts ``{"type": "cloud", "cloud": ...}``, with
an item in one of the forms of ``POST /v1/mm/generate``, or the same as a data URL in an
``image_url`` part.

vLLM's routes check each number of a body several times over. So items are decoded here, with the
limits of our own routes, and what vLLM reads refers to them.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw

from ..errors import InputError
from ..vllm_api.chat import REFERENCE, Load
from .protocol import begins, decoded
from .wire import ITEM_URL, Decoder, Media, embeds_of, media_of, weigh

if TYPE_CHECKING:
    from .state import ServerState

Sent = Sequence[tuple[str, Load]]
"""Items, each with its modality."""

_ITEMS = ("multi_modal_data", "items")
_MEDIA = {"image_url": "image", "video_url": "video"}
_CHAT = "/v1/chat/completions"
_ROUTES = ("/v1/completions", _CHAT, "/v1/embeddings", "/pooling", "/classify")
"""Routes of vLLM that would leave items out of a request without a word."""


def apart(path: str, body: bytes, state: ServerState) -> tuple[bytes, Sent]:
    """A request to one of vLLM's routes without the items in its messages, and what gives these.

    Raises:
        InputError: an item is malformed; or a message is, and there are items; or there are items
            where nothing reads them; or messages, and no tokenizer.
        TooLarge: the items are beyond a limit.
    """
    if path == _CHAT and not state.engine.has_tokenizer:
        expected = "a prompt at /v1/mm/generate, since the server has no tokenizer"
        raise InputError("messages", expected, "messages")
    in_messages = _holds(body, ["messages"]) and _holds(body, [*state.in_messages, *_MEDIA])
    if not in_messages and not (path in _ROUTES and _holds(body, _ITEMS)):
        return body, []
    request = decoded(dict[str, Raw], body)
    for name in _ITEMS if path in _ROUTES else ():
        if name in request:
            remedy = "Send items to /v1/mm/generate or /v1/mm/pooling, or as parts of messages."
            raise InputError(name, f"no items at {path}", "some", remedy)
    conversation = _Conversation(state)
    request["messages"] = conversation.messages(request.get("messages", Raw(b"null")))
    sent = conversation.sent()
    return (msgspec.json.encode(request), sent) if sent else (body, [])


def _holds(body: bytes, names: Sequence[str]) -> bool:
    """Whether a body may hold one of these names; an escape may spell any letter."""
    return b"\\u" in body or any(f'"{name}"'.encode() in body for name in names)


class _Conversation:
    """The messages of a request, whose items are gathered while they are read: the modality and the
    JSON of each, and the media that vLLM loads."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._items: list[tuple[str, Raw]] = []
        self._media: list[Media] = []

    def messages(self, raw: Raw) -> Raw:
        """The messages with references in place of items."""
        return _each(raw, self._message)

    def sent(self) -> Sent:
        """The items in the order in which they were read: per item its modality, and a function
        that loads it.

        Raises:
            InputError: an item is malformed, or there are too many.
            TooLarge: they are beyond a limit of the server.
        """
        engine, limits = self._state.engine, self._state.limits
        counts, decoder, sent = Counter[str](), Decoder(limits), []
        weighed = [("messages", one) for one in self._media]
        for name, raw in self._items:
            modality, where = self._state.plan.modalities[name], f"items.{name}[{counts[name]}]"
            counts[name] += 1
            modality.intake.check_count(counts[name], engine.most_items.get(name))
            value = decoder.one(raw, where, modality.item, embeds_of(modality))
            weighed += [(where, one) for one in media_of([value])]
            sent.append((name, partial(engine.loaded, value, where)))
        self._state.check_pixels(weighed)
        return sent

    def _message(self, raw: Raw) -> Raw:
        message = decoded(dict[str, Raw], raw, "messages")
        if "content" in message:
            message["content"] = _each(message["content"], self._part)
        return Raw(msgspec.json.encode(message))

    def _part(self, raw: Raw) -> Raw:
        part, own = decoded(dict[str, Raw], raw, "messages"), self._state.in_messages
        urls = {name: _url(part[name]) for name in _MEDIA if name in part}
        name = msgspec.json.decode(part.get("type", b"null"))
        if urls.get("image_url", "").startswith(ITEM_URL):
            name, item = self._of_url(urls["image_url"])
        elif name in own:
            if name not in part:
                expected = f'the item of a part "{name}" as its "{name}"'
                raise InputError("messages", expected, "none")
            item = part.pop(name)
        else:
            self._media += [Media(_MEDIA[at], url) for at, url in urls.items()]
            return raw
        reference = {"type": "image_url", "image_url": {"url": f"{REFERENCE}{len(self._items)}"}}
        self._items.append((name, item))
        return Raw(msgspec.json.encode({**part, **reference}))

    def _of_url(self, url: str) -> tuple[str, Raw]:
        """The modality of an item and its JSON."""
        name, _, content = url.removeprefix(ITEM_URL).partition(";base64,")
        if name not in self._state.in_messages:
            expected = f"one of {', '.join(self._state.in_messages)}"
            raise InputError("messages", f"{expected} as the modality of a URL", repr(name[:40]))
        try:
            item = base64.b64decode(content, validate=True)
        except ValueError:
            raise InputError("messages", "base64 in the URL of an item", "another text") from None
        weigh(item, "messages", self._state.limits)
        return name, decoded(Raw, item, "messages")


def _each(raw: Raw, read: Callable[[Raw], Raw]) -> Raw:
    """A list whose objects are read; anything else as it is, for vLLM to refuse."""
    if not begins(raw, b"["):
        return raw
    parts = decoded(list[Raw], raw, "messages")
    return Raw(msgspec.json.encode([read(one) if begins(one, b"{") else one for one in parts]))


def _url(raw: Raw) -> str:
    """The URL of a part; empty for what vLLM refuses."""
    value = msgspec.json.decode(raw)
    url = value.get("url") if isinstance(value, dict) else value
    return url if isinstance(url, str) else ""
