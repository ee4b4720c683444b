"""What the routes refuse before an engine is asked, and what they say of one that is over.

The routes, the door and the processor are the real ones; tests/engine/terra_server has the refusals of a server.
"""

import asyncio
import contextlib
import functools
import sys
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.testclient import TestClient

from examples.terra import CHECKPOINT
from examples.terra.spec import TERRA
from mmkit import MmkitError, testing
from mmkit.serve import errors, routes
from mmkit.serve.door import Door
from mmkit.serve.engine import Engine, EngineDeadError, Lost
from mmkit.serve.limits import Limits
from mmkit.serve.process import Server

START = {"type": "start", "prompt": [1], "max_tokens": 1}


@functools.cache
def processor():
    return testing.of_spec(TERRA, CHECKPOINT).processor


def engine():
    """The server's side of an engine that is never reached."""
    config = processor().info.ctx.model_config
    renderer = SimpleNamespace(tokenizer=None, mm_processor_cache=None)
    client = SimpleNamespace(renderer=renderer, model_config=config, errored=False)
    found = Engine(client, processor(), trust_kwargs=False)
    found.render = endless
    return found


async def endless(prompt, *, special):
    await asyncio.Event().wait()


@contextlib.contextmanager
def serving(*, spec=True):
    """A client of the routes."""

    @contextlib.asynccontextmanager
    async def lifespan(app):
        door = Door(engine(), Limits(body_bytes=200, sessions=1), ["terra"])
        if spec:
            app.state.mmkit_door = door
        yield
        door._watch.cancel()

    app = FastAPI(lifespan=lifespan)
    app.include_router(routes.router)
    with TestClient(app) as client:
        yield client


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/mm/modalities"), ("POST", "/v1/mm/generate")])
def test_a_model_without_a_spec(method, path):
    with serving(spec=False) as client:
        answer = client.request(method, path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == (
        "server: expected a model with an mmkit spec, got one without. Use vLLM's own routes."
    )


BODIES = {
    "sampling: expected parameters that vLLM takes, got min_tokens must be less than or equal to max_tokens=1, "
    "got 5.": {"min_tokens": 5, "max_tokens": 1},
    "n: expected a valid integer, got a str like '111111111111111111111111111111111111111....": {"n": "1" * 100},
    "items.actions[0].safetensors: expected a safetensors file, got SafetensorError: Error while deserializing: "
    "header too small.": {"items": {"actions": [{"safetensors": "AAAA"}]}},
    "items.actions[0]: expected a URL with an item of kind image, got ValueError: Failed to load image: cannot "
    "identify image file.": {"items": {"actions": [{"image_url": {"url": "data:image/png;base64,AAAA"}}]}},
}


@pytest.mark.parametrize("message", BODIES)
def test_bodies(message):
    with serving() as client:
        answer = client.post("/v1/mm/generate", json={"prompt": [1], **BODIES[message]})
    assert answer.status_code == 400
    error = {"message": message, "type": "BadRequestError", "param": message.split(":")[0], "code": 400}
    assert answer.json() == {"error": error}


def test_a_body_that_takes_too_long():
    async def silent():
        await asyncio.Event().wait()

    request = Request({"type": "http", "method": "POST"}, silent)
    with pytest.raises(errors.Slow) as caught:
        asyncio.run(routes._read(request, Limits(idle_seconds=0.01)))
    assert str(caught.value) == "body: expected more of it within 0.01 s, got nothing."
    assert errors.info(caught.value, None, "generate").code == 408


STOPPING = RuntimeError("cannot schedule new futures after shutdown")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError("disk"), 500, "expected to serve the request, got an error of its own. Its log says which."),
        (EngineDeadError(), 503, "expected a living engine, got a dead one. Start the server anew."),
        (STOPPING, 503, "expected to serve the request, got the order to stop. Send it to another one."),
        (Lost(), 503, "expected an item in its cache, got none, several times. Send the request again."),
    ],
)
def test_errors_of_the_server(error, code, message):
    found = errors.info(error, None, "generate")
    assert (found.code, found.message) == (code, f"server: {message}")


def test_messages_of_a_session():
    with serving() as client, client.websocket_connect("/v1/mm/session") as socket:
        assert socket.receive_json()["type"] == "ready"
        socket.send_text("x" * 201)
        assert socket.receive_json()["error"]["message"] == (
            "message: expected at most 200 characters, got 201. Send less at once, or raise MMKIT_SERVE_BODY_BYTES on "
            "the server."
        )
        socket.send_json({"type": "start", "max_tokens": 1})
        assert socket.receive_json()["error"]["message"] == (
            "prompt: expected at least one token in the first message, got none."
        )
        socket.send_json(START)
        socket.send_json({"type": "next", "prompt": [1]})
        assert socket.receive_json()["error"]["message"] == (
            'message: expected none before the chunk is complete, got "next". Wait for the chunk, or close the session.'
        )
        socket.send_json({"type": "close"})
        assert socket.receive_json()["reason"] == "the client closed it"


def test_seconds_from_the_environment():
    with pytest.raises(MmkitError) as caught:
        Limits.of({"MMKIT_SERVE_IDLE_SECONDS": "soon"})
    assert str(caught.value) == "MMKIT_SERVE_IDLE_SECONDS: expected a number of at least 1, got 'soon'."


@pytest.mark.parametrize(
    ("code", "seconds", "message"),
    [
        ("raise SystemExit(3)", 60, "expected a server, got one that ended with 3."),
        ("import time; time.sleep(600)", 0, "expected a server within 0 s, got none."),
    ],
    ids=["ended", "late"],
)
def test_a_process_that_does_not_serve(code, seconds, message):
    server = Server("model", port=8000, start_seconds=seconds)
    server._command = [sys.executable, "-c", code]
    with pytest.raises(MmkitError) as caught:
        server.start()
    assert str(caught.value) == f"http://127.0.0.1:8000: {message} Give it a log file to see why."
    assert server.process.poll() is not None
