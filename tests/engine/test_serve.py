"""The routes of a real ``vllm serve``: Terra, over HTTP and in closed loop, against the engine in this process."""

import asyncio
import json
import os
import urllib.request

import httpx
import numpy as np
import pytest
import torch
import websockets

from examples.terra import CHECKPOINT, register
from examples.terra.rollout import BLOCK_SIZE, VllmTerra
from examples.terra.serve_demo import OPTIONS, SAMPLING, closed_loop, prompt_of, stream
from examples.terra.world import CONTEXT_FRAMES, TOKENS_PER_FRAME, make_episode
from mmkit.serve import AsyncClient, Client, RequestError
from mmkit.serve.process import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

FRAMES = 22
EPISODE = make_episode(0)
CONTEXT, ACTIONS = EPISODE.frames[:CONTEXT_FRAMES], EPISODE.actions
LIMITS = {
    "MMKIT_SERVE_BODY_BYTES": "200000",
    "MMKIT_SERVE_ELEMENTS": "2000",
    "MMKIT_SERVE_ITEMS": "40",
    "MMKIT_SERVE_SESSIONS": "4",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("serve") / "log"
    with Server(CHECKPOINT, *OPTIONS, "--served-model-name", "terra", environment=LIMITS, log=log) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with Client(server.url) as client:
        yield client


@pytest.fixture(scope="module")
def offline():
    """The frames that the engine makes in this process, (frames, num_image_patches)."""
    register()
    engine = VllmTerra(CHECKPOINT)
    made = np.stack([step.tokens[0] for step in engine.rollout(CONTEXT[None], ACTIONS[None], FRAMES)])
    engine.llm.llm_engine.engine_core.shutdown()
    return made


@pytest.fixture(scope="module")
def prompt(client):
    return prompt_of(client, CONTEXT)


def post(server, body, path="/v1/mm/generate", **options):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    return httpx.post(server.url + path, content=content, headers=headers, timeout=60, **options)


# -- what it gives -----------------------------------------------------------------------------------------------------


def test_a_closed_loop_of_22_frames_is_the_offline_rollout(client, offline):
    assert (closed_loop(client, CONTEXT, ACTIONS, FRAMES) == offline).all()


def test_a_streamed_request_is_the_offline_frame(client, offline):
    assert stream(client, CONTEXT, ACTIONS) == offline[0].tolist()


def test_every_form_of_an_item_is_the_same_item(client, prompt, offline):
    actions = ACTIONS[:3]
    forms = {
        "lists": actions.tolist(),
        "arrays": list(actions),
        "batch": actions,
        "float64": actions.astype(np.float64),
        "tensors": [torch.from_numpy(action) for action in actions],
    }
    for name, form in forms.items():
        made = client.generate(prompt, {"actions": form}, **SAMPLING)
        assert made.choices[0].token_ids == offline[0].tolist(), name
        assert made.usage.prompt_tokens == len(prompt)
        assert made.usage.completion_tokens == TOKENS_PER_FRAME
    assert made.usage.prompt_tokens_details.cached_tokens == len(prompt) // BLOCK_SIZE * BLOCK_SIZE


def test_other_actions_are_other_items(client, prompt, offline):
    (made,) = client.generate(prompt, {"actions": ACTIONS[5:8]}, **SAMPLING).choices
    assert made.token_ids != offline[0].tolist()


def test_several_answers_and_their_probabilities(client, prompt):
    options = {"n": 3, "logprobs": 2, "temperature": 1.0, "seed": 1, "max_tokens": 4, "ignore_eos": True}
    made = client.generate(prompt, {"actions": ACTIONS[:3]}, **options)
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    for choice in made.choices:
        assert len(choice.token_ids) == len(choice.logprobs) == 4
        assert all(token in told for token, told in zip(choice.token_ids, choice.logprobs, strict=True))
    assert made.usage.completion_tokens == 12
    streamed = {index: [] for index in range(3)}
    for event in client.stream(prompt, {"actions": ACTIONS[:3]}, **options):
        for choice in event.choices:
            streamed[choice.index] += choice.token_ids
    assert [streamed[choice.index] for choice in made.choices] == [choice.token_ids for choice in made.choices]
    assert event.usage.completion_tokens == 12


def test_a_uuid_names_a_cached_item(client, prompt):
    uuids = {"actions": ["a", "b", "c"]}
    first = client.generate(prompt, {"actions": ACTIONS[:3]}, uuids=uuids, **SAMPLING)
    again = client.generate(prompt, {"actions": [None, None, None]}, uuids=uuids, **SAMPLING)
    assert again.choices[0].token_ids == first.choices[0].token_ids


def test_many_clients_at_once_get_their_own_answers(server, offline):
    at_once(server, offline)


@pytest.mark.parametrize("option", ["--tensor-parallel-size", "--data-parallel-size"])
def test_two_processes_give_the_same_ids(option, offline, tmp_path):
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if len(os.sched_getaffinity(0)) > 1 else {}
    with Server(CHECKPOINT, *OPTIONS, option, "2", environment=cores, log=tmp_path / "log") as server:
        at_once(server, offline)


def at_once(server, offline):
    """Eight clients, four of them in a closed loop, each with the answers of the engine in this process."""

    async def drive(client, number):
        known = CONTEXT_FRAMES
        told = await client.modalities()
        pad = told.modalities[0].placeholder
        prompt = [token for frame in CONTEXT.tolist() for token in [*frame, *pad]]
        if number % 2:
            made = await client.generate(prompt, {"actions": ACTIONS[:known]}, **SAMPLING)
            assert made.choices[0].token_ids == offline[0].tolist()
            return
        async with client.session(prompt, {"actions": ACTIONS[:known]}, **SAMPLING) as session:
            frames = [session.first.token_ids]
            for action in ACTIONS[known : known + 4]:
                frames.append((await session.next({"actions": [action]})).token_ids)
        assert (np.array(frames) == offline[:5]).all()

    async def all_of_them():
        async with AsyncClient(server.url) as client:
            await asyncio.gather(*(drive(client, number) for number in range(8)))

    asyncio.run(all_of_them())


def test_a_session_goes_on_without_items_and_with_a_prompt(client, prompt, offline):
    with client.session(prompt, {"actions": ACTIONS[:3]}, **{**SAMPLING, "max_tokens": 24}) as session:
        made = session.first.token_ids + session.next(max_tokens=40).token_ids
        assert made == offline[0].tolist()
        assert session.remaining == 1750 - len(prompt) - 64
        chunk = session.next({"actions": ACTIONS[3:4]}, [31] * 6, max_tokens=64)
        assert chunk.token_ids == offline[1].tolist()
        assert chunk.index == 2
        assert chunk.usage.prompt_tokens == 6


def test_the_modalities_are_those_of_the_spec(client):
    told = client.modalities()
    assert (told.model, told.spec, told.vocab_size, told.max_model_len, told.text) == (
        "terra",
        "terra",
        32,
        1750,
        False,
    )
    (actions,) = told.modalities
    assert (actions.name, actions.shape, actions.dtype, actions.limit) == ("actions", [6, 3], "float32", 24)
    assert (actions.placeholder, actions.in_place, actions.largest_tokens) == ([31] * 6, True, 6)
    assert client.generate([31] * 6, {"actions": [actions.example]}, max_tokens=1).usage.completion_tokens == 1
    assert told.limits.body_bytes == 200_000


def test_the_schema_is_in_the_documentation(server):
    schema = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    body = schema["paths"]["/v1/mm/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "items", "max_tokens", "stream"} <= set(body["properties"])
    assert "/v1/mm/modalities" in schema["paths"]


# -- what it refuses ---------------------------------------------------------------------------------------------------

WRONG = {
    "shape": (
        {"prompt": [31] * 6, "items": {"actions": [[[0.0] * 3] * 5]}},
        "items.actions[0]",
        "terra.actions[0]: expected a (6, 3) float32 tensor, got shape (5, 3). Send one tensor per item.",
    ),
    "too few items": (
        {"prompt": [31] * 12, "items": {"actions": [[[0.0] * 3] * 6]}},
        "items.actions",
        "terra.actions: expected 1 placeholder(s) [31] * 6 in the prompt for 1 item, got 2, and 12 placeholder id(s) "
        "in all. Write one placeholder per item, and nothing else with its id.",
    ),
    "no items": (
        {"prompt": [31] * 6},
        "items.actions",
        "terra.actions: expected one item per placeholder, got 6 placeholder id(s) 31 and no item. Send "
        'multi_modal_data={"actions": [...]}, or leave the placeholders out.',
    ),
    "modality": (
        {"prompt": [1], "items": {"image": []}},
        "items",
        "terra.multi_modal_data: expected modalities among ['actions'], got 'image'.",
    ),
    "id": (
        {"prompt": [1, 2**31]},
        "prompt[1]",
        "terra.prompt[1]: expected a token id from 0 to 31, got 2147483648. Check the tokenizer.",
    ),
    "text": (
        {"prompt": "hello"},
        "prompt",
        "prompt: expected token ids, since the server has no tokenizer, got a text.",
    ),
    "url": (
        {"prompt": [1], "items": {"actions": [{"image_url": {"url": "http://127.0.0.1:9/x"}}]}},
        "items.actions[0]",
        "items.actions[0]: expected a URL that starts with data:, got http://127.0.0.1:9/x. Send the content as a data "
        "URL, or start the server with --allowed-media-domains.",
    ),
    "model": ({"prompt": [1], "model": "gpt"}, "model", "model: expected one of terra, got 'gpt'."),
    "stop": (
        {"prompt": [1], "stop": ["x"]},
        "stop",
        "stop: expected stop_token_ids, since the server has no tokenizer, got texts.",
    ),
    "stop id": (
        {"prompt": [1], "stop_token_ids": [32]},
        "stop_token_ids",
        "stop_token_ids: expected ids below 32, got 32.",
    ),
    "kwargs": (
        {"prompt": [1], "mm_processor_kwargs": {"a": 1}},
        "mm_processor_kwargs",
        "mm_processor_kwargs: expected none, got some. They can make a request costly: start the server with "
        "--trust-request-mm-kwargs to allow them.",
    ),
    "uuids": (
        {"prompt": [1], "uuids": {"actions": ["a"]}},
        "uuids.actions",
        "uuids.actions: expected items of that modality beside their uuids, got none. Send null for an item that the "
        "server has.",
    ),
}


@pytest.mark.parametrize(("body", "param", "message"), [pytest.param(*row, id=name) for name, row in WRONG.items()])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_refusal_is_one_sentence_with_its_path(server, body, param, message, streamed):
    answer = post(server, {**body, "stream": streamed})
    assert answer.json() == {"error": {"message": message, "type": "BadRequestError", "param": param, "code": 400}}
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param(b" " * 200_001, "body", id="body"),
        pytest.param({"prompt": [1], "items": {"actions": [[0.0] * 2001]}}, "items.actions[0]", id="elements"),
        pytest.param({"prompt": [1], "items": {"actions": [[0.0]] * 41}}, "items.actions", id="items"),
    ],
)
def test_limits(server, body, param):
    answer = post(server, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (413, "RequestEntityTooLargeError", param)


STOCK = {
    "id": ([2**31], "terra.prompt[0]: expected a token id from 0 to 31, got 2147483648. Check the tokenizer."),
    "placeholders": (
        [31] * 6,
        "terra.actions: expected one item per placeholder, got 6 placeholder id(s) 31 and no item. Send "
        'multi_modal_data={"actions": [...]}, or leave the placeholders out.',
    ),
}


@pytest.mark.parametrize(("ids", "message"), [pytest.param(*row, id=name) for name, row in STOCK.items()])
def test_the_stock_routes_are_guarded_too(server, ids, message):
    answer = post(server, {"model": "terra", "prompt": ids, "max_tokens": 1}, "/v1/completions")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


@pytest.mark.parametrize(
    ("method", "path", "code", "kind"),
    [
        ("GET", "/v1/mm/generate", 405, "MethodNotAllowedError"),
        ("POST", "/v1/mm/session", 405, "MethodNotAllowedError"),
        ("POST", "/v1/mm/none", 404, "NotFoundError"),
        ("POST", "/v1/mm", 404, "NotFoundError"),
    ],
)
def test_there_is_no_such_route(server, method, path, code, kind):
    answer = httpx.request(method, server.url + path, timeout=60)
    message = (
        "path: expected POST /v1/mm/generate, GET /v1/mm/modalities or a websocket at /v1/mm/session, "
        f"got {method} {path}."
    )
    assert answer.json() == {"error": {"message": message, "type": kind, "param": None, "code": code}}
    assert answer.status_code == code


def test_a_session_refuses_and_goes_on(client, prompt, offline):
    with client.session(prompt, {"actions": ACTIONS[:3]}, **SAMPLING) as session:
        for items, ids, message in [
            (
                {"actions": [np.zeros((5, 3))]},
                None,
                "terra.actions[0]: expected a (6, 3) float32 tensor, got shape (5, 3)",
            ),
            ({"actions": [ACTIONS[3]] * 22}, None, "items.actions: expected at most 24 item(s) in one session, got 25"),
            (None, [1] * 1500, "max_tokens: expected at most 1476 more tokens in this session, got 1500 of the prompt"),
            (None, [99], "terra.prompt[0]: expected a token id from 0 to 31, got 99"),
        ]:
            with pytest.raises(RequestError) as caught:
                session.next(items, ids, max_tokens=1)
            assert str(caught.value).startswith(message)
            assert caught.value.code == 400
        assert session.next({"actions": [ACTIONS[3]]}).token_ids == offline[1].tolist()


def test_messages_out_of_order(server, prompt):
    async def talk():
        address = server.url.replace("http", "ws") + "/v1/mm/session"
        async with websockets.connect(address) as socket:

            async def said(message):
                await socket.send(message if isinstance(message, (str, bytes)) else json.dumps(message))
                return json.loads(await asyncio.wait_for(socket.recv(), 60))

            assert (await said_first(socket))["type"] == "ready"
            told = [
                (await said(message))["error"]["message"]
                for message in (b"x", "x", {"type": "x"}, {"type": "next"}, {"type": "start"})
            ]
            chunk = await said({"type": "start", "prompt": [1], "max_tokens": 1})
            told.append((await said({"type": "start", "prompt": [1], "max_tokens": 1}))["error"]["message"])
            assert chunk["type"] == "chunk"
            assert (await said({"type": "close"}))["type"] == "closed"
            return told

    async def said_first(socket):
        return json.loads(await asyncio.wait_for(socket.recv(), 60))

    assert asyncio.run(talk()) == [
        "message: expected JSON text, got bytes. Send text frames.",
        "message: expected a JSON object, got 'x'.",
        "type: expected one of start, next, close, got 'x'.",
        'type: expected "start" as the first message, got "next".',
        "max_tokens: expected a value, got none.",
        'type: expected "next" or "close" in a session that has started, got "start".',
    ]


def test_metrics_tell_of_refusals_and_sessions(server, client, prompt):
    def metric(name):
        with urllib.request.urlopen(f"{server.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)}

    name = 'mmkit:refused_requests_total{modality="actions",reason="item",route="generate"}'
    before = metric(name).get(name, 0)
    post(server, {"prompt": [31] * 6})
    assert metric(name)[name] == before + 1
    with client.session(prompt, {"actions": ACTIONS[:3]}, **SAMPLING):
        assert sum(metric("mmkit:sessions_open").values()) == 1
    assert sum(metric("mmkit:sessions_open").values()) == 0
