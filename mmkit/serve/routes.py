"""The routes: ``POST /v1/mm/generate``, ``POST /v1/mm/pooling``, ``GET /v1/mm/modalities`` and
``WS /v1/mm/session``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Request, WebSocket
from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect

from ..errors import InputError
from . import errors, protocol
from .engine import EngineDeadError
from .errors import NoSpec
from .protocol import Limits, decoded, schema
from .session import POLICY, Session
from .state import Answer, ServerState, usage
from .wire import encoded, weigh

T = TypeVar("T")
router = APIRouter(tags=["multimodal items"])
COPY = "X-data-parallel-rank"
"""The header by which a request names the copy of the model that has its prefix, as at vLLM's own
routes."""

_INLINE = 2**16
_JSON = "application/json"


def _described(answer: Any, body: Any = None, **also: Any) -> dict[str, Any]:
    """The description of a route: its answers, and the body that it takes."""

    def content(kind: Any, **also: Any) -> dict[str, Any]:
        return {"content": {_JSON: {"schema": schema(kind)}, **also}}

    refusal = {"description": "A refusal.", **content(protocol.ErrorBody)}
    refusals = dict.fromkeys((400, 404, 405, 413, 429, 500, 503), refusal)
    extra = {"requestBody": {"required": True, **content(body)}} if body else {}
    return {"responses": {200: content(answer, **also), **refusals}, "openapi_extra": extra}


def _state(connection: Request | WebSocket) -> ServerState:
    """The state of a server.

    Raises:
        NoSpec: its model is not one of ours.
    """
    state = getattr(connection.app.state, "mmkit", None)
    if not isinstance(state, ServerState):
        raise NoSpec
    return state


async def _answered(
    request: Request, name: str, kind: Any, work: Callable[..., Awaitable[Any]]
) -> Response:
    """The answer of a route to a body of some kind, or its refusal."""
    plan = None
    try:
        state = _state(request)
        plan = state.plan
        body = await read(request, state.limits)
        asked = await aside(len(body), decoded, kind, body) if kind else None
        answer = await _unless_gone(request, work(asked, request, state))
    except ClientDisconnect:
        return Response(status_code=499)  # nobody reads it
    except Exception as error:
        return errors.response(error, plan, name)
    if isinstance(answer, Response):
        return answer
    return Response(msgspec.json.encode(answer), media_type=_JSON)


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The outcome of some work, which is cancelled if the client leaves.

    Raises:
        ClientDisconnect: it has left.
    """
    working = asyncio.ensure_future(work)

    async def watch() -> None:  # nobody else reads the client's messages then
        while (await request.receive())["type"] != "http.disconnect":
            pass
        working.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        return await working
    except asyncio.CancelledError:
        if watching.done():
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()


async def aside(size: int, function: Callable[..., T], *args: Any) -> T:
    """The result of a function of so many bytes: many would hold up the other requests."""
    if size <= _INLINE:
        return function(*args)
    return await asyncio.to_thread(function, *args)


