"""The routes of a server with the spec of Terra, behind its layers, whose engine is never reached."""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any
from urllib.parse import unquote

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient

from examples.terra import CHECKPOINT
from examples.terra.spec import TERRA
from mmkit import InputError, testing
from mmkit.serve import routes
from mmkit.serve.answers import AnswerMiddleware, handle_input_error
from mmkit.serve.bodies import BodyMiddleware
from mmkit.serve.engine import Engine
from mmkit.serve.limits import ServerLimits
from mmkit.serve.messages import MESSAGE_FORMATS
from mmkit.serve.state import ServerState

SMALL = ServerLimits(body_bytes=200, sessions=1)

ECHO_ROUTES = ("/v1/other", "/v1/audio/transcriptions", "/health", "/metrics", *MESSAGE_FORMATS)
"""Routes in place of vLLM's, which say what they get."""

Handler = Callable[[Request], Awaitable[Response]]
"""What answers the requests to a route."""

EMPTY: Mapping[str, Handler] = MappingProxyType({})

SHUTDOWN_ERROR = RuntimeError("cannot schedule new futures after shutdown")
"""What vLLM's renderer raises when it stops."""


@functools.cache
def get_processor() -> Any:
    return testing.of_spec(TERRA, CHECKPOINT).processor


def make_engine(processor: Any = None) -> Engine:
    """Return the server's side of an engine, which renders without an end; by default for Terra."""
    processor = processor or get_processor()
    client = SimpleNamespace(
        renderer=SimpleNamespace(tokenizer=None, mm_processor_cache=None),
        model_config=processor.info.ctx.model_config,
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=1, data_parallel_size_local=1, local_engines_only=False),
            device_config=SimpleNamespace(device_type="cpu"),
            model_config=processor.info.ctx.model_config,
            speculative_config=None,
        ),
        errored=False,
    )
    engine: Any = Engine(client, processor, trust_kwargs=False)
    engine.render = render_without_end
    return engine


async def render_without_end(prompt: Any) -> Any:
    await asyncio.Event().wait()


@functools.cache
def get_shared_state() -> ServerState:
    """Return the state of a server with a tokenizer, for tests without requests."""
    engine = make_engine()
    engine.has_tokenizer = True
    engine.most_items = {}

    async def make_state() -> ServerState:  # in a loop, as a server does
        return ServerState(engine, ServerLimits(), ["terra"])

    return asyncio.run(make_state())


async def echo(request: Request) -> Response:
    """Answer what was sent, or what the headers ask for."""
    answer = request.headers.get("answer")
    if answer is None:
        body = await request.body()
    else:
        body = unquote(answer).encode()
    return Response(body, int(request.headers.get("wanted", 200)))


async def fail(request: Request) -> Response:
    """Refuse a request as mmkit does within a route of vLLM; or fail because the server begins to stop."""
    where = request.headers["where"]
    if where == "stop":
        request.app.state.mmkit.stop()
        raise SHUTDOWN_ERROR
    raise InputError(where, "another value", "this one")


@contextlib.contextmanager
def serve(
    limits: ServerLimits = SMALL,
    *,
    has_spec: bool = True,
    engine: Engine | None = None,
    handlers: Mapping[str, Handler] = EMPTY,
) -> Iterator[TestClient]:
    """Serve the routes, and give a client of them.

    Args:
        limits: of the server.
        has_spec: whether its model has a spec.
        engine: in place of one for Terra.
        handlers: by path, what answers requests in place of `echo`.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> Any:
        if has_spec:
            app.state.mmkit = ServerState(engine or make_engine(), limits, ["terra"])
        yield

    app = FastAPI(lifespan=lifespan)
    app.add_middleware(BodyMiddleware)
    app.add_middleware(AnswerMiddleware)
    app.add_exception_handler(InputError, handle_input_error)  # type: ignore[arg-type]
    app.include_router(routes.router)
    for path in ECHO_ROUTES:
        app.api_route(path, methods=["GET", "POST"])(handlers.get(path, echo))
    app.post("/v1/failing")(fail)
    with TestClient(app) as client:
        yield client


def get_state(client: TestClient) -> ServerState:
    """Return the state of the server of a client."""
    state: ServerState = client.app.state.mmkit  # type: ignore[attr-defined]
    return state
