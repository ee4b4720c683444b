"""The routes: ``POST /v1/mm/generate``, ``POST /v1/mm/pooling``, ``GET /v1/mm/modalities`` and
``WS /v1/mm/session``."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

from fastapi import APIRouter, Request, WebSocket
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

from ..errors import InputError, sentence
from ..plan import Plan
from . import errors, parsing, protocol, weigh, wire
from .answers import Output, choice, usage
from .door import Door, of_scope
from .engine import COPY, EngineDeadError
from .protocol import Choice, GenerateRequest, Generation, Pooling, PoolingRequest
from .session import POLICY, Session

T = TypeVar("T")

router = APIRouter(tags=["multimodal items"])

_REFUSALS: dict[int | str, dict[str, Any]] = {
    code: {"model": protocol.ErrorBody} for code in (400, 404, 405, 413, 429, 500, 503)
}


def _body(model: type[Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": parsing.schema(model)}}
    return {"requestBody": {"required": True, "content": content}}


def door(connection: Request | WebSocket) -> Door:
    """The door of a server.

    Raises:
        NoSpec: its model is not one of ours.
    """
    here = of_scope(connection.scope)
    if here is None:
        raise NoSpec
    return here


class NoSpec(Exception):
    """The model of this server has no spec of ours."""


_NO_SPEC = protocol.ErrorInfo(
    message="server: expected a model with an mmkit spec, got one without. Use vLLM's own routes.",
    type="NotFoundError",
    param=None,
    code=404,
)


@router.get("/v1/mm/modalities", responses={200: {"model": protocol.Modalities}, **_REFUSALS})
async def modalities(request: Request) -> Response:
    """The modalities, outputs and limits of this model, from its spec."""
    try:
        here = door(request)
    except NoSpec:
        return JSONResponse(errors.body(_NO_SPEC), 404)
    return JSONResponse((await here.described()).model_dump(mode="json"))


@router.post(
    "/v1/mm/generate",
    responses={200: {"model": Generation, "content": {"text/event-stream": {}}}, **_REFUSALS},
    openapi_extra=_body(GenerateRequest),
)
async def generate(request: Request) -> Response:
    """Tokens for a prompt with items. A stream is server-sent events, each a `Generation` with what
    is new, and ends with ``[DONE]``."""
    plan = None
    try:
        here = door(request)
        plan = here.plan
        raw = await weigh.read(request.receive, here.limits)
        asked = await _parsed(GenerateRequest, raw)
        if asked.prompt is None and asked.messages == protocol.nothing():
            raise InputError("prompt", "a prompt or messages", "none")
        model = here.check_model(asked.model)
        output = await here.output(asked)
        sampling = here.engine.sampling(
            asked,
            n=asked.n,
            stop=asked.stop,
            constraint=here.engine.constraint(asked, here.limits),
            output=output.bound if output else None,
            stream=asked.stream,
        )
        copy = here.engine.copy_asked(request.headers.get(COPY))
        prompt = await here.prompt(asked)
        answer = _Answer(model, asked.n, output)
        outputs = here.engine.generate(prompt, sampling, answer.id, copy)
        if not asked.stream:
            whole = await _unless_gone(request, here, answer.whole(outputs))
            return Response(whole, media_type="application/json")
        events = answer.events(outputs)
        # so that a refusal still has its status
        first = await _unless_gone(request, here, anext(events))
        return StreamingResponse(_sse(first, events, here), media_type="text/event-stream")
    except Exception as error:
        return _refusal(error, plan, "generate")


def _refusal(error: Exception, plan: Plan | None, route: str) -> Response:
    if isinstance(error, NoSpec):
        return JSONResponse(errors.body(_NO_SPEC), 404)
    if isinstance(error, (_Gone, ClientDisconnect)):
        return Response(status_code=499)  # nobody reads it
    refusal = errors.info(error, plan, route)
    return JSONResponse(errors.body(refusal), refusal.code)


@router.post(
    "/v1/mm/pooling",
    responses={200: {"model": Pooling}, **_REFUSALS},
    openapi_extra=_body(PoolingRequest),
)
async def pooling(request: Request) -> Response:
    """The tensor of a pooling model for a prompt with items."""
    plan = None
    try:
        here = door(request)
        plan = here.plan
        asked = await _parsed(PoolingRequest, await weigh.read(request.receive, here.limits))
        model = here.check_model(asked.model)
        params = await here.engine.pooling(asked.task)
        prompt = await here.prompt(asked)
        name = f"mmpool-{uuid4().hex}"
        output = await _unless_gone(request, here, here.engine.pool(prompt, params, name))
        pooled = Pooling(
            id=name,
            created=int(time.time()),
            model=model,
            data=wire.encode({"data": output.outputs.data.float()})["data"],
            usage=usage(len(output.prompt_token_ids), 0, output.num_cached_tokens or 0),
        )
        return Response(pooled.model_dump_json(), media_type="application/json")
    except Exception as error:
        return _refusal(error, plan, "pooling")


class _Answer:
    """The answer to one request, as it grows."""

    def __init__(self, model: str, n: int, output: Output | None) -> None:
        self.id, self._model, self._n = f"mmgen-{uuid4().hex}", model, n
        self._output = output
        self._ids: dict[int, list[int]] = {}
        self._created = int(time.time())
        self._prompt = self._cached = self._completion = 0

    def _json(self, choices: list[Choice], *, chunk: bool, last: bool) -> str:
        generation = Generation(
            id=self.id,
            object="mm.generation.chunk" if chunk else "mm.generation",
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage(self._prompt, self._completion, self._cached) if last else None,
        )
        return generation.model_dump_json(exclude_none=True)

    async def _choices(self, output: Any) -> list[Choice]:
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
        return new.model_copy(update={"produced": await self._output.produced(ids)})

    async def whole(self, outputs: AsyncIterator[Any]) -> str:
        """The complete answer, as JSON."""
        choices: list[Choice] = []
        async with aclosing(outputs):  # type: ignore[type-var]
            async for output in outputs:
                choices = await self._choices(output)
        return self._json(choices, chunk=False, last=True)

    async def events(self, outputs: AsyncIterator[Any]) -> AsyncIterator[str]:
        """The answer piece by piece, as JSON; the last one has the usage."""
        async with aclosing(outputs):  # type: ignore[type-var]
            async for output in outputs:
                yield self._json(await self._choices(output), chunk=True, last=output.finished)


async def _sse(first: str, events: Any, here: Door) -> AsyncIterator[str]:
    async with aclosing(events):
        try:
            async with here.alive():
                yield _event(first)
                async for event in events:
                    yield _event(event)
        except Exception as error:
            yield _event(json.dumps(errors.body(errors.info(error, here.plan, "generate"))))
            return
        yield "data: [DONE]\n\n"


def _event(data: str) -> str:
    return f"data: {data}\n\n"


_INLINE = 2**16
"""Bytes of JSON that are parsed on the event loop; more would hold up the other requests."""


async def _parsed(model: type[parsing.M], raw: bytes | bytearray) -> parsing.M:
    if len(raw) <= _INLINE:
        return parsing.parse(model, raw)
    return await asyncio.to_thread(parsing.parse, model, raw)


class _Gone(Exception):
    """The client left."""


async def _unless_gone(request: Request, here: Door, work: Awaitable[T]) -> T:
    """The outcome of some work, which is cancelled if the client leaves.

    Raises:
        _Gone: it did.
        EngineDeadError: the engine is over.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        waited: set[asyncio.Future[Any]] = {working, leaving, here.over}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise EngineDeadError if here.over.done() else _Gone
        return await working
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


