"""The routes: ``POST /v1/mm/generate``, ``POST /v1/mm/pooling``, ``GET /v1/mm/modalities`` and
``WS /v1/mm/session``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Request, WebSocket
from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect
from vllm.v1.engine.exceptions import EngineDeadError

from ..errors import InputError, sentence
from . import errors
from .engine import COPY, chosen
from .errors import NoSpec
from .protocol import (
    Choice,
    ErrorBody,
    ErrorInfo,
    GenerateRequest,
    Generation,
    Limits,
    Modalities,
    Pooling,
    PoolingRequest,
    Range,
    decoded,
    nothing,
    schema,
)
from .session import POLICY, Session
from .state import Gone, ServerState, choice, produced, usage
from .wire import encode, weigh

T = TypeVar("T")
router = APIRouter(tags=["multimodal items"])
_INLINE = 2**16
_JSON = "application/json"


def _told(model: Any, **more: Any) -> dict[int | str, dict[str, Any]]:
    """The answers of a route, in its description."""
    refusal = {"description": "A refusal.", "content": {_JSON: {"schema": schema(ErrorBody)}}}
    answer = {"content": {_JSON: {"schema": schema(model)}, **more}}
    return {200: answer, **dict.fromkeys((400, 404, 405, 413, 429, 500, 503), refusal)}


def _body(model: type[Any]) -> dict[str, Any]:
    content = {_JSON: {"schema": schema(model)}}
    return {"requestBody": {"required": True, "content": content}}


def _state(connection: Request | WebSocket) -> ServerState:
    """The state of a server.

    Raises:
        NoSpec: its model is not one of ours.
    """
    state = getattr(connection.app.state, "mmkit", None)
    if not isinstance(state, ServerState):
        raise NoSpec
    return state


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


async def _parsed(kind: type[T], request: Request, state: ServerState) -> T:
    body = await read(request, state.limits)
    return await aside(len(body), decoded, kind, body)


def _refusal(error: Exception, request: Request, route: str) -> Response:
    if isinstance(error, (Gone, ClientDisconnect)):
        return Response(status_code=499)  # nobody reads it
    state = getattr(request.app.state, "mmkit", None)
    return errors.response(error, state and state.plan, route)


def _answer(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type=_JSON)


@router.get("/v1/mm/modalities", responses=_told(Modalities))
async def modalities(request: Request) -> Response:
    """The modalities, outputs and limits of this model, from its spec."""
    try:
        return _answer(await _state(request).described())
    except NoSpec as error:
        return _refusal(error, request, "modalities")


@router.post(
    "/v1/mm/generate",
    responses=_told(Generation, **{"text/event-stream": {}}),
    openapi_extra=_body(GenerateRequest),
)
async def generate(request: Request) -> Response:
    """Tokens for a prompt with items. A stream is server-sent events, each a `Generation` with what
    is new, and ends with ``[DONE]``."""
    try:
        state = _state(request)
        asked = await _parsed(GenerateRequest, request, state)
        if asked.prompt is None and asked.messages == nothing():
            raise InputError("prompt", "a prompt or messages", "none")
        model, output = state.check_model(asked.model), await state.output(asked)
        sent = chosen(asked.sampling_params)
        sampling = state.engine.sampling(sent, state.limits, output=output, stream=asked.stream)
        copy = state.engine.copy_asked(request.headers.get(COPY))
        prompt = await state.prompt(asked)
        answer = _Answer(model, asked, output)
        outputs = state.engine.generate(prompt, sampling, answer.id, copy)
        async with _leaving(request) as leaving:
            if not asked.stream:
                return _answer(await state.unless_over(answer.whole(outputs), leaving))
            events = answer.events(outputs)
            # so that a refusal still has its status
            first = await state.unless_over(anext(events), leaving)
        return StreamingResponse(_sse(first, events, state), media_type="text/event-stream")
    except Exception as error:
        return _refusal(error, request, "generate")


@router.post("/v1/mm/pooling", responses=_told(Pooling), openapi_extra=_body(PoolingRequest))
async def pooling(request: Request) -> Response:
    """The tensor of a pooling model for a prompt with items."""
    try:
        state = _state(request)
        asked = await _parsed(PoolingRequest, request, state)
        model = state.check_model(asked.model)
        params = await state.engine.pooling(asked.task)
        prompt, name = await state.prompt(asked), f"mmpool-{uuid4().hex}"
        async with _leaving(request) as leaving:
            output = await state.unless_over(state.engine.pool(prompt, params, name), leaving)
        pooled = Pooling(
            id=name,
            object="mm.pooling",
            created=int(time.time()),
            model=model,
            data=encode({"data": output.outputs.data.float()})["data"],
            usage=usage(len(output.prompt_token_ids), 0, output.num_cached_tokens or 0),
        )
        return _answer(pooled)
    except Exception as error:
        return _refusal(error, request, "pooling")


# -- answers ---------------------------------------------------------------------------------------


class _Answer:
    """The answer to one request, as it grows."""

    def __init__(self, model: str, asked: GenerateRequest, output: Any) -> None:
        self.id, self._model, self._asked = f"mmgen-{uuid4().hex}", model, asked
        self._output = output
        self._ids: dict[int, list[int]] = {}
        self._created = int(time.time())
        self._prompt = self._cached = self._completion = 0
        self._ranges: dict[str, Any] = {}

    async def whole(self, outputs: Any) -> Generation:
        """The complete answer."""
        choices: list[Choice] = []
        async with aclosing(outputs):
            async for rendered, output in outputs:
                choices = await self._choices(rendered, output)
        return self._generation(choices, "mm.generation", last=True)

    async def events(self, outputs: Any) -> AsyncIterator[Generation]:
        """The answer piece by piece; the last one has the usage."""
        async with aclosing(outputs):
            async for rendered, output in outputs:
                choices = await self._choices(rendered, output)
                yield self._generation(choices, "mm.generation.chunk", last=output.finished)

    def _generation(self, choices: list[Choice], kind: Any, *, last: bool) -> Generation:
        ranges, self._ranges = self._ranges, {}
        return Generation(
            id=self.id,
            object=kind,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage(self._prompt, self._completion, self._cached) if last else None,
            **ranges,
        )

    async def _choices(self, rendered: Mapping[str, Any], output: Any) -> list[Choice]:
        if self._asked.return_token_ids and not self._prompt:
            self._ranges = {
                "prompt_token_ids": list(output.prompt_token_ids),
                "mm_placeholders": {
                    name: [Range(offset=place.offset, length=place.length) for place in places]
                    for name, places in rendered.get("mm_placeholders", {}).items()
                },
            }
        self._prompt = len(output.prompt_token_ids or ())
        self._cached = max(self._cached, output.num_cached_tokens or 0)
        self._completion += sum(len(part.token_ids) for part in output.outputs)
        # by nobody but a server that stops
        if any(part.finish_reason == "abort" for part in output.outputs):
            raise EngineDeadError
        return [await self._with_output(choice(part)) for part in output.outputs]

    async def _with_output(self, new: Choice) -> Choice:
        """The new part of a choice, with the output once it is complete."""
        if self._output is None:
            return new
        ids = self._ids.setdefault(new.index, [])
        ids += new.token_ids
        if new.finish_reason is None:
            return new
        made = await produced(self._output, ids, self._asked.output_format)
        return msgspec.structs.replace(new, produced=made)


async def _sse(first: Generation, events: Any, state: ServerState) -> AsyncIterator[bytes]:
    async with aclosing(events):
        try:
            event: Any = first
            while event is not None:
                yield _event(event)
                event = await state.unless_over(anext(events, None))
        except Exception as error:
            yield _event(ErrorBody(error=errors.info(error, state.plan, "generate")))
            return
    yield b"data: [DONE]\n\n"


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


@asynccontextmanager
async def _leaving(request: Request) -> AsyncIterator[asyncio.Future[None]]:
    """What is done when the client has left; nobody else reads its messages then."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.ensure_future(gone())
    try:
        yield leaving
    finally:
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)


# -- sessions, and what is none of these -----------------------------------------------------------


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


@router.api_route(
    "/v1/mm{rest:path}",
    methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"],
    include_in_schema=False,
)
async def elsewhere(request: Request, rest: str) -> Response:
    """A path or a method that no route above has."""
    known = rest in {"/generate", "/pooling", "/modalities", "/session"}
    status, kind = (405, "MethodNotAllowedError") if known else (404, "NotFoundError")
    posts = "POST /v1/mm/generate, POST /v1/mm/pooling"
    expected = f"{posts}, GET /v1/mm/modalities or a websocket at /v1/mm/session"
    message = sentence("path", expected, f"{request.method} {request.url.path[:80]}")
    body = ErrorBody(error=ErrorInfo(message=message, type=kind, code=status))
    return Response(msgspec.json.encode(body), status, media_type=_JSON)
