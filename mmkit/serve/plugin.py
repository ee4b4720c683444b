"""The endpoint plugin: what mmkit adds to vLLM's server where VLLM_PLUGINS names it."""

from __future__ import annotations

import asyncio
import logging
import os
from socket import SO_RCVBUF, SOL_SOCKET
from typing import Annotated, Any

import msgspec
from msgspec import Raw
from starlette.requests import ClientDisconnect, Request

from ..errors import InputError
from ..vllm_api import offload
from ..vllm_api.chat import SENT
from ..vllm_api.processor import CommonProcessor
from . import errors
from .chat import apart
from .engine import Engine
from .protocol import Limits, TooLarge, decoded
from .routes import aside, read, router
from .state import ServerState
from .wire import listed

logger = logging.getLogger(__name__)

MOST_FRAMES = 4096
"""Fragments and pings of a websocket between two messages."""

FEW = 2**14
"""Values in the JSON that vLLM reads of a request, beside those of a prompt."""

_TURN = 2**15
_UNREAD = 3
_LARGE = 2**20


class MmkitEndpoints:
    """Adds the routes of `mmkit.serve.routes` to ``vllm serve``."""

    name = "mmkit"
    required_tasks = ("generate", "embed", "classify", "token_embed", "token_classify", "plugin")

    def attach_router(self, app: Any) -> None:
        """Register the routes, and the bounds of what bodies cost."""
        app.add_middleware(Gate)
        app.include_router(router)
        # what vLLM's own routes load has no other limit of ours
        os.environ.setdefault("VLLM_MAX_IMAGE_PIXELS", str(Limits.of().pixels))
        os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")  # they may lead anywhere

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Find the spec of the model that is served; without one the routes answer 404."""
        processor = engine_client and getattr(engine_client.renderer, "mm_processor", None)
        if not isinstance(processor, CommonProcessor):
            model = getattr(args, "model", "the model")
            logger.warning("mmkit: %s has no mmkit spec, so /v1/mm answers 404.", model)
            return
        if processes := offload.install(engine_client.renderer):
            await asyncio.to_thread(processes.wait)
        # before 0.32 vLLM trusted every request
        trust = getattr(args, "trust_request_mm_kwargs", True)
        engine = Engine(engine_client, processor, trust_kwargs=trust)
        models = list(args.served_model_name or [args.model])
        origins = getattr(args, "allowed_origins", "*")
        state.mmkit = ServerState(engine, Limits.of(), models, origins)


# -- bodies of vLLM's own routes -------------------------------------------------------------------

_Id = Annotated[int, msgspec.Meta(ge=0)]
_Prompt = str | list[str | _Id | list[_Id]] | None


class _Theirs(msgspec.Struct):
    """The fields of a long body that may be long, by route, or that vLLM repeats in its refusals;
    what is wrong in them is refused here, at the first mistake, of which vLLM would collect all."""

    prompt: _Prompt = None
    tokens: list[_Id] | None = None
    token_ids: list[_Id] | None = None
    model: Annotated[str, msgspec.Meta(max_length=2**10)] | None = None

    def values(self) -> int:
        """The number of values in prompts.

        Raises:
            InputError: a prompt is no list of one kind.
        """
        lists = [of for of in (self.prompt, self.tokens, self.token_ids) if isinstance(of, list)]
        if any(len(set(map(type, of))) > 1 for of in lists):
            raise InputError("prompt", "a list of ids, of texts or of lists of ids", "a mixed one")
        return sum(1 + len(one) if isinstance(one, list) else 1 for of in lists for one in of)


_CONSTRAINTS = ("structured_outputs", "response_format", "text", "tools")
_Constrained: Any = msgspec.defstruct(
    "_Constrained", [(name, Raw, Raw()) for name in (*_CONSTRAINTS, "tool_choice")]
)
"""The fields that say what a text must be, in whichever of vLLM's routes."""

_FREE_TO_CALL = (b"", b"null", b'"auto"', b'"none"')
"""Choices of tools for which no grammar is compiled."""


class Gate:
    """ASGI middleware before every route: it bounds what the bodies of vLLM's own routes cost,
    which collect every mistake of a body at about a kilobyte each, and takes items out of messages.

    Args:
        app: the routes.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, if need be by 400 or 413."""
        state = getattr(scope["app"].state, "mmkit", None) if "app" in scope else None
        if state is not None and scope["type"] == "lifespan":
            configure(scope["app"], state.limits)
        if state is not None and _is_theirs(scope):
            try:
                receive = _again(await _checked(Request(scope, receive), state), receive)
            except ClientDisconnect:
                return
            except Exception as error:
                # the rest of its body would be taken for the next request
                refusal = errors.response(error, state.plan, "vllm", connection="close")
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_theirs(scope: Any) -> bool:
    """Whether a request with a body goes to one of vLLM's routes."""
    if scope["type"] != "http" or scope["path"].startswith("/v1/mm/"):
        return False
    return scope["method"] in ("POST", "PUT", "PATCH")


async def _checked(request: Request, state: ServerState) -> bytes:
    """The body of a request to one of vLLM's routes, with references in place of items."""
    is_json = not request.headers.get("content-type", "").lower().startswith("multipart/")
    body = bytes(await read(request, state.limits, json=is_json))
    if not is_json:
        return body
    if b"\0" in body:  # Python also reads UTF-16, in which nobody here knows a text's end
        raise InputError("body", "JSON in UTF-8", "a zero byte")
    is_object = body.lstrip()[:1] == b"{"
    if is_object and len(body) > state.limits.constraint:
        _check_constraints(body, state.limits)
    body, items = await aside(len(body), apart, request.url.path, body, state)
    SENT.set(items)  # also none: a pipelined request begins in the context of the one before it
    count = await aside(len(body), listed, body)
    if is_object and (len(body) > _LARGE or count > FEW):
        count -= decoded(_Theirs, body).values()
    if count > FEW:
        raise TooLarge("body", f"at most {FEW} values in JSON beside those of a prompt", "more")
    return body


def _check_constraints(body: bytes, limits: Limits) -> None:
    """Refuse what would take long to compile."""
    fields = decoded(_Constrained, body)
    for name in sorted(_CONSTRAINTS):
        raw = getattr(fields, name)
        if name == "tools" and bytes(fields.tool_choice) in _FREE_TO_CALL:
            continue
        if name == "text" and not bytes(raw).startswith(b"{"):  # of /v1/responses it is an object
            continue
        if len(memoryview(raw)) > limits.constraint:
            raise limits.too_large(name, "constraint", "bytes")


def _again(body: bytes, receive: Any) -> Any:
    """The messages by which a route receives a body that has been read."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return left.pop() if left else await receive()

    return again


# -- uvicorn ---------------------------------------------------------------------------------------


def configure(app: Any, limits: Limits) -> None:
    """Set what vLLM leaves at uvicorn's defaults, before the server listens: it would wait for ever
    for half-sent bodies when it is to stop, and unpack messages of sessions.

    Args:
        app: vLLM's, which knows its server; under Ray Serve, something else stands in its place.
        limits: of which `body_bytes` holds for messages of sessions.
    """
    config = getattr(getattr(app.state, "server", None), "config", None)
    if config is not None:
        config.timeout_graceful_shutdown = _UNREAD
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
