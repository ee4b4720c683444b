"""The route of robots in vLLM's own application, with its check of keys, in front of an engine that answers at once."""

import asyncio
import contextlib
import functools
from collections.abc import Iterator
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect

from examples.terra import CHECKPOINT
from examples.terra.spec import TERRA
from mmkit import InputError, Output, Policy, SpecError, any_id, testing
from mmkit.serve.limits import ServerLimits
from mmkit.serve.openpi import OPENPI_ROUTE, OpenpiMiddleware, check_policy
from mmkit.serve.plugin import put_first
from mmkit.serve.state import ServerState
from mmkit.vllm_api.compat import find
from tests.unit.common import expect_refusal

from .serve_app import make_engine

KEY = {"Authorization": "Api-Key secret"}
PLAN_KEY = "robot/plan"
PLAN = np.arange(18, dtype=np.float32).reshape(6, 3)
IDS = [3, 4, 5, 6]


def decode_moves(ids: Any, scope: Any) -> Any:
    """Return two steps of two values."""
    return ids.reshape(2, 2) / 4


WITH_POLICY = TERRA.model_copy(
    update={
        "outputs": [Output("moves", any_id(0, 16) * 4, decode_moves)],
        "policy": Policy("moves", {"actions": PLAN_KEY}, "drive", metadata={"town": "Terra"}),
    }
)


def pack(observation: Any) -> bytes:
    """Return an observation as openpi's packer writes it."""
    return msgspec.msgpack.encode(observation, enc_hook=pack_array)


def pack_array(array: Any) -> dict[bytes, Any]:
    return {
        b"__ndarray__": True,
        b"data": array.tobytes(),
        b"dtype": array.dtype.str,
        b"shape": array.shape,
    }


