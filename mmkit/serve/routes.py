"""The routes: ``POST /v1/mm/generate``, ``GET /v1/mm/modalities`` and two of websockets.

A request to ``POST /v1/mm/generate`` makes these calls, in this order:

- `answers.AnswerMiddleware.handle` refuses the request if the server stops;
- `bodies.BodyMiddleware.handle` sets a `ServerRequest` for it, and lets it pass: this route reads
  its body itself;
- `routes.handle_generate` is the endpoint of the router;
- `routes.answer_request` makes a response of what the calls below return or raise;
- `routes.receive_message` receives the body (`routes.receive_body`). `wire.limits.parse_message`,
  in a thread if the body is large, checks its size (`wire.limits.check_size`) and decodes it
  (`wire.decoding.decode_json`) as a `protocol.GenerateRequest`;
- `routes.generate` makes the answer to that message:

  - for the settings it calls `state.ServerState.resolve_model`, `state.ServerState.find_output`,
    `engine.Engine.parse_sampling_params` and `engine.Engine.make_sampling_params`;
  - `state.ServerState.make_prompt` makes vLLM's prompt: `wire.items.Decoder.decode_items` decodes
    the items of each modality, `wire.items.find_media` finds the media among them, and
    `engine.Engine.load_media` loads these;
  - `engine.Engine.generate` renders the prompt (`engine.Engine.render`), sends it to the engine
    (steps 9 to 11 of docs/how-it-works.md), and yields vLLM's outputs. To render it, vLLM's
    renderer (render_cmpl_async) tokenizes the prompt; its next step, around which
    wrap_process_tokens of vllm_api.patches stands, calls the parser and the processor of mmkit
    (steps 1 to 8);
  - `state.Answer.make_choice` makes a choice of what is new in an output, and
    `state.Answer.make_usage` counts the tokens;
  - `routes.stream_events` sends the events of a stream; without one, the first event is the answer.

The websockets are served by session.py and openpi.py.

An error on this path becomes a refusal in `errors.make_response`, which also counts it.
"""

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

from ..document.schema import build_item_schema
from ..errors import InputError
from ..vllm_api.compat import find
from ..wire.decoding import decode_json
from ..wire.limits import Limits, parse_message
from . import errors, protocol
from .engine import Stopped
from .errors import NoPolicy, NoSpec, OtherOrigin
from .openpi import OPENPI_ROUTE, RobotConnection
from .session import Session
from .state import Answer, ServerState, find_state
from .threads import run_in_thread_if_large

_VLLM_UTILS = "entrypoints.serve.utils.api_utils"
with_cancellation = find(f"{_VLLM_UTILS}:with_cancellation")
load_aware_call = find(f"{_VLLM_UTILS}:load_aware_call")

RANK_HEADER = "X-data-parallel-rank"
"""The header by which a request names the data parallel rank that has its prefix, as at vLLM's own
routes."""

REQUEST_ID_HEADER = "X-Request-Id"
"""The header by which a proxy names a request, as at vLLM's own routes. The answer's id has it."""

MAX_REQUEST_ID_CHARS = 128
"""Characters of that header. Each event of a stream has the id."""

REFUSAL_CODES = (400, 404, 405, 413, 429, 500, 503)
"""HTTP statuses of refusals, for the OpenAPI document."""

Work = Callable[[Any, Request, ServerState], Awaitable[Any]]
"""What a route does with a decoded body: it returns a struct or a response."""

Events = AsyncGenerator[protocol.Generation, None]
"""An answer as it grows."""

_JSON = "application/json"
_EVENT_STREAM = "text/event-stream"

router = APIRouter(tags=["multimodal items"])


# -- the OpenAPI document --------------------------------------------------------------------------


def describe_content(kind: Any) -> dict[str, Any]:
    """Return the description of a body in JSON."""
    return {"content": {_JSON: {"schema": protocol.build_schema(kind)}}}