async def read(request: Request, limits: Limits, *, json: bool = True) -> bytearray:
    """The body of a request.

    Raises:
        TooLarge: it is beyond a limit; the rest is not read.
        ClientDisconnect: the client left.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limits.body_bytes:
            raise limits.too_large("body", "body_bytes", "bytes")
    if json:
        await aside(len(body), weigh, body, "body", limits)
    return body


# -- requests --------------------------------------------------------------------------------------


@router.get("/v1/mm/modalities", **_described(protocol.Modalities))
async def modalities(request: Request) -> Response:
    """The modalities, outputs and limits of this model, from its spec."""
    return await _answered(request, "modalities", None, lambda _, __, state: state.described())


@router.post(
    "/v1/mm/generate",
    **_described(protocol.Generation, protocol.GenerateRequest, **{"text/event-stream": {}}),
)
async def generate(request: Request) -> Response:
    """Tokens for a prompt with items. A stream is server-sent events, each a `Generation` with what
    is new, and ends with ``[DONE]``."""
    return await _answered(request, "generate", protocol.GenerateRequest, _generated)


@router.post("/v1/mm/pooling", **_described(protocol.Pooling, protocol.PoolingRequest))
async def pooling(request: Request) -> Response:
    """The tensor of a pooling model for a prompt with items."""
    return await _answered(request, "pooling", protocol.PoolingRequest, _pooled)


async def _generated(asked: protocol.GenerateRequest, request: Request, state: ServerState) -> Any:
    if asked.prompt is None:
        raise InputError("prompt", "a prompt", "none")
    model, output = state.check_model(asked.model), state.output(asked)
    options = state.engine.chosen(asked.sampling_params, state.limits)
    sampling = state.engine.sampling(options, output=output, stream=asked.stream)
    rank = request.headers.get(COPY)
    prompt, name = await state.prompt(asked), f"mmgen-{uuid4().hex}"
    copy = None if rank is None else decoded(int, rank, COPY)
    fits = output is not None
    outputs = state.engine.generate(prompt, sampling, name, copy, fits=fits)
    events = _events(asked, outputs, Answer(output), id=name, model=model)
    # of a stream, too, so that a refusal still has its status
    first = await anext(events)
    if not asked.stream:
        await events.aclose()
        return first
    return StreamingResponse(_sse(first, events, state), media_type="text/event-stream")


async def _pooled(asked: protocol.PoolingRequest, _: Request, state: ServerState) -> Any:
    model, params = state.check_model(asked.model), await state.engine.pooling(asked.task)
    prompt, name = await state.prompt(asked), f"mmpool-{uuid4().hex}"
    output = await state.engine.pool(prompt, params, name)
    return protocol.Pooling(
        id=name,
        object="mm.pooling",
        created=int(time.time()),
        model=model,
        data=encoded(output.outputs.data.float(), "data"),
        usage=usage(len(output.prompt_token_ids), 0, output.num_cached_tokens or 0),
    )


# -- answers ---------------------------------------------------------------------------------------


async def _events(
    asked: protocol.GenerateRequest, outputs: Any, answer: Answer, **named: Any
) -> AsyncGenerator[protocol.Generation, None]:
    """The answer as it grows, or the whole as one event; the last one has the usage."""
    named["object"] = "mm.generation.chunk" if asked.stream else "mm.generation"
    named["created"], ranges = int(time.time()), asked.return_token_ids
    async with aclosing(outputs):
        async for rendered, new in outputs:
            told: dict[str, Any] = {"choices": await answer.grown(new)}
            if any(part.finish_reason == "abort" for part in new.outputs):
                raise EngineDeadError  # by nobody but a server that stops
            if ranges:
                places = rendered.get("mm_placeholders", {})
                of = dict[str, list[protocol.Range]]
                told["mm_placeholders"] = msgspec.convert(places, of, from_attributes=True)
                ranges, told["prompt_token_ids"] = False, list(new.prompt_token_ids)
            if new.finished:
                told["usage"] = answer.usage()
            yield protocol.Generation(**named, **told)


async def _sse(first: protocol.Generation, events: Any, state: ServerState) -> AsyncIterator[bytes]:
    async with aclosing(events):
        try:
            yield _event(first)
            async for event in events:
                yield _event(event)
        except Exception as error:
            yield _event(protocol.ErrorBody(error=errors.info(error, state.plan, "generate")))
            return
    yield b"data: [DONE]\n\n"


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


# -- sessions --------------------------------------------------------------------------------------


@router.websocket("/v1/mm/session")
async def session(socket: WebSocket) -> None:
    """A closed loop; see `mmkit.serve.session`."""
    try:
        state = _state(socket)
    except NoSpec as error:
        await socket.close(POLICY, errors.info(error, None, "session").message[:120])
        return
    # browsers let pages of any site open websockets, and ask nobody: it is for the server to look
    origin = socket.headers.get("origin")
    own = origin is None or urlsplit(origin).netloc == socket.headers.get("host")
    if not own and state.origins.isdisjoint(("*", origin)):
        await socket.close(POLICY, "another origin")
        return
    await Session(state, socket).run()
