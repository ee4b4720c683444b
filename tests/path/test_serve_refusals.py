"""What the routes refuse before an engine is asked, and what they say of one that is over.

The routes, their state and the processor are the real ones; tests/engine/terra_server has the refusals of a server.
"""

import asyncio
import base64
import contextlib
import functools
import json
import sys
from types import SimpleNamespace
from unittest import mock
from urllib.parse import quote, unquote

import hypothesis.strategies as st
import msgspec
import pytest
from fastapi import FastAPI
from hypothesis import given
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect
from vllm import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from examples.server import Server
from examples.terra import CHECKPOINT
from examples.terra.spec import TERRA
from mmkit import InputError, MmkitError, SpecError, testing
from mmkit.serve import errors, routes, wire
from mmkit.serve.answers import AnswerMiddleware, handle_input_error
from mmkit.serve.bodies import ITEM_FIELDS, BodyMiddleware
from mmkit.serve.engine import Engine, LostItem
from mmkit.serve.messages import ANTHROPIC, RESPONSES, ROUTE_FORMS, Messages
from mmkit.serve.protocol import Limits
from mmkit.serve.state import ServerState
from mmkit.serve.wire import count_values
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
    """A route that says what it was sent, or what a header asks for."""
    answer = request.headers.get("answer")
    body = await request.body() if answer is None else unquote(answer)
    return Response(body, int(request.headers.get("wanted", 200)))


async def failing(request: Request):
    """A route of vLLM that mmkit refuses, or that fails while the server begins to stop."""
    where = request.headers["where"]
    if where == "stop":
        request.app.state.mmkit.stop()
        raise STOPPING
    raise InputError(where, "another value", "this one")


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
    app.add_middleware(BodyMiddleware)
    app.add_middleware(AnswerMiddleware)
    app.add_exception_handler(InputError, handle_input_error)
    app.include_router(routes.router)
    for path in ("/v1/other", "/v1/audio/transcriptions", "/health", "/metrics", *ROUTE_FORMS):
        app.api_route(path, methods=["GET", "POST"])(other)
    app.post("/v1/failing")(failing)
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
    with mock.patch.object(wire, "CHUNK_BYTES", step):
        assert values(value) <= count_values(raw) + 1 <= 2 * values(value) + 2


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
        (LostItem(), 503, "an item in its cache, got none, several times. Send it again."),
    ],
)
def test_errors_of_the_server(error, code, message):
    info = errors.make_info(error, None, "generate")
    assert (info.code, info.message) == (code, f"server: expected {message}")


def test_an_error_is_short_whatever_was_sent():
    info = errors.make_info(InputError("x" * 10**6, "y" * 10**6, "z"), None, "generate")
    assert len(msgspec.json.encode(info)) < 2048


def test_a_mistake_that_vllm_finds_is_the_callers():
    with pytest.raises(Exception, match="at least 1") as caught:
        SamplingParams(n=0)
    without_kind = ValueError("x").with_traceback(caught.value.__traceback__)
    assert [errors.make_info(error, None, "generate").code for error in (caught.value, without_kind)] == [400, 400]


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


def test_the_routes_of_a_server_behind_a_path_are_the_same():
    """vLLM's --root-path stands in the path of a request."""
    body = {"messages": [{"role": "user", "content": [{"type": "actions"}]}]}
    with serving(Limits()) as client:
        client.app.root_path, client.app.state.mmkit.engine.has_tokenizer = "/behind", True
        answer = client.post("/behind/tokenize", json=body)
        assert answer.json()["error"]["param"] == "messages[0].content[0]"


FILE = {"file": b"\0,[" * 10**6}


def test_files_are_read_by_the_routes_of_files_alone():
    with serving(Limits()) as client:
        assert client.post("/v1/audio/transcriptions", files=FILE).status_code == 200
        assert client.post("/v1/other", files=FILE).status_code == 413
        assert client.post("/v1/other", files={"file": b"a"}).json()["error"]["message"].startswith(NO_OBJECT)
        named = {"content-type": "multipart/form-data; boundary=x"}
        assert client.post("/v1/other", content=b'\xef\xbb\xbf{"a": 1}', headers=named).status_code == 400