def unpack(message: bytes) -> Any:
    """Return a message of the server, with arrays as openpi's client makes them."""

    def build(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if b"__ndarray__" in value:
            return np.ndarray(value[b"shape"], value[b"dtype"], value[b"data"])
        return {name: build(inner) for name, inner in value.items()}

    return build(msgspec.msgpack.decode(message))


class InstantEngine:
    """What vLLM's side of an engine is to the routes: it answers each request by the same ids.

    Attributes:
        requests: what was rendered.
        aborted: the ids of requests that were given up.
        waits: whether requests get no answer.
        refusal: raised in place of a rendered request.
    """

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.aborted: list[str] = []
        self.waits = False
        self.refusal: Exception | None = None

    async def render(self, prompt: Any) -> Any:
        self.requests.append(prompt)
        if self.refusal is not None:
            raise self.refusal
        return {"prompt_token_ids": [1, 2]}

    async def generate(self, rendered: Any, sampling: Any, request_id: str, data_parallel_rank: Any) -> Any:
        try:
            if self.waits:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            raise
        part = SimpleNamespace(index=0, token_ids=IDS, text="", finish_reason="length", stop_reason=None, logprobs=None)
        yield SimpleNamespace(outputs=[part], prompt_token_ids=[1], finished=True, num_cached_tokens=0)


@functools.cache
def build_app_with_key() -> FastAPI:
    """Return vLLM's own application with a key and mmkit's routes, before it knows an engine."""
    parser_class = find("utils.argparse_utils:FlexibleArgumentParser", "utils:FlexibleArgumentParser")
    add_arguments = find(
        "entrypoints.common.cli_args:make_arg_parser",
        "entrypoints.launchers.cli_args:make_arg_parser",
        "entrypoints.openai.cli_args:make_arg_parser",
    )
    build_app = find("entrypoints.launchers.app:build_app", "entrypoints.openai.api_server:build_app")
    arguments = add_arguments(parser_class()).parse_args(["--api-key", "secret"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "mmkit")
        app: FastAPI = build_app(arguments, ("generate",))
    put_first(app, OpenpiMiddleware)
    return app


@pytest.fixture(scope="module")
def processor() -> Any:
    return testing.of_spec(WITH_POLICY, CHECKPOINT).processor


@pytest.fixture
def vllm_engine() -> InstantEngine:
    return InstantEngine()


@contextlib.contextmanager
def serve(processor: Any, vllm_engine: InstantEngine, limits: ServerLimits = ServerLimits()) -> Iterator[TestClient]:  # noqa: B008
    """Serve vLLM's application with an engine of a model, and give a client of it."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> Any:
        engine: Any = make_engine(processor)
        engine.render = vllm_engine.render
        engine._client.generate = vllm_engine.generate
        app.state.mmkit = ServerState(engine, limits, ["terra"])
        yield

    app = build_app_with_key()
    app.router.lifespan_context = lifespan
    with TestClient(app) as client:
        yield client


@contextlib.contextmanager
def connect(client: TestClient, path: str = "/", **headers: str) -> Iterator[Any]:
    """Connect as a robot does. At the end Starlette's client cancels the server's side, which may tell it so."""
    with contextlib.suppress(CancelledError), client.websocket_connect(path, headers=headers or KEY) as socket:
        yield socket


def ask(socket: Any, **values: Any) -> Any:
    """Send an observation, and return the answer: a map, or the sentence of a refusal."""
    socket.send_bytes(pack({PLAN_KEY: PLAN} | values))
    return receive(socket)


def receive(socket: Any) -> Any:
    event = socket.receive()
    if event["type"] == "websocket.close":
        raise WebSocketDisconnect(event["code"], event.get("reason", ""))
    if event.get("text") is not None:
        return event["text"]
    return unpack(event["bytes"])


# -- the door ----------------------------------------------------------------------------------------------------------

DOORS = ["/", OPENPI_ROUTE, f"{OPENPI_ROUTE}/"]
HEADERS = [KEY, {"Authorization": "Bearer secret"}, {"Authorization": "api-key secret"}]


@pytest.mark.parametrize("path", DOORS)
def test_a_robot_with_the_key_is_served_at_either_address(
    path: str, processor: Any, vllm_engine: InstantEngine
) -> None:
    with serve(processor, vllm_engine) as client:
        for headers in HEADERS:
            with connect(client, path, **headers) as socket:
                assert receive(socket)["model"] == "terra"


WRONG_HEADERS = [{}, {"Authorization": "Api-Key wrong"}, {"Authorization": "Basic secret"}, {"Authorization": "secret"}]


@pytest.mark.parametrize("path", [*DOORS, "//", "/v1/mm/session"])
def test_no_address_is_open_without_the_key(path: str, processor: Any, vllm_engine: InstantEngine) -> None:
    with serve(processor, vllm_engine) as client:
        for headers in WRONG_HEADERS:
            with pytest.raises(WebSocketDenialResponse) as caught:
                with client.websocket_connect(path, headers=headers):
                    pass
            assert caught.value.status_code == 401


def test_the_key_of_robots_opens_no_other_route(processor: Any, vllm_engine: InstantEngine) -> None:
    with serve(processor, vllm_engine) as client:
        assert client.get("/v1/mm/modalities", headers=KEY).status_code == 401
        with pytest.raises(WebSocketDenialResponse):
            client.websocket_connect("/v1/mm/session", headers=KEY).__enter__()


def test_a_page_of_another_origin_is_refused(processor: Any, vllm_engine: InstantEngine) -> None:
    with serve(processor, vllm_engine) as client:
        client.app.state.mmkit.origins = frozenset(["http://here"])  # type: ignore[attr-defined]
        with connect(client, **KEY, Origin="http://here") as socket:
            receive(socket)
        with pytest.raises(WebSocketDenialResponse) as caught, connect(client, **KEY, Origin="http://there"):
            pass
        assert caught.value.status_code == 403


def test_a_model_without_a_policy_has_no_robots(vllm_engine: InstantEngine) -> None:
    without = testing.of_spec(TERRA, CHECKPOINT).processor
    with serve(without, vllm_engine) as client, pytest.raises(WebSocketDenialResponse) as caught:
        with connect(client, OPENPI_ROUTE):
            pass
    assert caught.value.status_code == 404
    assert "a model whose spec has a policy" in caught.value.text


def test_health_answers_at_both_addresses(processor: Any, vllm_engine: InstantEngine) -> None:
    async def check_health() -> None:
        pass

    with serve(processor, vllm_engine) as client:
        client.app.state.engine_client = SimpleNamespace(check_health=check_health)  # type: ignore[attr-defined]
        assert client.get("/healthz").status_code == client.get("/health").status_code == 200


def test_one_robot_more_than_may_be_is_refused_until_one_leaves(processor: Any, vllm_engine: InstantEngine) -> None:
    with serve(processor, vllm_engine, ServerLimits(sessions=1)) as client:
        for _ in range(2):
            with connect(client) as socket:
                assert "actions" not in receive(socket)
                with pytest.raises(WebSocketDenialResponse) as caught:
                    with connect(client):
                        pass
                assert caught.value.status_code == 429
                assert isinstance(ask(socket), dict)


def test_a_server_that_stops_takes_no_robot(processor: Any, vllm_engine: InstantEngine) -> None:
    with serve(processor, vllm_engine) as client, connect(client) as socket:
        receive(socket)
        assert isinstance(ask(socket), dict)
        client.app.state.mmkit.stop()  # type: ignore[attr-defined]
        with pytest.raises(WebSocketDisconnect) as closed:
            receive(socket)
        assert (closed.value.code, closed.value.reason) == (1012, "the server stops: connect to another one")
        with pytest.raises(WebSocketDenialResponse) as caught:
            with connect(client):
                pass
        assert caught.value.status_code == 503


# -- observations ------------------------------------------------------------------------------------------------------


def test_an_observation_is_answered_by_actions_and_times(processor: Any, vllm_engine: InstantEngine) -> None:
    with serve(processor, vllm_engine) as client, connect(client) as socket:
        description = receive(socket)
        expected_plan = processor.plan.modalities["actions"].item.expected
        assert description == {
            "model": "terra",
            "spec": "terra",
            "observation": {PLAN_KEY: expected_plan},
            "action_horizon": 2,
            "action_dim": 2,
            "town": "Terra",
        }
        first = ask(socket)
        assert (first["actions"] == np.array(IDS).reshape(2, 2) / 4).all()
        assert first["actions"].dtype == np.float64
        times = first["server_timing"]
        assert set(times) == {"infer_ms", "unpack_ms", "process_ms", "decode_ms"}
        parts = times["unpack_ms"] + times["process_ms"] + times["decode_ms"] + first["policy_timing"]["infer_ms"]
        assert parts == pytest.approx(times["infer_ms"])
        assert ask(socket)["server_timing"]["prev_total_ms"] >= times["infer_ms"]
    request = vllm_engine.requests[0]
    assert request["prompt"] == "drive"
    assert (request["multi_modal_data"]["actions"][0].numpy() == PLAN).all()


def test_observations_that_come_together_are_answered_in_order(processor: Any, vllm_engine: InstantEngine) -> None:
    with serve(processor, vllm_engine) as client, connect(client) as socket:
        receive(socket)
        for number in range(5):
            socket.send_bytes(pack({PLAN_KEY: PLAN + number} if number != 3 else {}))
        answers = [receive(socket) for _ in range(5)]
    assert [isinstance(answer, str) for answer in answers] == [False, False, False, True, False]
    shifts = [float(request["multi_modal_data"]["actions"][0][0, 0]) for request in vllm_engine.requests]
    assert shifts == [0, 1, 2, 4]


REFUSED = {
    "another key": ({"robot/plans": 1}, "robot/plans: expected keys among ['robot/plan'], got 'robot/plans'."),
    "another shape": ({PLAN_KEY: PLAN[1:]}, "robot/plan: expected a (6, 3) float32 tensor, got shape (5, 3)."),
    "objects": ({PLAN_KEY: np.array(["a"])}, "robot/plan: expected a dtype among "),
    "nothing": ({PLAN_KEY: None}, "robot/plan: expected "),
}


def test_a_refused_observation_leaves_the_connection_open(processor: Any, vllm_engine: InstantEngine) -> None:
    with serve(processor, vllm_engine) as client, connect(client) as socket:
        receive(socket)
        for values, sentence in REFUSED.values():
            assert ask(socket, **values).startswith(sentence)
            assert isinstance(ask(socket), dict)
        socket.send_text("hello")
        assert receive(socket) == "message: expected an observation in MessagePack, got a text."
        socket.send_bytes(b"")
        assert receive(socket) == "message: expected a map of MessagePack, got another value."
        assert isinstance(ask(socket), dict)
        metrics = client.get("/metrics").text
    assert 'mmkit:refused_requests_total{modality="",reason="schema",route="openpi"}' in metrics


def test_a_refusal_of_vllm_names_the_key(processor: Any, vllm_engine: InstantEngine) -> None:
    vllm_engine.refusal = InputError("terra.actions[0]", "another plan", "this one")
    with serve(processor, vllm_engine) as client, connect(client) as socket:
        receive(socket)
        assert ask(socket) == "robot/plan: expected another plan, got this one."
        vllm_engine.refusal = None
        assert isinstance(ask(socket), dict)


def test_an_error_of_the_server_ends_the_connection(processor: Any, vllm_engine: InstantEngine) -> None:
    vllm_engine.refusal = RuntimeError("secrets of the server")
    with serve(processor, vllm_engine) as client, connect(client) as socket:
        receive(socket)
        sentence = "server: expected to serve the request, got an error of its own. Its log says which."
        assert ask(socket) == sentence
        with pytest.raises(WebSocketDisconnect) as closed:
            receive(socket)
        assert closed.value.code == 1011


def test_the_request_of_a_robot_that_leaves_is_given_up(processor: Any, vllm_engine: InstantEngine) -> None:
    vllm_engine.waits = True
    with serve(processor, vllm_engine, ServerLimits(sessions=1)) as client:
        with connect(client) as socket:
            receive(socket)
            socket.send_bytes(pack({PLAN_KEY: PLAN}))
        assert len(vllm_engine.aborted) == 1
        vllm_engine.waits = False
        with connect(client) as socket:
            receive(socket)
            assert isinstance(ask(socket), dict)


def test_a_silent_robot_is_sent_away(processor: Any, vllm_engine: InstantEngine) -> None:
    limits = ServerLimits(robot_idle_seconds=1)
    with serve(processor, vllm_engine, limits) as client, connect(client) as socket:
        receive(socket)
        with pytest.raises(WebSocketDisconnect) as closed:
            receive(socket)
    assert (closed.value.code, closed.value.reason) == (1001, "no observation for 1 s")


# -- the start of a server ---------------------------------------------------------------------------------------------

BAD_POLICIES = {
    "another field of SamplingParams": (
        {"sampling": {"heat": 1}},
        "terra, policy: sampling_params.heat: expected fields among …",
    ),
    "a number of tokens": (
        {"sampling": {"max_tokens": 5}},
        "terra, policy: max_tokens: expected 4 or none beside output 'moves', got 5. It follows from the output.",
    ),
}


@pytest.mark.parametrize(("options", "sentence"), BAD_POLICIES.values(), ids=BAD_POLICIES)
def test_a_policy_that_serves_nobody_stops_the_server(options: Any, sentence: str) -> None:
    policy = Policy("moves", {"actions": PLAN_KEY}, "drive", **options)
    bad_processor = testing.of_spec(WITH_POLICY.model_copy(update={"policy": policy}), CHECKPOINT).processor

    async def check() -> None:
        state = ServerState(make_engine(bad_processor), ServerLimits(), ["terra"])
        check_policy(state, bad_processor.plan.policy)

    expect_refusal(SpecError, sentence, asyncio.run, check())