def describe_responses(kind: Any, *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return the descriptions of the answers of a route, by status.

    Args:
        kind: the type of the body of an answer.
        streams: whether there may be a stream instead.
    """
    answer = describe_content(kind)
    if streams:
        answer["content"][_EVENT_STREAM] = {}
    refusal = {"description": "A refusal."} | describe_content(protocol.ErrorBody)
    responses: dict[int | str, dict[str, Any]] = {200: answer}
    for code in REFUSAL_CODES:
        responses[code] = refusal
    return responses


def describe_request(kind: Any) -> dict[str, Any]:
    """Return the description of the body of a request."""
    return {"requestBody": {"required": True} | describe_content(kind)}


# -- GET /v1/mm/modalities -------------------------------------------------------------------------


def describe_modalities() -> dict[int | str, dict[str, Any]]:
    """Return the descriptions of the answers of the route, with the schema of item types."""
    responses = describe_responses(protocol.Modalities)
    schema = responses[200]["content"][_JSON]["schema"]
    modality_schema = schema["properties"]["modalities"]["items"]
    item_schema = build_item_schema()
    modality_schema["properties"]["item"] = {"anyOf": [item_schema, {"type": "null"}]}
    return responses


@router.get("/v1/mm/modalities", name="modalities", responses=describe_modalities())
async def handle_modalities(request: Request) -> Response:
    """Return the modalities, outputs and limits of this model, from its spec."""
    return await answer_request(request, "modalities", None, find_modalities)


@with_cancellation  # type: ignore[untyped-decorator]
@load_aware_call  # type: ignore[untyped-decorator]
async def find_modalities(_: None, raw_request: Request, state: ServerState) -> protocol.Modalities:
    """Return the description of the model."""

    def get_description() -> protocol.Modalities:
        return state.description

    return await state.engine.run_on_item_thread(get_description)


# -- POST /v1/mm/generate --------------------------------------------------------------------------


@router.post(
    "/v1/mm/generate",
    name="generate",
    responses=describe_responses(protocol.Generation, streams=True),
    openapi_extra=describe_request(protocol.GenerateRequest),
)
async def handle_generate(request: Request) -> Response:
    """Generate tokens for a prompt with items.

    A stream is server-sent events, each a `Generation` with what is new, and ends with ``[DONE]``.
    """
    return await answer_request(request, "generate", protocol.GenerateRequest, generate)


@with_cancellation  # type: ignore[untyped-decorator]
@load_aware_call  # type: ignore[untyped-decorator]
async def generate(
    request: protocol.GenerateRequest, raw_request: Request, state: ServerState
) -> Any:
    """Return the generation of a request, or the response that streams it.

    Raises:
        InputError: the request is refused; for a stream, too, since its first event is awaited.
    """
    if request.prompt is None:
        raise InputError("prompt", "a prompt", "none")
    answer_id = _make_answer_id(raw_request)
    model = state.resolve_model(request.model)
    output = state.find_output(request)
    options = state.engine.parse_sampling_params(request.sampling_params, state.limits)
    sampling = state.engine.make_sampling_params(options, output=output, stream=request.stream)
    prompt = await state.make_prompt(request, settings=request)
    outputs = state.engine.generate(
        prompt,
        sampling,
        # not the id of the answer: clients may send one twice
        f"mmgen-{uuid4().hex}",
        data_parallel_rank=_parse_rank(raw_request),
        # a text with outputs in it may be cut off, as any text
        must_fit=output is not None and output.after is None,
    )
    answer = Answer(state.engine, sampling, output)
    events = _make_events(request, outputs, answer, answer_id, model)
    first = await anext(events)
    if not request.stream:
        await events.aclose()
        return first
    return StreamingResponse(stream_events(first, events, state), media_type=_EVENT_STREAM)


def _make_answer_id(raw_request: Request) -> str:
    """Return the id of an answer: from the request's header, or a random id.

    Raises:
        InputError: the header is too long.
    """
    request_id = raw_request.headers.get(REQUEST_ID_HEADER) or uuid4().hex
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        expected = f"at most {MAX_REQUEST_ID_CHARS} characters"
        raise InputError(REQUEST_ID_HEADER, expected, str(len(request_id)))
    return f"mmgen-{request_id}"


def _parse_rank(raw_request: Request) -> int | None:
    """Return the data parallel rank that a request names, if it does."""
    text = raw_request.headers.get(RANK_HEADER)
    if text is None:
        return None
    rank: int = decode_json(int, text, RANK_HEADER)
    return rank


async def _make_events(
    request: protocol.GenerateRequest, outputs: Any, answer: Answer, answer_id: str, model: str
) -> Events:
    """Yield the answer as it grows, or the whole as one event; the last event has the usage.

    Args:
        request: which says what the events have.
        outputs: of `Engine.generate`.
        answer: a new one.
        answer_id: what its events have as their id.
        model: that the request asks for.
    """
    created = int(time.time())
    is_first = True
    async with aclosing(outputs):
        async for rendered, output in outputs:
            event: dict[str, Any] = {
                "id": answer_id,
                "object": "mm.generation.chunk" if request.stream else "mm.generation",
                "created": created,
                "model": model,
                "choices": await _make_choices(request, output, answer),
            }
            if is_first and request.return_token_ids:
                event["prompt_token_ids"] = list(output.prompt_token_ids)
                event["mm_placeholders"] = _convert_ranges(rendered)
            if output.finished:
                event["usage"] = answer.make_usage(output)
            yield protocol.Generation(**event)
            is_first = False


async def _make_choices(
    request: protocol.GenerateRequest, output: Any, answer: Answer
) -> list[protocol.Choice]:
    """Return what is new in each completion of one of vLLM's outputs."""
    choices = []
    for completion in output.outputs:
        choice = await answer.make_choice(
            completion, output.prompt_token_ids, stream=request.stream
        )
        choices.append(choice)
    return choices


def _convert_ranges(rendered: Any) -> dict[str, list[protocol.Range]]:
    """Return vLLM's placeholder ranges of a rendered prompt, by modality."""
    placeholders = rendered.get("mm_placeholders", {})
    ranges = dict[str, list[protocol.Range]]
    return msgspec.convert(placeholders, ranges, from_attributes=True)


async def stream_events(
    first: protocol.Generation, events: Events, state: ServerState
) -> AsyncIterator[bytes]:
    """Yield the events of a stream in the form of server-sent events.

    An error after the first event ends the stream with an event of its own.
    """
    async with aclosing(events):
        yield _encode_event(first)
        try:
            async for event in events:
                yield _encode_event(event)
            yield b"data: [DONE]\n\n"
        except Exception as error:
            info = errors.make_info(error, state.plan, "generate")
            yield _encode_event(protocol.ErrorBody(error=info))


def _encode_event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


# -- what both routes do ---------------------------------------------------------------------------


async def answer_request(request: Request, route: str, body_type: Any, work: Work) -> Response:
    """Return the answer to a request, or its refusal.

    Args:
        request: the request.
        route: its name in metrics.
        body_type: the type of its body; None for a route without a body.
        work: makes the answer.
    """
    state = find_state(request.app)
    plan = None
    if state is not None:
        plan = state.plan
    try:
        if state is None:
            raise NoSpec
        message = await receive_message(request, body_type, state.limits)
        answer = await work(message, request, state)
    except ClientDisconnect:
        return Response(status_code=499)  # nobody reads it
    except Exception as error:
        return errors.make_response(error, plan, route)
    if isinstance(answer, Response):
        return answer
    return Response(msgspec.json.encode(answer), media_type=_JSON)


async def receive_message(request: Request, body_type: Any, limits: Limits) -> Any:
    """Return the decoded body of a request; None where the type of the body is None.

    Raises:
        InputError: the body is malformed.
        TooLarge: it is beyond a limit.
        ClientDisconnect: the client left.
    """
    body = await receive_body(request, limits)
    if body_type is None:
        return None
    return await run_in_thread_if_large(len(body), parse_message, body_type, body, "body", limits)


async def receive_body(request: Request, limits: Limits) -> bytearray:
    """Return the body of a request.

    Raises:
        TooLarge: it is beyond a limit; the rest is not read.
        ClientDisconnect: the client left.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limits.body_bytes:
            raise limits.make_error("body", "body_bytes", "bytes")
    return body


# -- WS /v1/mm/session and WS /v1/realtime/robot/openpi --------------------------------------------


@router.websocket("/v1/mm/session")
async def session(socket: WebSocket) -> None:
    """Serve a session; see `mmkit.serve.session`."""
    await _serve_socket(socket, "session", _open_session)


@router.websocket(OPENPI_ROUTE)
async def robot(socket: WebSocket) -> None:
    """Serve a robot; see `mmkit.serve.openpi`."""
    await _serve_socket(socket, "openpi", _open_robot)


async def _serve_socket(
    socket: WebSocket, route: str, open_connection: Callable[[ServerState, WebSocket], Any]
) -> None:
    """Serve a socket until it closes, or refuse it before its handshake.

    Args:
        socket: not accepted yet.
        route: its name in metrics.
        open_connection: returns what serves the socket.
    """
    state = find_state(socket.app)
    plan = None
    if state is not None:
        plan = state.plan
    try:
        if state is None:
            raise NoSpec
        _check_handshake(socket, state)
        connection = open_connection(state, socket)
    except Exception as error:
        await socket.send_denial_response(errors.make_response(error, plan, route))
        return
    await connection.run()


def _check_handshake(socket: WebSocket, state: ServerState) -> None:
    """Refuse a socket of another origin, and all when the server stops.

    Raises:
        OtherOrigin, Stopped: it is refused.
    """
    if state.is_stopping:
        raise Stopped
    # browsers let the pages of any site open websockets, and do not check: the server has to
    origin = socket.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != socket.headers.get("host"):
        if "*" not in state.origins and origin not in state.origins:
            raise OtherOrigin


def _open_session(state: ServerState, socket: WebSocket) -> Session:
    """Return the session of a socket."""
    return Session(state, socket)


def _open_robot(state: ServerState, socket: WebSocket) -> RobotConnection:
    """Return the connection of a robot.

    Raises:
        NoPolicy: the spec says nothing of robots.
    """
    if state.plan.policy is None:
        raise NoPolicy
    return RobotConnection(state, state.plan.policy, socket)