NO_OBJECT = 'body: expected a JSON object in UTF-8, which begins with "{", got '
MALFORMED = [
    (b'\xef\xbb\xbf{"a": 1}', rf"""{NO_OBJECT}'\xef\xbb\xbf{{"a":'."""),
    ('{"∀":[]}'.encode("utf-16"), NO_OBJECT),  # U+2200 has the byte of a quote
    ('{"a":[]}'.encode("utf-16-le"), "body: expected JSON, got invalid JSON at byte 1: object keys must be strings."),
    (b"\xc2\xa0{}", NO_OBJECT),
    (b"[]", f"{NO_OBJECT}'[]'."),
    (b'"{}"', NO_OBJECT),
    (b"{}{}", "body: expected JSON, got invalid JSON at byte 3: trailing characters."),
    (b"{}\0", "body: expected JSON, got invalid JSON at byte 3: trailing characters."),
    (b'{"a": "\xff"}', "body: expected JSON, got invalid JSON: 'utf-8' codec"),
    (b'{"a": "\\ud800"}', "body: expected JSON, got invalid JSON: "),
    (b'{"a": [1, {"b": NaN}]}', "a[1].b: expected a number, got NaN, which JSON does not have. Send finite numbers; a"),
    (b'{"a": 1e999}', "body: expected a valid value, got number out of range."),
    (b'{"a": %s}' % (b"1" * 5000), "body: expected a valid value, got integer value out of range."),
    *[
        (b'{"%s": 1}' % name.encode(), f"{name}: expected no items at /v1/other, got some. Send items to")
        for name in ITEM_FIELDS
    ],
    (b'{"\\u0069tems": 1}', "items: expected no items at /v1/other"),
    (
        b'{"sampling_params": {"structured_outputs": {"regex": "%s"}}}' % (b"a" * 2**14),
        f"sampling_params.structured_outputs: {LONG}",
    ),
    (b'{"output_config": {"format": "%s"}}' % (b"a" * 2**14), f"output_config: {LONG}"),
    (b'{"tools": [{"function": {"strict": true, "a": "%s"}}]}' % (b"a" * 2**14), f"tools: {LONG}"),
]


@pytest.mark.parametrize(("body", "message"), MALFORMED)
def test_bodies_that_no_route_of_vllm_gets(body, message):
    with serving(Limits()) as client:
        for path in ("/v1/other", "/v1/completions"):
            answer = client.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == (413 if LONG in message else 400)
            assert answer.json()["error"]["message"].startswith(message.replace("/v1/other", path))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
SPACES = st.text(" \t\n\r", max_size=3)


@pytest.fixture(scope="module")
def echo():
    with serving(Limits()) as client:
        yield client


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=4), SPACES, SPACES, st.booleans(), st.booleans())
def test_vllm_gets_what_was_read(echo, value, before, after, twice, ascii):
    """Written again: the bytes are those of the only parser, whatever was sent."""
    text = json.dumps(value, ensure_ascii=ascii)
    if twice:  # equal keys: the last one holds, and is the only one that vLLM sees
        text = text[:-1] + (", " if value else "") + '"\\u0061": [1.50, 0.1e1], "a": 2}'
        value = {**value, "a": 2}
    sent = before + text + after
    answer = echo.post("/v1/other", content=sent.encode(errors="surrogatepass"))
    if any("\ud800" <= sign <= "\udfff" for sign in json.dumps(value, ensure_ascii=False)):
        assert answer.status_code == 400
        return
    assert answer.status_code == 200, answer.text
    assert answer.content == msgspec.json.encode(value)
    assert json.loads(answer.content) == value


ACTION = [[0.5] * 3] * 6
KINDS = ("text", "item", "url", "picture", "null")


@st.composite
def conversations(draw):
    """A route, the kinds of the parts of a few messages, and the number of a part that is malformed, if any."""
    path = draw(st.sampled_from(sorted(ROUTE_FORMS)))
    messages = draw(st.lists(st.lists(st.sampled_from(KINDS), max_size=4), min_size=1, max_size=3))
    items = sum(kind in ("item", "url") for message in messages for kind in message)
    return path, messages, draw(st.none() | st.integers(0, items - 1)) if items else None


def part_of(path, kind, action):
    if kind == "text":
        return {"type": "text", "text": "a"}
    if kind == "null":
        return {"type": "actions", "actions": None, "uuid": "u"}
    if kind == "item":
        return {"type": "actions", "actions": action, "uuid": 3}
    url = "data:image/png;base64,AAAA"
    if kind == "url":
        url = f"{wire.ITEM_URL}actions;base64,{base64.b64encode(json.dumps(action).encode()).decode()}"
    return ROUTE_FORMS[path].picture(url)


