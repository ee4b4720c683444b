"""What vLLM's own routes read: bodies whose cost is bounded, with references in place of items.

vLLM collects every mistake of a body, at about a kilobyte each, and checks each number several
times. So items in messages are decoded here, with the limits of our own routes: content parts
``{"type": "cloud", "cloud": ...}``, with an item in one of the forms of ``POST /v1/mm/generate``,
or the same as a data URL in an ``image_url`` part. What vLLM reads refers to them.
"""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any
from uuid import uuid4

import msgspec
from msgspec import Meta, Raw
from starlette.requests import ClientDisconnect, Request

from ..errors import InputError
from ..vllm_api.chat import SENT
from . import errors
from .protocol import NULL, Limits, TooLarge, aside, begins, decoded
from .routes import read
from .state import ServerState
from .wire import ITEM_URL, MEDIA, Decoder, Media, embeds_of, listed, parsed, weigh

FEW = 2**14
"""Values in the JSON that vLLM reads of a request, beside those of a prompt."""

_ITEMS = ("multi_modal_data", "items")
_CHAT = "/v1/chat/completions"
_ROUTES = ("/v1/completions", _CHAT, "/v1/embeddings", "/pooling", "/classify")
"""Routes of vLLM that would leave items out of a request without a word."""

_FREE_TO_CALL = (b"null", b'"auto"', b'"none"')
"""Choices of tools for which no grammar is compiled."""

_Id = Annotated[int, Meta(ge=0)]
Sent = dict[str, tuple[str, Any]]
"""Items with their modalities, by the URLs that stand for them: what is added to `SENT`."""
Part = tuple[str, str, Any, str]
"""An item of a message: its URL, its modality, its value without media, and its path in errors."""


class Middleware:
    """What stands before every route.

    Args:
        app: the routes.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, if need be by 400 or 413."""
        state = getattr(scope["app"].state, "mmkit", None)
        sent: Sent = {}
        has_body = scope["type"] == "http" and scope["method"] in ("POST", "PUT", "PATCH")
        if state is not None and has_body and not scope["path"].startswith("/v1/mm/"):
            try:
                body, sent = await _body(Request(scope, receive), state)
                receive = _again(body, receive)
            except ClientDisconnect:
                return
            except Exception as error:
                # the rest of its body would be taken for the next request
                refusal = errors.response(error, state.plan, "vllm", connection="close")
                await refusal(scope, receive, send)
                return
        SENT.update(sent)
        try:
            await self._app(scope, receive, send)
        finally:
            for url in sent:
                del SENT[url]


async def _body(request: Request, state: ServerState) -> tuple[bytes, Sent]:
    """The body of a request to one of vLLM's routes, as that may read it, and its items."""
    body = bytes(await read(request, state.limits))
    if request.headers.get("content-type", "").lower().startswith("multipart/"):
        return body, {}
    body, parts = await aside(len(body), apart, request.url.path, body, state)
    loads = [state.engine.loaded(value, where) for *_, value, where in parts]
    items = zip(parts, await asyncio.gather(*loads), strict=True)
    return body, {url: (name, item) for (url, name, *_), item in items}


