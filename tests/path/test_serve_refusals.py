"""What the routes refuse before an engine is asked, and what they say of one that is over.

The routes, their state and the processor are the real ones; tests/engine/terra_server has the refusals of a server.
"""

import json
import sys
from unittest import mock
from urllib.parse import quote

import msgspec
import pytest
from starlette.testclient import WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect
from vllm import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from examples.server import Server
from mmkit import InputError, MmkitError, SpecError
from mmkit.serve.engine import LostItem
from mmkit.serve.errors import REFUSED, make_info
from mmkit.serve.limits import ServerLimits
from tests.path.serve_app import SHUTDOWN_ERROR, get_state, serve
from tests.unit.common import expect_refusal

pytestmark = pytest.mark.timeout(120)

START = {"type": "start", "prompt": [1], "sampling_params": {"max_tokens": 1}}
STOPS = "server: expected to serve the request, got the order to stop. Send it to another one."


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/mm/modalities"), ("POST", "/v1/mm/generate")])
def test_a_model_without_a_spec_has_no_routes(method, path):
    with serve(has_spec=False) as client:
        answer = client.request(method, path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == (
        "server: expected a model with an mmkit spec, got one without. Use vLLM's routes."
    )


@pytest.mark.parametrize("error", [ValueError("a bug of a process"), SpecError("terra", "fields", "none"), OSError()])
def test_an_error_of_the_server_is_in_its_log_only(error):
    info = make_info(error, None, "generate")
    assert info.code == 500
    assert info.message == "server: expected to serve the request, got an error of its own. Its log says which."


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (EngineDeadError(), "a living engine, got one that is dead or stopped. Send it to another server."),
        (SHUTDOWN_ERROR, "to serve the request, got the order to stop. Send it to another one."),
        (LostItem(), "an item in its cache, got none, several times. Send it again."),
    ],
)
def test_a_request_that_may_be_sent_again_is_refused_with_503(error, message):
    info = make_info(error, None, "generate")
    assert info.code == 503
    assert info.message == f"server: expected {message}"


def test_an_error_is_short_whatever_was_sent():
    info = make_info(InputError("x" * 10**6, "y" * 10**6, "z"), None, "generate")
    assert len(msgspec.json.encode(info)) < 2048


def catch_error_of_vllm():
    with pytest.raises(Exception, match="at least 1") as caught:
        SamplingParams(n=0)
    return caught.value


def test_a_mistake_that_vllm_finds_is_the_callers():
    assert make_info(catch_error_of_vllm(), None, "generate").code == 400


def test_a_value_error_that_vllm_raises_is_the_callers():
    error = ValueError("x").with_traceback(catch_error_of_vllm().__traceback__)
    assert make_info(error, None, "generate").code == 400


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_a_message_before_the_chunk_is_complete_is_refused():
    with serve() as client, client.websocket_connect("/v1/mm/session") as socket:
        assert socket.receive_json()["type"] == "ready"
        socket.send_json(START)
        socket.send_json({"type": "next", "prompt": [1]})
        assert socket.receive_json()["error"]["message"] == (
            'message: expected none before the chunk is complete, got "next". Wait for the chunk, or close the session.'
        )
        socket.send_json({"type": "close"})
        assert socket.receive_json()["reason"] == "the client closed it"


def deny(client, headers):
    """Return the status and the sentence of a session that is not let in."""
    with pytest.raises(WebSocketDenialResponse) as caught:
        with client.websocket_connect("/v1/mm/session", headers=headers):
            pass
    return caught.value.status_code, caught.value.json()["error"]["message"]


def set_origins(client, *origins):
    get_state(client).origins = frozenset(origins)


@pytest.mark.parametrize(
    "headers",
    [{}, {"host": "testserver:80", "origin": "http://testserver:80"}, {"origin": "http://good"}],
    ids=["no page", "a page of the server", "a page of an allowed origin"],
)
def test_an_allowed_origin_opens_a_session(headers):
    with serve() as client:
        set_origins(client, "http://good")
        with client.websocket_connect("/v1/mm/session", headers=headers):
            pass


