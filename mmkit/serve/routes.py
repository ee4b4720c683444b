"""The routes: ``POST /v1/mm/generate``, ``GET /v1/mm/modalities`` and ``WS /v1/mm/session``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Request, WebSocket
from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect

from ..errors import InputError
from ..vllm_api.compat import find
from . import errors, protocol
from .decoding import build_schema, decode_json, run_in_thread_if_large
from .engine import Stopped
from .errors import NoSpec, OtherOrigin
from .protocol import Limits
from .session import Session
from .state import Answer, ServerState
from .wire import parse_message

_OF_VLLM = "entrypoints.serve.utils.api_utils"
with_cancellation = find(f"{_OF_VLLM}:with_cancellation")
load_aware_call = find(f"{_OF_VLLM}:load_aware_call")

Work = Callable[[Any, Request, ServerState], Awaitable[Any]]
router = APIRouter(tags=["multimodal items"])
COPY = "X-data-parallel-rank"
"""The header by which a request names the copy of the model that has its prefix, as at vLLM's own
routes."""

_JSON = "application/json"


# -- what all routes do ----------------------------------------------------------------------------


def _route(method: str, answer: Any, body: Any = None, **also: Any) -> Callable[[Work], Work]:
    """A decorator that makes a route of a function of its name.

    Args:
        method: of HTTP.
        answer: the type of what the function returns, unless that is a response.
        body: the type of what is asked; None for a route without a body.
        also: media types of other answers, with their descriptions.
    """

    def content(kind: Any, **also: Any) -> dict[str, Any]:
        return {"content": {_JSON: {"schema": build_schema(kind)}, **also}}

    refusal = {"description": "A refusal.", **content(protocol.ErrorBody)}
    refusals = dict.fromkeys((400, 404, 405, 413, 429, 500, 503), refusal)
    described: dict[str, Any] = {"responses": {200: content(answer, **also), **refusals}}
    if body:
        described["openapi_extra"] = {"requestBody": {"required": True, **content(body)}}

    def decorate(work: Work) -> Work:
        async def handle(request: Request) -> Response:
            state = getattr(request.app.state, "mmkit", None)
            try:
                if state is None:
                    raise NoSpec
                limits, raw = state.limits, await read(request, state.limits)
                asked = body and await run_in_thread_if_large(
                    len(raw), parse_message, body, raw, "body", limits
                )
                told = await working(asked, request, state)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            except Exception as error:
                return errors.make_response(error, state and state.plan, name)
            if isinstance(told, Response):
                return told
            return Response(msgspec.json.encode(told), media_type=_JSON)

        working = with_cancellation(load_aware_call(work))
        name = handle.__name__ = work.__name__
        handle.__doc__ = work.__doc__
        router.add_api_route(f"/v1/mm/{name}", handle, methods=[method], **described)
        return work

    return decorate


async def read(request: Request, limits: Limits) -> bytearray:
    """The body of a request.

    Raises:
        TooLarge: it is beyond a limit; the rest is not read.
        ClientDisconnect: the client left.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limits.body_bytes:
            raise limits.make_error("body", "body_bytes", "bytes")
    return body


# -- the routes ------------------------------------------------------------------------------------


@_route("GET", protocol.Modalities)
async def modalities(_: None, __: Request, state: ServerState) -> protocol.Modalities:
    """The modalities, outputs and limits of this model, from its spec."""
    return await state.engine.run_on_item_thread(lambda: state.description)


@_route("POST", protocol.Generation, protocol.GenerateRequest, **{"text/event-stream": {}})
async def generate(asked: protocol.GenerateRequest, request: Request, state: ServerState) -> Any:
    """Tokens for a prompt with items. A stream is server-sent events, each a `Generation` with what
    is new, and ends with ``[DONE]``."""
    if asked.prompt is None:
        raise InputError("prompt", "a prompt", "none")
    model, output = state.resolve_model(asked.model), state.find_output(asked)
    options = state.engine.parse_sampling_params(asked.sampling_params, state.limits)
    sampling = state.engine.make_sampling_params(options, output=output, stream=asked.stream)
    rank = request.headers.get(COPY)
    prompt, name = await state.make_prompt(asked, asked), f"mmgen-{uuid4().hex}"
    copy = None if rank is None else decode_json(int, rank, COPY)
    fits = output is not None
    outputs = state.engine.generate(prompt, sampling, name, data_parallel_rank=copy, must_fit=fits)
    events = _events(asked, outputs, Answer(output), id=name, model=model)
    # of a stream, too, so that a refusal still has its status
    first = await anext(events)
    if not asked.stream:
        await events.aclose()
        return first
    return StreamingResponse(_sse(first, events, state), media_type="text/event-stream")


async def _events(
    asked: protocol.GenerateRequest, outputs: Any, answer: Answer, **named: Any
) -> AsyncGenerator[protocol.Generation, None]:
    """The answer as it grows, or the whole as one event; the last one has the usage."""
    named["object"] = "mm.generation.chunk" if asked.stream else "mm.generation"
    named["created"], ranges = int(time.time()), asked.return_token_ids
    async with aclosing(outputs):
        async for rendered, new in outputs:
            told: dict[str, Any] = {
                "choices": [await answer.make_choice(part) for part in new.outputs]
            }
            if ranges:
                places = rendered.get("mm_placeholders", {})
                of = dict[str, list[protocol.Range]]
                told["mm_placeholders"] = msgspec.convert(places, of, from_attributes=True)
                ranges, told["prompt_token_ids"] = False, list(new.prompt_token_ids)
            if new.finished:
                told["usage"] = answer.make_usage(new)
            yield protocol.Generation(**named, **told)


async def _sse(first: protocol.Generation, events: Any, state: ServerState) -> AsyncIterator[bytes]:
    async with aclosing(events):
        yield _event(first)
        try:
            async for event in events:
                yield _event(event)
            yield b"data: [DONE]\n\n"
        except Exception as error:
            yield _event(protocol.ErrorBody(error=errors.make_info(error, state.plan, "generate")))


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


@router.websocket("/v1/mm/session")
async def session(socket: WebSocket) -> None:
    """A closed loop; see `mmkit.serve.session`."""
    state = getattr(socket.app.state, "mmkit", None)
    try:
        opened = _opened(socket, state)
    except Exception as error:
        refusal = errors.make_response(error, state and state.plan, "session")
        await socket.send_denial_response(refusal)
        return
    await opened.run()


def _opened(socket: WebSocket, state: ServerState | None) -> Session:
    """The session of a socket, before its handshake.

    Raises:
        NoSpec, OtherOrigin, Stopped: it is refused.
    """
    if state is None:
        raise NoSpec
    if state.is_stopping:
        raise Stopped
    # browsers let pages of any site open websockets, and ask nobody: it is for the server to look
    origin = socket.headers.get("origin")
    is_of_server = origin is None or urlsplit(origin).netloc == socket.headers.get("host")
    if not is_of_server and state.origins.isdisjoint(("*", origin)):
        raise OtherOrigin
    return Session(state, socket)