def _again(body: bytes, receive: Any) -> Any:
    """The messages by which a route receives a body that has been read."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return left.pop() if left else await receive()

    return again


def apart(path: str, body: bytes, state: ServerState) -> tuple[bytes, list[Part]]:
    """A body for one of vLLM's routes without the items in its messages, and these.

    Raises:
        InputError: an item is malformed; or a message is, and there are items; or there are items
            where nothing reads them; or messages, and no tokenizer; or a long prompt is.
        TooLarge: the items, or what is left, are beyond a limit.
    """
    weigh(body, "body", state.limits)
    if b"\0" in body:  # Python also reads UTF-16, in which nobody here knows a text's end
        raise InputError("body", "JSON in UTF-8", "a zero byte")
    if path == _CHAT and not state.engine.has_tokenizer:
        expected = "a prompt at /v1/mm/generate, since the server has no tokenizer"
        raise InputError("messages", expected, "messages")
    sent: list[Part] = []
    in_prompts = 0
    if body.lstrip()[:1] == b"{" and len(body) > min(FEW, state.limits.constraint):
        in_prompts = decoded(_Long, body).checked(state.limits)
    if _holds(body, [*_ITEMS, *state.in_messages, *MEDIA]):
        request = decoded(dict[str, Raw], body)
        for name in _ITEMS:
            if name in request and path in _ROUTES:
                remedy = "Send items to /v1/mm/generate, or as parts of messages."
                raise InputError(name, f"no items at {path}", "some", remedy)
        request["messages"], sent = _Conversation(state).read(request.get("messages", NULL))
        body = msgspec.json.encode(request) if sent else body
    if listed(body) - in_prompts > FEW:
        raise TooLarge("body", f"at most {FEW} values in JSON beside those of a prompt", "more")
    return body, sent


def _holds(body: bytes, names: Sequence[str]) -> bool:
    """Whether a body may hold one of these names; an escape may spell any letter."""
    return b"\\u" in body or any(f'"{name}"'.encode() in body for name in names)


class _Long(msgspec.Struct):
    """The fields of a long body that may be long, by route, or that vLLM repeats in its refusals,
    or that the engine compiles; what is wrong in them is refused here, at the first mistake, of
    which vLLM would collect all."""

    prompt: str | list[str | _Id | list[_Id]] | None = None
    tokens: list[_Id] | None = None
    token_ids: list[_Id] | None = None
    model: Annotated[str, Meta(max_length=2**10)] | None = None
    structured_outputs: Raw = NULL
    response_format: Raw = NULL
    text: Raw = NULL
    tools: Raw = NULL
    tool_choice: Raw = NULL

    def checked(self, limits: Limits) -> int:
        """The number of values in prompts.

        Raises:
            InputError: a prompt is no list of one kind.
            TooLarge: what would take long to compile.
        """
        compiled = {"response_format", "structured_outputs"}
        if begins(self.text, b"{"):  # of /v1/responses
            compiled.add("text")
        if bytes(self.tool_choice) not in _FREE_TO_CALL:
            compiled.add("tools")
        for name in sorted(compiled):
            if len(memoryview(getattr(self, name))) > limits.constraint:
                raise limits.too_large(name, "constraint", "bytes")
        lists = [of for of in (self.prompt, self.tokens, self.token_ids) if isinstance(of, list)]
        if any(len(set(map(type, of))) > 1 for of in lists):
            raise InputError("prompt", "a list of ids, of texts or of lists of ids", "a mixed one")
        return sum(1 + len(one) if isinstance(one, list) else 1 for of in lists for one in of)


# -- items in messages -----------------------------------------------------------------------------


class _Conversation:
    """The messages of a request, whose items are taken out while they are read."""

    def __init__(self, state: ServerState) -> None:
        self._state, self._decoder = state, Decoder(state.limits, state.engine.frames)
        self._counts = Counter[str]()
        self._sent: list[Part] = []

    def read(self, raw: Raw) -> tuple[Raw, list[Part]]:
        """The messages with references in place of items, and these.

        Raises:
            InputError: an item is malformed, or there are too many.
            TooLarge: they are beyond a limit of the server.
        """
        return _each(raw, self._message), self._sent

    def _message(self, raw: Raw) -> Raw:
        message = decoded(dict[str, Raw], raw, "messages")
        if "content" in message:
            message["content"] = _each(message["content"], self._part)
        return Raw(msgspec.json.encode(message))

    def _part(self, raw: Raw) -> Raw:
        part = decoded(dict[str, Raw], raw, "messages")
        urls = {name: _url(part[name]) for name in MEDIA if name in part}
        name = decoded(Any, part.get("type", NULL), "messages")
        if urls.get("image_url", "").startswith(ITEM_URL):
            self._take(*self._of_url(urls["image_url"]))
        elif name not in self._state.in_messages:
            for medium in urls:
                self._decoder.weighed(Media(MEDIA[medium], urls[medium]), "messages")
            return raw
        elif name not in part:
            raise InputError("messages", f'the item of a part "{name}" as its "{name}"', "none")
        else:
            self._take(name, part.pop(name))
        url = {"url": self._sent[-1][0]}
        return Raw(msgspec.json.encode({**part, "type": "image_url", "image_url": url}))

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
        return name, parsed(Raw, item, "messages", self._state.limits)

    def _take(self, name: str, raw: Raw) -> None:
        """Decode one more item."""
        engine, modality = self._state.engine, self._state.plan.modalities[name]
        where = f"items.{name}[{self._counts[name]}]"
        self._counts[name] += 1
        modality.intake.check_count(self._counts[name], engine.most_items.get(name))
        value = self._decoder.one(raw, where, modality.item, embeds_of(modality))
        self._sent.append((f"mmkit-item:{uuid4().hex}", name, value, where))


def _each(raw: Raw, read: Callable[[Raw], Raw]) -> Raw:
    """A list whose objects are read; anything else as it is, for vLLM to refuse."""
    if not begins(raw, b"["):
        return raw
    parts = decoded(list[Raw], raw, "messages")
    return Raw(msgspec.json.encode([read(one) if begins(one, b"{") else one for one in parts]))


def _url(raw: Raw) -> str:
    """The URL of a part; empty for what vLLM refuses."""
    value = decoded(Any, raw, "messages")
    url = value.get("url") if isinstance(value, dict) else value
    return url if isinstance(url, str) else ""