def test_a_page_of_another_origin_opens_no_session():
    with serve() as client:
        set_origins(client, "http://good")
        status, sentence = deny(client, {"origin": "http://evil"})
    assert status == 403
    assert sentence == "server: expected a page of its own address or of --allowed-origins, got another origin."


def test_a_server_of_the_encoder_opens_no_session():
    with serve() as client:
        get_state(client).engine.is_encode_only = True
        with client.websocket_connect("/v1/mm/session") as socket:
            refusal = socket.receive_json()
            assert receive_rest(socket) == (["closed"], 1011)
    assert refusal["fatal"]
    assert refusal["error"]["message"] == (
        "session: expected a server that runs the language model, got one that only encodes items. "
        "Open it at the server that generates."
    )


def test_a_model_without_a_spec_opens_no_session():
    with serve(has_spec=False) as client:
        status, _ = deny(client, {})
    assert status == 404


# -- metrics -----------------------------------------------------------------------------------------------------------


def count(route, reason, modality=""):
    """Return the number of refusals in the metrics."""
    return REFUSED.labels(route, modality, reason)._value.get()


@pytest.fixture(scope="module")
def client():
    with serve(ServerLimits()) as client:
        yield client


def ask_for(client, status, body, method="POST"):
    """Return an answer with a status and a body."""
    return client.request(method, "/v1/other", headers={"wanted": str(status), "answer": quote(body)})


@pytest.mark.parametrize(
    ("body", "status", "reason", "modality"),
    [
        ({"error": {"message": "no", "param": "temperature"}}, 400, "sampling", ""),
        ({"error": {"message": "no", "param": "body.messages.0.content"}}, 400, "schema", ""),
        (
            {"type": "error", "error": {"message": "terra.actions[0]: expected a tensor, got another."}},
            400,
            "item",
            "actions",
        ),
        ({"error": {"message": "no"}}, 400, "schema", ""),
        ({"error": {"message": "no", "param": "model"}}, 404, "schema", ""),
        ({"error": {"message": "no", "param": 3}}, 413, "limit", ""),
        ([], 429, "capacity", ""),
        ({"error": "the queue is full"}, 503, "capacity", ""),
        ({"error": {"message": "no", "param": None}}, 500, "engine", ""),
    ],
)
def test_a_refusal_by_vllm_is_counted_once(client, body, status, reason, modality):
    before = count("vllm", reason, modality)
    answer = ask_for(client, status, json.dumps(body))
    assert answer.status_code == status
    assert count("vllm", reason, modality) == before + 1


def test_a_refusal_of_a_probe_is_not_counted(client):
    before = count("vllm", "schema")
    ask_for(client, 404, "{}", method="GET")
    assert count("vllm", "schema") == before


@pytest.mark.parametrize(("status", "seconds"), [(429, "1"), (503, "1"), (400, None), (500, None)])
def test_a_refusal_that_may_be_tried_again_says_when(client, status, seconds):
    assert ask_for(client, status, "{}").headers.get("retry-after") == seconds


@pytest.mark.parametrize(
    ("where", "reason", "modality"),
    [
        ("terra.actions[0]", "item", "actions"),
        ("items.actions[0].data", "item", "actions"),
        ("messages[0].content[1]", "item", ""),
        ("messages[0].content[1].actions", "item", "actions"),
        ("messages[0].content[1].content[0].actions[2].data", "item", "actions"),
        ("messages[0].content[1].unknown", "item", ""),
        ("input[0].content[1].actions", "item", "actions"),
        ("terra.multi_modal_data", "item", ""),
        ("terra.prompt[3]", "prompt", ""),
        ("sampling_params.top_k", "sampling", ""),
        ("body", "schema", ""),
    ],
)
def test_a_refusal_by_mmkit_at_a_route_of_vllm_is_counted_once(client, where, reason, modality):
    before = count("vllm", reason, modality)
    answer = client.post("/v1/failing", headers={"where": where})
    assert answer.status_code == 400
    assert count("vllm", reason, modality) == before + 1


