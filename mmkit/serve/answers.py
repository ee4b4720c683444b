"""What all answers have in common, on vLLM's routes and on mmkit's.

Refusals are counted, 429 and 503 say when to try again, and a server that stops says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from . import errors
from .engine import Stopped
from .middleware import ServerMiddleware
from .state import ServerState, find_state

RETRY_SECONDS = b"1"
"""The Retry-After of 429 and 503. The queue may have room at once, and so may another server."""

_METHODS_WITH_BODY = ("POST", "PUT", "PATCH")
"""Methods of requests whose refusals are counted. Probes and scanners use others."""

_METRICS_PATH = "/metrics"
"""The route that a server which stops answers to its end."""

_ROUTE_NAMES = {"/v1/mm/generate": "generate", "/v1/mm/modalities": "modalities"}
"""The routes of mmkit, which count their refusals themselves, by path."""

_ERROR_EVENT = b'data: {"error"'
"""How an event begins by which vLLM ends a stream."""


class AnswerMiddleware(ServerMiddleware):
    """The first layer: it watches what the others answer."""

    async def handle(self, scope: Any, receive: Any, send: Any, state: ServerState) -> None:
        """Answer a request; by 503 if the server stops."""
        if state.is_stopping and scope["path"] != _METRICS_PATH:
            await self._refuse(scope, receive, send, state)
            return
        answer = WatchedAnswer(scope, send, state)
        try:
            await self.app(scope, receive, answer.send)
        except Exception:
            if answer.has_begun or not state.is_stopping:
                raise
            answer.is_broken = True
        if answer.is_broken:
            await self._refuse(scope, receive, send, state)

    async def _refuse(self, scope: Any, receive: Any, send: Any, state: ServerState) -> None:
        """Answer 503, since the server stops."""
        # The connection ends: nobody has read the request's body, which would count as a request.
        route = _name_route(scope)
        refusal = errors.make_response(Stopped(), state.plan, route, connection="close")
        await refusal(scope, receive, WatchedAnswer(scope, send, state).send)


class WatchedAnswer:
    """The answer to one request, whose messages go through `send`.

    Args:
        scope: ASGI's scope of the request.
        send: takes the messages.
        state: the server's.

    Attributes:
        has_begun: whether the client has the status.
        is_broken: whether it failed because the server stops, and the client has nothing of it.
    """

    def __init__(self, scope: Any, send: Any, state: ServerState) -> None:
        self._scope = scope
        self._send = send
        self._state = state
        self._status = 0
        self.has_begun = False
        self.is_broken = False

    async def send(self, message: Any) -> None:
        """Send one message of the answer, unless the answer is broken."""
        if message["type"] == "http.response.start":
            message = self._begin(message)
        if self.is_broken:
            return
        if message["type"] == "http.response.body":
            self._count_refusal(message.get("body", b""))
        await self._send(message)

    def _begin(self, message: Any) -> Any:
        """Return the message with the status, if need be with Retry-After."""
        self._status = message["status"]
        if self._status in (429, 503):
            message = {**message, "headers": _add_retry_after(message.get("headers", ()))}
        elif self._status >= 500 and self._state.is_stopping:
            self.is_broken = True
        self.has_begun = not self.is_broken
        return message

    def _count_refusal(self, body: bytes) -> None:
        """Count a refusal by vLLM, at the first part of its body, or within a stream."""
        if self._scope["method"] not in _METHODS_WITH_BODY or _name_route(self._scope) != "vllm":
            return
        if self._status >= 400:
            errors.count_foreign_refusal(self._scope, self._state.plan, self._status, body)
            self._status = 0  # so that the next part of the body is not counted
        elif body.startswith(_ERROR_EVENT) and not self._state.is_stopping:
            # the stop, which ends streams by such an event, is no fault
            event = body.partition(b"\n")[0].removeprefix(b"data: ")
            errors.count_foreign_refusal(self._scope, self._state.plan, self._status, event)


async def handle_input_error(request: Request, error: Exception) -> Response:
    """Answer a request at one of vLLM's routes that mmkit refuses after its body is read."""
    state = find_state(request.app)
    plan = state.plan if state else None
    return errors.make_response(error, plan, "vllm")


def _name_route(scope: Any) -> str:
    """Return the route of a request in metrics."""
    return _ROUTE_NAMES.get(scope["path"], "vllm")


def _add_retry_after(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer with Retry-After, unless they have it."""
    headers = list(headers)
    names = [name.lower() for name, _ in headers]
    if b"retry-after" not in names:
        headers.append((b"retry-after", RETRY_SECONDS))
    return headers