@router.websocket("/v1/mm/session")
async def session(socket: WebSocket) -> None:
    """A closed loop; see `mmkit.serve.session`."""
    try:
        here = door(socket)
    except NoSpec:
        await socket.close(POLICY, _NO_SPEC.message[:120])
        return
    # browsers let pages of any site open websockets, and ask nobody: it is for the server to look
    if not _may_open(socket.headers, here):
        await socket.close(POLICY, "another origin")
        return
    await Session(here, socket).run()


def _may_open(headers: Mapping[str, str], here: Door) -> bool:
    """Whether a client is no page, a page of this very server, or one of an allowed origin."""
    origin = headers.get("origin")
    if origin is None or urlsplit(origin).netloc == headers.get("host"):
        return True
    return not here.origins.isdisjoint(("*", origin))


@router.api_route(
    "/v1/mm{rest:path}",
    methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"],
    include_in_schema=False,
)
async def elsewhere(request: Request, rest: str) -> Response:
    """A path or a method that no route above has."""
    known = rest in {"/generate", "/pooling", "/modalities", "/session"}
    status = HTTPStatus.METHOD_NOT_ALLOWED if known else HTTPStatus.NOT_FOUND
    posts = "POST /v1/mm/generate, POST /v1/mm/pooling"
    expected = f"{posts}, GET /v1/mm/modalities or a websocket at /v1/mm/session"
    message = sentence("path", expected, f"{request.method} {request.url.path[:80]}")
    info = protocol.ErrorInfo(message=message, type=errors.kind(status), code=status)
    return JSONResponse(errors.body(info), status)