@given(conversations(), st.booleans())
def test_items_are_taken_out_of_messages_at_every_route(drawn, batch):
    """And errors name the part that they are about."""
    path, kinds, malformed = drawn
    form, messages, places, bad, number = ROUTE_FORMS[path], [], [], None, 0
    batch = batch and path == "/v1/chat/completions/batch"
    root = f"{form.field}[0]" if batch else form.field
    for index, of_message in enumerate(kinds):
        parts = []
        for at, kind in enumerate(of_message):
            where = f"{root}[{index}].content[{at}]"
            action = ACTION
            if kind in ("item", "url"):
                if number == malformed:
                    action, bad = [["x"]], f"{where}.actions[0][0]" if kind == "item" else f"{where}[0][0]"
                number += 1
            if kind not in ("text", "picture"):
                places.append(where if kind == "url" else f"{where}.actions")
            parts.append(part_of(path, kind, action))
        messages.append({"role": "user", "content": parts})
    body = {form.field: [messages] if batch else messages}
    reader = Messages(shared_state(), form)
    if malformed is not None:
        with pytest.raises(InputError) as caught:
            reader.take_items(body)
        assert caught.value.where == bad
        return
    reader.take_items(body)
    assert [part.where for part in reader.parts] == places
    assert list(reader.places[0].get("actions", ())) == places
    references = [part for message in messages for part in message["content"]]
    expected = iter(reader.parts)
    for kind, reference in zip([kind for of_message in kinds for kind in of_message], references, strict=True):
        if kind in ("text", "picture"):
            assert reference == part_of(path, kind, None)
        else:
            part = next(expected)
            assert reference == form.picture(part.url)
            assert part.uuid == {"item": "3", "null": "u", "url": None}[kind]


@functools.cache
def shared_state():
    instance = engine()
    instance.has_tokenizer, instance.most_items = True, {}

    async def make():  # in a loop, as a server does
        return ServerState(instance, Limits(), ["terra"])

    return asyncio.run(make())


def test_what_vllm_reads_in_another_order_has_no_place():
    """Items in the results of tools; and those of a response that goes on where another one ended."""
    item = {"type": "actions", "actions": ACTION}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [item]}
    output = {"type": "function_call_output", "call_id": "1", "output": [item]}
    for form, body in [
        (ANTHROPIC, {"messages": [{"role": "user", "content": [result]}]}),
        (RESPONSES, {"input": [output]}),
        (RESPONSES, {"input": [{"role": "user", "content": [item]}], "previous_response_id": "1"}),
    ]:
        reader = Messages(shared_state(), form)
        reader.take_items(body)
        assert (len(reader.parts), reader.places) == (1, [])


ODD = st.sampled_from([None, 3, [], {}, "text", "actions", "image_url", "image", {"url": 3}, {"url": "data:"}])
NESTED = st.sampled_from(["content", "output"])
ODD_PARTS = st.dictionaries(
    st.sampled_from(["type", "role", "content", "output", "image_url", "source", "uuid", "text", "x"]),
    st.recursive(ODD, lambda inner: st.lists(st.dictionaries(NESTED, inner), max_size=2)),
)


@given(
    st.sampled_from(sorted(ROUTE_FORMS)), st.lists(ODD_PARTS | ODD | st.lists(ODD_PARTS | ODD, max_size=3), max_size=3)
)
def test_messages_that_are_none_are_left_to_vllm_or_refused(path, messages):
    """In one sentence, by mmkit or by vLLM, which gets them as they came."""
    form = ROUTE_FORMS[path]
    body = {form.field: messages}
    before = json.dumps(body)
    reader = Messages(shared_state(), form)
    where = form.field
    try:
        reader.take_items(body)
        assert (json.dumps(body), reader.parts) == (before, [])
    except InputError as error:
        where = error.where
    assert where.startswith(form.field)


@pytest.mark.parametrize("deep", [200, 450, 900, 2000])
def test_parts_in_parts(deep):
    with serving(Limits()) as client:
        client.app.state.mmkit.engine.has_tokenizer = True
        content = b'{"type": "tool_result", "content": [' * deep + b"]}" * deep
        body = b'{"messages": [{"role": "user", "content": [%s]}]}' % content
        answer = client.post("/v1/messages", content=body)
    assert answer.status_code == 200 or "nested at most some hundred deep" in answer.text


def test_a_picture_of_anthropic_is_vllms_own_part():
    """Also of a model that has a modality of this name."""
    state = shared_state()
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    with mock.patch.object(state, "message_modalities", ["image"]):
        body = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
        reader = Messages(state, ANTHROPIC)
        reader.take_items(body)
        assert reader.parts == []
        assert body["messages"][0]["content"][0]["source"] is source


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


