"""The gate before every route of the server, vLLM's included: it limits bodies, and keeps refusals
short.

vLLM's own routes collect every mistake of a body, at about a kilobyte each, and repeat in the
refusal what was sent.
"""

from __future__ import annotations

from http import HTTPStatus
from socket import SO_RCVBUF, SOL_SOCKET
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import ClientDisconnect

from ..errors import InputError
from ..vllm_api.chat import SENT
from . import errors
from .chat import FEW, apart
from .door import Door, of_scope
from .limits import Limits
from .parsing import decoded, decoder
from .protocol import ErrorInfo
from .weigh import Scale, read, weigh_constraint
from .wire import TooLarge

_OWN = "/v1/mm/"

_LARGE = 2**20
"""Bytes of a body whose copies are worth a look before they are made."""

_LONGEST = 2**11
"""Bytes of the body of a refusal."""


_Id = Annotated[int, msgspec.Meta(ge=0)]


class _Prompted(msgspec.Struct):
    """The fields that may be long, by route; what is wrong in them is refused here, at the first
    mistake."""

    prompt: str | list[str | _Id | list[_Id]] | UnsetType | None = UNSET
    tokens: list[_Id] | UnsetType | None = UNSET
    token_ids: list[_Id] | UnsetType | None = UNSET

    def values(self) -> int:
        """The number of values in these fields.

        Raises:
            InputError: a prompt is no list of one kind.
        """
        count = 0
        for field in (self.prompt, self.tokens, self.token_ids):
            if not isinstance(field, list):
                continue
            kinds = set(map(type, field))
            if len(kinds) > 1:
                expected = "a list of ids, of texts or of lists of ids"
                raise InputError("prompt", expected, "a mixed one")
            count += sum(1 + len(part) if isinstance(part, list) else 1 for part in field)
        return count


class _Named(msgspec.Struct):
    """The field that vLLM repeats in its refusal, several times over."""

    model: Annotated[str, msgspec.Meta(max_length=2**10)] | UnsetType | None = UNSET


_CONSTRAINTS = (
    *("structured_outputs", "response_format", "text", "tools"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),  # before vLLM 0.12
)
_Constrained: Any = msgspec.defstruct(
    "_Constrained", [(name, msgspec.Raw, msgspec.Raw()) for name in (*_CONSTRAINTS, "tool_choice")]
)
"""The fields that say what a text must be, in whichever of vLLM's routes."""

_FREE_TO_CALL = (b"", b"null", b'"auto"', b'"none"')
"""Choices of tools for which no grammar is compiled."""


class Gate:
    """ASGI middleware.

    Args:
        app: the routes.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, if need be by 400 or 413."""
        door = of_scope(scope)
        if door is not None and scope["type"] == "lifespan":
            configure(scope["app"], door.limits)
        if door is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = _Short(send)
        if not scope["path"].startswith(_OWN) and scope["method"] in ("POST", "PUT", "PATCH"):
            try:
                receive = _again(await _weighed(scope, receive, door), receive)
            except ClientDisconnect:
                return
            except Exception as error:
                await errors.response(error, door.plan, "vllm")(scope, receive, send)
                return
        await self._app(scope, receive, send)


MOST_FRAMES = 4096
"""Fragments and pings of a websocket between two messages."""

_TURN = 2**12
"""Bytes of a websocket that are read in one turn of the event loop, about."""

UNREAD = 3
"""Seconds that clients have for what is under way when the server stops."""


def configure(app: Any, limits: Limits) -> None:
    """Set what vLLM leaves at uvicorn's defaults, before the server listens: it would wait for ever
    for half-sent bodies when it is to stop, and unpack messages of sessions.

    Args:
        app: vLLM's, which knows its server; under Ray Serve, something else stands in its place.
        limits: of which `body_bytes` holds for messages of sessions.
    """
    config = getattr(getattr(app.state, "server", None), "config", None)
    if config is not None:
        config.timeout_graceful_shutdown = UNREAD
        config.ws_max_size = limits.body_bytes + _LARGE
        config.ws_per_message_deflate = False
        if hasattr(config.ws_protocol_class, "send_receive_event_to_app"):
            config.ws_protocol_class = type("Framed", (_Framed, config.ws_protocol_class), {})


