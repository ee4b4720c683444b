"""What the routes refuse before an engine is asked, and what they say of one that is over.

The routes, their state and the processor are the real ones; tests/engine/terra_server has the refusals of a server.
"""

import asyncio
import contextlib
import functools
import json
import sys
from types import SimpleNamespace
from unittest import mock

import hypothesis.strategies as st
import msgspec
import pytest
from fastapi import FastAPI
from hypothesis import given
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from vllm import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from examples.server import Server
from examples.terra import CHECKPOINT
from examples.terra.spec import TERRA
from mmkit import InputError, MmkitError, SpecError, testing
from mmkit.serve import errors, routes, wire
from mmkit.serve.engine import Engine, Lost
from mmkit.serve.middleware import Middleware
from mmkit.serve.protocol import Limits
from mmkit.serve.state import ServerState
from mmkit.serve.wire import listed
from tests.unit.common import refused

pytestmark = pytest.mark.timeout(120)

START = {"type": "start", "prompt": [1], "sampling_params": {"max_tokens": 1}}


@functools.cache
def processor():
    return testing.of_spec(TERRA, CHECKPOINT).processor


def engine():
    """The server's side of an engine that is never reached."""
    config = processor().info.ctx.model_config
    renderer = SimpleNamespace(tokenizer=None, mm_processor_cache=None)
    parallel = SimpleNamespace(data_parallel_size=1, data_parallel_size_local=1, local_engines_only=False)
    vllm_config = SimpleNamespace(parallel_config=parallel)
    client = SimpleNamespace(renderer=renderer, model_config=config, vllm_config=vllm_config, errored=False)
    instance = Engine(client, processor(), trust_kwargs=False)
    instance.render = endless
    return instance


async def endless(prompt):
    await asyncio.Event().wait()


async def other(request: Request):
    """A route that says what it was sent."""
    return Response(await request.body(), int(request.headers.get("wanted", 200)))


@contextlib.contextmanager
def serving(limits=Limits(body_bytes=200, sessions=1), *, spec=True):  # noqa: B008
    """A client of the routes."""

    @contextlib.asynccontextmanager
    async def lifespan(app):
        state = ServerState(engine(), limits, ["terra"])
        if spec:
            app.state.mmkit = state
        yield

    app = FastAPI(lifespan=lifespan)
    app.add_middleware(Middleware)
    app.include_router(routes.router)
    app.post("/v1/other")(other)
    with TestClient(app) as client:
        yield client


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/mm/modalities"), ("POST", "/v1/mm/generate")])
def test_a_model_without_a_spec(method, path):
    with serving(spec=False) as client:
        answer = client.request(method, path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == (
        "server: expected a model with an mmkit spec, got one without. Use vLLM's routes."
    )


@given(st.recursive(st.text() | st.integers() | st.none(), st.lists), st.sampled_from([1, 2, 3, 10**6]), st.booleans())
def test_values_in_json_are_counted_outside_of_texts(value, step, ascii):
    """However the body is cut."""

    def values(part):
        return 1 + sum(map(values, part)) if isinstance(part, list) else 1

    raw = json.dumps({"a": value}, ensure_ascii=ascii).encode()
    with mock.patch.object(wire, "_PIECE", step):
        assert values(value) <= listed(raw) + 1 <= 2 * values(value) + 2


STOPPING = RuntimeError("cannot schedule new futures after shutdown")
FAILED = "to serve the request, got an error of its own. Its log says which."


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("a bug of a process"), 500, FAILED),
        (SpecError("terra", "fields", "none"), 500, FAILED),
        (OSError("disk"), 500, FAILED),
        (EngineDeadError(), 503, "a living engine, got one that is dead or stopped. Send it to another server."),
        (STOPPING, 503, "to serve the request, got the order to stop. Send it to another one."),
        (Lost(), 503, "an item in its cache, got none, several times. Send it again."),
    ],
)
def test_errors_of_the_server(error, code, message):
    info = errors.info(error, None, "generate")
    assert (info.code, info.message) == (code, f"server: expected {message}")


def test_an_error_is_short_whatever_was_sent():
    info = errors.info(InputError("x" * 10**6, "y" * 10**6, "z"), None, "generate")
    assert len(msgspec.json.encode(info)) < 2048