def denied(client, headers):
    """What the handshake of a session answers that is not let in."""
    with pytest.raises(WebSocketDenialResponse) as refusal, client.websocket_connect("/v1/mm/session", headers=headers):
        pass
    return refusal.value.status_code, refusal.value.json()["error"]["message"]


def test_a_page_of_another_origin_opens_no_session():
    own = {"host": "testserver:80", "origin": "http://testserver:80"}
    for headers in ({}, own, {"origin": "http://good"}):
        with serving() as client:
            client.app.state.mmkit.origins = frozenset({"http://good"})
            with client.websocket_connect("/v1/mm/session", headers=headers):
                pass
    with serving() as client:
        client.app.state.mmkit.origins = frozenset({"http://good"})
        sentence = "server: expected a page of its own address or of --allowed-origins, got another origin."
        assert denied(client, {"origin": "http://evil"}) == (403, sentence)
    with serving(spec=False) as client:
        assert denied(client, {})[0] == 404


def count(route, reason, modality=""):
    return errors.REFUSED.labels(route, modality, reason)._value.get()


THEIRS = [
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
]
OURS = [
    ("terra.actions[0]", "item", "actions"),
    ("items.actions[0].data", "item", "actions"),
    ("messages[0].content[1]", "item", ""),
    ("terra.multi_modal_data", "item", ""),
    ("terra.prompt[3]", "prompt", ""),
    ("sampling_params.top_k", "sampling", ""),
    ("body", "schema", ""),
]


def test_refusals_by_vllm_are_counted_once():
    """Whether it answers an error of mmkit or one of its own."""
    with serving(Limits()) as client:
        for body, status, reason, modality in THEIRS:
            before = count("vllm", reason, modality)
            asked = {"wanted": str(status), "answer": quote(json.dumps(body))}
            answer = client.post("/v1/other", headers=asked)
            assert (answer.status_code, count("vllm", reason, modality)) == (status, before + 1)
            assert answer.headers.get("retry-after") == ("1" if status in (429, 503) else None)
            client.get("/v1/other", headers={"wanted": str(status)})  # a probe
            assert count("vllm", reason, modality) == before + 1
        for where, reason, modality in OURS:
            before = count("vllm", reason, modality)
            answer = client.post("/v1/failing", headers={"where": where})
            assert (answer.status_code, count("vllm", reason, modality)) == (400, before + 1)
        before = count("vllm", "sampling")
        event = 'data: {"error": {"message": "no", "param": "temperature"}}\n\n'
        assert client.post("/v1/other", headers={"answer": quote(event)}).status_code == 200
        assert count("vllm", "sampling") == before + 1


STOPS = "server: expected to serve the request, got the order to stop. Send it to another one."


def test_a_server_that_stops_takes_no_more_requests():
    """Also one that broke because of it."""
    with serving(Limits()) as client:
        before = count("vllm", "stop"), count("generate", "stop")
        asked = [("POST", "/v1/failing"), ("GET", "/health"), ("GET", "/v1/none"), ("POST", "/v1/mm/generate")]
        for method, path in asked:
            answer = client.request(method, path, headers={"where": "stop"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["message"] == STOPS
        assert (count("vllm", "stop"), count("generate", "stop")) == (before[0] + 3, before[1] + 1)
        assert client.get("/metrics").status_code == 200
        assert client.post("/metrics", headers={"wanted": "500"}).status_code == 503
        assert denied(client, {}) == (503, STOPS)


def rest(socket):
    """The types of the messages of a session until it ends, and its close code."""
    types = []
    try:
        while True:
            types.append(socket.receive_json()["type"])
    except WebSocketDisconnect as end:
        return types, end.code


def test_a_session_ends_when_the_server_stops():
    """A chunk that is under way comes first, or the error that it ends in."""
    with serving(Limits()) as client:
        state = client.app.state.mmkit
        with client.websocket_connect("/v1/mm/session") as waiting:
            assert waiting.receive_json()["type"] == "ready"
            state.stop()
            assert rest(waiting) == (["closed"], 1012)
    for error in (STOPPING, EngineDeadError()):
        with serving(Limits()) as client, client.websocket_connect("/v1/mm/session") as busy:
            client.app.state.mmkit.engine.render = mock.AsyncMock(side_effect=error)
            assert busy.receive_json()["type"] == "ready"
            busy.send_json(START)
            assert rest(busy) == (["error", "closed"], 1012)


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