def test_an_error_within_a_stream_is_counted(client):
    before = count("vllm", "sampling")
    answer = ask_for(client, 200, 'data: {"error": {"message": "no", "param": "temperature"}}\n\n')
    assert answer.status_code == 200
    assert count("vllm", "sampling") == before + 1


def test_a_fault_within_a_stream_is_counted_as_one_of_the_engine(client):
    before = count("vllm", "engine")
    error = '{"error": {"message": "no", "type": "InternalServerError", "param": null, "code": 500}}'
    assert ask_for(client, 200, f"data: {error}\n\n").status_code == 200
    assert count("vllm", "engine") == before + 1


# -- a server that stops -----------------------------------------------------------------------------------------------


def test_a_request_that_broke_because_the_server_stops_is_told_so():
    with serve(ServerLimits()) as client:
        before = count("vllm", "stop")
        answer = client.post("/v1/failing", headers={"where": "stop"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["message"] == STOPS
        assert count("vllm", "stop") == before + 1


@pytest.mark.parametrize(
    ("method", "path", "route"),
    [("GET", "/health", "vllm"), ("GET", "/v1/none", "vllm"), ("POST", "/v1/mm/generate", "generate")],
)
def test_a_server_that_stops_takes_no_more_requests(method, path, route):
    with serve(ServerLimits()) as client:
        get_state(client).stop()
        before = count(route, "stop")
        answer = client.request(method, path)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["message"] == STOPS
        assert count(route, "stop") - before == 1


def test_a_server_that_stops_tells_its_metrics_to_the_end():
    with serve(ServerLimits()) as client:
        get_state(client).stop()
        assert client.get("/metrics").status_code == 200
        assert client.post("/metrics", headers={"wanted": "500"}).status_code == 503


def test_a_server_that_stops_opens_no_session():
    with serve(ServerLimits()) as client:
        get_state(client).stop()
        assert deny(client, {}) == (503, STOPS)


def receive_rest(socket):
    """Return the types of the messages of a session until it ends, and its close code."""
    types = []
    try:
        while True:
            types.append(socket.receive_json()["type"])
    except WebSocketDisconnect as end:
        return types, end.code


def test_a_session_that_waits_ends_when_the_server_stops():
    with serve(ServerLimits()) as client, client.websocket_connect("/v1/mm/session") as socket:
        assert socket.receive_json()["type"] == "ready"
        get_state(client).stop()
        assert receive_rest(socket) == (["closed"], 1012)


@pytest.mark.parametrize("error", [SHUTDOWN_ERROR, EngineDeadError()])
def test_a_session_whose_chunk_fails_because_the_server_stops_ends(error):
    with serve(ServerLimits()) as client, client.websocket_connect("/v1/mm/session") as socket:
        get_state(client).engine.render = mock.AsyncMock(side_effect=error)
        assert socket.receive_json()["type"] == "ready"
        socket.send_json(START)
        assert receive_rest(socket) == (["error", "closed"], 1012)


# -- a server that does not begin --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "seconds", "message"),
    [
        ("raise SystemExit(3)", 60, "expected a server within 60 s, got one that ended with 3."),
        ("import time; time.sleep(600)", 0, "expected a server within 0 s, got none."),
    ],
    ids=["ended", "late"],
)
def test_a_process_that_does_not_serve_is_an_error(code, seconds, message):
    server = Server("model", port=8000, start_seconds=seconds)
    server._command = [sys.executable, "-c", code]
    expect_refusal(MmkitError, f"http://127.0.0.1:8000: {message} Give it a log file to see why.", server.start)
    assert server.process.poll() is not None