def test_a_mistake_that_vllm_finds_is_the_callers():
    with pytest.raises(Exception, match="at least 1") as caught:
        SamplingParams(n=0)
    without_kind = ValueError("x").with_traceback(caught.value.__traceback__)
    assert [errors.info(error, None, "generate").code for error in (caught.value, without_kind)] == [400, 400]


FEW, MANY, COMMAS = ["1"] * 20_000, [1] * 20_000, r"[,\"\\" * 400_000
LONG = "expected at most 16384 bytes"
OTHERS = [
    ({"prompt": MANY}, 200, ""),
    ({"token_ids": MANY}, 200, ""),
    ({"messages": [{"content": COMMAS}]}, 200, ""),
    ({"prompt": COMMAS}, 200, ""),
    (
        {"prompt": "x", "messages": FEW},
        413,
        "body: expected at most 16384 values in JSON beside those of a prompt, got",
    ),
    ({"prompt": [*MANY, {}]}, 400, "prompt[20000]: expected int | str | array, got object."),
    ({"prompt": [*MANY, "a"]}, 400, "prompt: expected a list of ids, of texts or of lists of ids, got a mixed one."),
    ({"response_format": {"a": COMMAS}, "messages": []}, 413, f"response_format: {LONG}, got more. Send less at once"),
    ({"tools": [COMMAS], "text": COMMAS, "tool_choice": "auto"}, 200, ""),
    ({"tools": [COMMAS], "tool_choice": "required"}, 413, f"tools: {LONG}"),
    ({"text": {"format": COMMAS}}, 413, f"text: {LONG}"),
    ({"prompt": [[1] * 2**20]}, 413, "body: expected at most 1048576 values in JSON, got more."),
]


@pytest.mark.parametrize(("body", "code", "message"), OTHERS)
def test_vllms_own_routes_are_behind_the_middleware(body, code, message):
    with serving(Limits()) as client:
        answer = client.post("/v1/other", json=body)
        assert answer.status_code == code
        assert message in answer.text
        assert code == 200 or len(answer.content) < 2048
        assert client.post("/v1/other", files={"file": b"\0,[" * 10**6}).status_code == 200
        for part in (b'"type": 1e999', b'"type": "\xff", "image_url": ""', b'"image_url": {"url": 1e999}'):
            odd = client.post("/v1/other", content=b'{"messages": [{"content": [{"actions": 1, %s}]}]}' % part)
            assert (odd.status_code, odd.json()["error"]["message"][:8]) == (400, "messages")
        wide = client.post("/v1/other", content='{"∀":[]}'.encode("utf-16"))  # U+2200 has the byte of a quote
        assert (wide.status_code, wide.json()["error"]["message"][:31]) == (400, "body: expected JSON in UTF-8, g")


def test_messages_of_a_session():
    with serving() as client, client.websocket_connect("/v1/mm/session") as socket:
        assert socket.receive_json()["type"] == "ready"
        socket.send_json(START)
        socket.send_json({"type": "next", "prompt": [1]})
        assert socket.receive_json()["error"]["message"] == (
            'message: expected none before the chunk is complete, got "next". Wait for the chunk, or close the session.'
        )
        socket.send_json({"type": "close"})
        assert socket.receive_json()["reason"] == "the client closed it"


def test_a_page_of_another_origin_opens_no_session():
    own = {"host": "testserver:80", "origin": "http://testserver:80"}
    others = [({"origin": "http://good"}, True), ({"origin": "http://evil"}, False)]
    for headers, opens in [({}, True), (own, True), *others]:
        with serving() as client:
            client.app.state.mmkit.origins = frozenset({"http://good"})
            context = contextlib.nullcontext() if opens else pytest.raises(WebSocketDisconnect)
            with context, client.websocket_connect("/v1/mm/session", headers=headers):
                pass


@pytest.mark.parametrize(
    ("code", "seconds", "message"),
    [
        ("raise SystemExit(3)", 60, "expected a server within 60 s, got one that ended with 3."),
        ("import time; time.sleep(600)", 0, "expected a server within 0 s, got none."),
    ],
    ids=["ended", "late"],
)
def test_a_process_that_does_not_serve(code, seconds, message):
    server = Server("model", port=8000, start_seconds=seconds)
    server._command = [sys.executable, "-c", code]
    refused(MmkitError, f"http://127.0.0.1:8000: {message} Give it a log file to see why.", server.start)
    assert server.process.poll() is not None
