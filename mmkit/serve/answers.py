"""What all answers have in common, on vLLM's routes as on those of mmkit: refusals are counted,
those that may be tried again say when, and a server that stops says so."""

from __future__ import annotations

from typing import Any

from . import errors
from .engine import Stopped
from .state import ServerState

RETRY_SECONDS = b"1"
"""What 429 and 503 tell in Retry-After. The queue may have room at once, and so may another
server."""

_BODIES = ("POST", "PUT", "PATCH")
"""Methods of requests whose refusals count. Probes and scanners ask by others."""

_WATCHED = "/metrics"
"""The route that a server which stops answers to its end."""

_ROUTES = {f"/v1/mm/{name}": name for name in ("generate", "modalities")}
"""The routes of mmkit that count for themselves, by their paths."""

_ERROR_EVENT = b'data: {"error"'
"""How an event begins by which vLLM ends a stream."""


class AnswerMiddleware:
    """What stands before every route, and before what reads the bodies of requests.

    Args:
        app: the routes.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request; by 503 if the server stops."""
        state = getattr(scope["app"].state, "mmkit", None)
        if state is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, send, state)
        if not state.is_stopping or scope["path"] == _WATCHED:
            try:
                await self._app(scope, receive, answer.send)
            except Exception:
                if answer.has_begun or not state.is_stopping:
                    raise
                answer.is_broken = True
            if not answer.is_broken:
                return
        # the body of the request, which nobody has read, would be taken for the next request
        refusal = errors.make_response(Stopped(), state.plan, _route(scope), connection="close")
        await refusal(scope, receive, _Answer(scope, send, state).send)


def _route(scope: Any) -> str:
    """The route in metrics."""
    return _ROUTES.get(scope["path"], "vllm")


class _Answer:
    """The answer to one request, on its way.

    Attributes:
        has_begun: whether the client has the status.
        is_broken: whether it failed because the server stops, and the client has nothing of it.

    Args:
        scope: that of the request.
        send: takes it.
        state: the server's.
    """

    def __init__(self, scope: Any, send: Any, state: ServerState) -> None:
        self._scope, self._send, self._state = scope, send, state
        self._status = 0
        self.has_begun = self.is_broken = False

    async def send(self, message: Any) -> None:
        """Hand on one of its messages."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            if self._status in (429, 503):
                message = {**message, "headers": _with_retry(message.get("headers", ()))}
            elif self._status >= 500 and self._state.is_stopping:
                self.is_broken = True
            self.has_begun = not self.is_broken
        if self.is_broken:
            return
        if message["type"] == "http.response.body":
            self._count(message.get("body", b""))
        await self._send(message)

    def _count(self, body: bytes) -> None:
        """Count a refusal by vLLM, at the first part of its body, or within a stream."""
        if self._scope["method"] not in _BODIES or _route(self._scope) != "vllm":
            return
        if self._status >= 400:
            errors.count_foreign_refusal(self._scope, self._state.plan, self._status, body)
            self._status = 0
        elif body.startswith(_ERROR_EVENT):
            event = body.partition(b"\n")[0].removeprefix(b"data: ")
            errors.count_foreign_refusal(self._scope, self._state.plan, 400, event)


def _with_retry(headers: Any) -> list[Any]:
    """The headers of an answer, with Retry-After."""
    names = {name.lower() for name, _ in headers}
    return [*headers] if b"retry-after" in names else [*headers, (b"retry-after", RETRY_SECONDS)]