class _Framed:
    """Comes before uvicorn's protocol of websockets, whose frames no proxy looks at: little of them
    is read in one turn, and a client that sends many without a message is cut off."""

    transport: Any

    def connection_made(self, transport: Any) -> None:
        self._frames = 0
        transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_RCVBUF, _TURN)
        super().connection_made(transport)  # type: ignore[misc]

    def handle_cont(self, event: Any) -> None:
        self._count()
        super().handle_cont(event)  # type: ignore[misc]

    def handle_ping(self) -> None:
        self._count()
        super().handle_ping()  # type: ignore[misc]

    def send_receive_event_to_app(self) -> None:
        self._frames = 0
        super().send_receive_event_to_app()  # type: ignore[misc]

    def _count(self) -> None:
        self._frames += 1
        if self._frames > MOST_FRAMES:
            self.transport.abort()


async def _weighed(scope: Any, receive: Any, door: Door) -> bytes:
    """The body of a request to one of vLLM's routes."""
    kind = dict(scope["headers"]).get(b"content-type", b"")
    limits = door.limits
    scale = Scale(limits, "body", json=not kind.lower().startswith(b"multipart/"))
    body = bytes(await read(receive, limits, scale))
    if not scale.json:
        return body
    if b"\0" in body:  # Python also reads UTF-16, in which the scale does not know a text's end
        raise InputError("body", "JSON in UTF-8", "a zero byte")
    if len(body) > _LARGE and body.startswith(b"{"):
        decoded(decoder(_Named), body)
    if len(body) > limits.constraint and body.lstrip().startswith(b"{"):
        _weigh_constraints(decoded(decoder(_Constrained), body), limits)
    body, items = await apart(scope["path"], body, door)
    SENT.set(items)  # also none: a pipelined request begins in the context of the one before it
    if items:
        scale = Scale(limits, "body")
        scale.add(body)
    if scale.listed > FEW and scale.listed - decoded(decoder(_Prompted), body).values() > FEW:
        raise TooLarge("body", f"at most {FEW} values in JSON beside those of a prompt", "more")
    return body


def _weigh_constraints(fields: Any, limits: Limits) -> None:
    free = {"tools"} if bytes(fields.tool_choice) in _FREE_TO_CALL else set()
    if not bytes(fields.text).startswith(b"{"):  # of /v1/responses it is an object
        free.add("text")
    for name in sorted({*_CONSTRAINTS} - free):
        weigh_constraint(memoryview(getattr(fields, name)), name, limits)


def _again(body: bytes, receive: Any) -> Any:
    """The messages by which a route receives a body that has been read."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return left.pop() if left else await receive()

    return again


class _Short:
    """Sends an answer; the body of a refusal is short, whatever a route repeats in it."""

    def __init__(self, send: Any) -> None:
        self._send, self._start, self._body = send, None, bytearray()

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start" and message["status"] >= HTTPStatus.BAD_REQUEST:
            self._start = message
            return
        if self._start is None or message["type"] != "http.response.body":
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        start, body = self._start, bytes(self._body)
        if len(body) > _LONGEST:
            status = HTTPStatus(start["status"])
            text = body[: _LONGEST // 4].decode(errors="replace")
            info = ErrorInfo(message=f"{text}...", type=errors.kind(status), code=status)
            body = msgspec.json.encode(errors.body(info))
            headers = [pair for pair in start["headers"] if pair[0].lower() not in _OF_BODY]
            headers.append((b"content-length", str(len(body)).encode()))
            headers.append((b"content-type", b"application/json"))
            start = {**start, "headers": headers}
        await self._send(start)
        await self._send({**message, "body": body})


_OF_BODY = (b"content-length", b"content-type")
