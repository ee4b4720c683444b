"""The base of the layers before all routes of a server: `AnswerMiddleware`, then `BodyMiddleware`.

They are middleware of ASGI: an application that calls the next one. Where a robot drives the model,
`OpenpiMiddleware` comes before both, and before vLLM's check of keys.
"""

from __future__ import annotations

from typing import Any

from .state import ServerState, find_state


class ServerMiddleware:
    """A layer before the routes of a server with a spec; other servers get requests as they are.

    A subclass says in `handle` what it does with a request.

    Args:
        app: the next layer, or the routes.
    """

    handled_types: tuple[str, ...] = ("http",)
    """The types of ASGI scopes that `handle` gets."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        state = find_state(scope["app"])
        if state is None or scope["type"] not in self.handled_types:
            await self.app(scope, receive, send)
        else:
            await self.handle(scope, receive, send, state)

    async def handle(self, scope: Any, receive: Any, send: Any, state: ServerState) -> None:
        """Answer a request, in most cases by `app`.

        Args:
            scope: what ASGI says of the request.
            receive: returns its messages.
            send: takes the messages of the answer.
            state: the server's.
        """
        raise NotImplementedError
