"""The routes of a real ``vllm serve``: Terra, over HTTP and in closed loop, against the reference."""

import json

import httpx
import numpy as np
import pytest
import torch
from websockets.sync.client import connect

from examples.terra.rollout import BLOCK_SIZE
from examples.terra.serve_demo import SAMPLING, closed_loop, stream
from examples.terra.world import TOKENS_PER_FRAME
from mmkit.serve import RequestError
from tests.night.malformed import ACTIONS, FRAMES, HEADERS, LIMITS, SESSION, prompt_of
from tests.night.soak import metrics

pytestmark = pytest.mark.timeout(600)

CONTEXT, ACTIONS = FRAMES[0, :3], ACTIONS[0]
PROMPT = prompt_of(0, 3)
ITEMS = {"actions": ACTIONS[:3]}
ZEROS = [[0.0] * 3] * 6
NO_ITEM = (
    "terra.actions: expected one item per placeholder, got 6 placeholder id(s) 31 and no item. Send "
    'multi_modal_data={"actions": [...]}, or leave the placeholders out.'
)


def post(server, body, path="/v1/mm/generate"):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(server.url + path, content=content, headers=HEADERS, timeout=240)


# -- what it gives -----------------------------------------------------------------------------------------------------


def test_a_closed_loop_of_22_frames_is_the_reference_rollout(client, frames):
    assert (closed_loop(client, CONTEXT, ACTIONS, 22) == frames).all()


def test_a_streamed_request_is_the_reference_frame(client, frames):
    assert stream(client, CONTEXT, ACTIONS) == frames[0].tolist()


def test_every_form_of_an_item_is_the_same_item(client, frames):
    actions = ACTIONS[:3]
    forms = {
        "lists": actions.tolist(),
        "arrays": list(actions),
        "batch": actions,
        "float64": actions.astype(np.float64),
        "tensors": [torch.from_numpy(action) for action in actions],
    }
    for name, form in forms.items():
        answer = client.generate(PROMPT, {"actions": form}, **SAMPLING)
        assert answer.choices[0].token_ids == frames[0].tolist(), name
        assert answer.usage.prompt_tokens == len(PROMPT)
        assert answer.usage.completion_tokens == TOKENS_PER_FRAME
    assert answer.usage.prompt_tokens_details.cached_tokens == len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE


def test_other_actions_are_other_items(client, frames):
    (choice,) = client.generate(PROMPT, {"actions": ACTIONS[5:8]}, **SAMPLING).choices
    assert choice.token_ids != frames[0].tolist()


def test_several_answers_and_their_probabilities(client):
    options = {"n": 3, "logprobs": 2, "temperature": 1.0, "seed": 1, "max_tokens": 4, "ignore_eos": True}
    answer = client.generate(PROMPT, ITEMS, **options)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert len(choice.token_ids) == len(choice.logprobs) == 4
        assert all(token in step for token, step in zip(choice.token_ids, choice.logprobs, strict=True))
    assert answer.usage.completion_tokens == 12
    streamed = {index: [] for index in range(3)}
    for event in client.stream(PROMPT, ITEMS, **options):
        for choice in event.choices:
            streamed[choice.index] += choice.token_ids
    assert [streamed[choice.index] for choice in answer.choices] == [choice.token_ids for choice in answer.choices]
    assert event.usage.completion_tokens == 12


def test_a_uuid_names_a_cached_item(client):
    uuids = {"actions": ["a", "b", "c"]}
    first = client.generate(PROMPT, ITEMS, uuids=uuids, **SAMPLING)
    again = client.generate(PROMPT, {"actions": [None, None, None]}, uuids=uuids, **SAMPLING)
    assert again.choices[0].token_ids == first.choices[0].token_ids


def test_a_session_goes_on_without_items_and_with_a_prompt(client, frames):
    with client.session(PROMPT, ITEMS, **{**SAMPLING, "max_tokens": 24}) as session:
        assert session.first.token_ids + session.next(max_tokens=40).token_ids == frames[0].tolist()
        assert session.remaining == 1750 - len(PROMPT) - 64
        chunk = session.next({"actions": ACTIONS[3:4]}, [31] * 6, max_tokens=64)
        assert chunk.token_ids == frames[1].tolist()
        assert chunk.index == 2
        assert chunk.usage.prompt_tokens == 6


def test_the_modalities_are_those_of_the_spec(client):
    model = client.modalities()
    facts = (model.model, model.spec, model.vocab_size, model.max_model_len, model.text)
    assert facts == ("terra", "terra", 32, 1750, False)
    (actions,) = model.modalities
    assert (actions.name, actions.shape, actions.dtype, actions.limit) == ("actions", [6, 3], "float32", 24)
    assert (actions.placeholder, actions.in_place, actions.largest_tokens) == ([31] * 6, True, 6)
    assert client.generate([31] * 6, {"actions": [actions.example]}, max_tokens=1).usage.completion_tokens == 1
    assert model.limits.body_bytes == LIMITS["BODY_BYTES"]


def test_the_schema_is_in_the_documentation(server):
    schema = httpx.get(f"{server.url}/openapi.json", timeout=240).json()
    body = schema["paths"]["/v1/mm/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "items", "max_tokens", "stream"} <= set(body["properties"])
    assert "/v1/mm/modalities" in schema["paths"]


# -- what it refuses ---------------------------------------------------------------------------------------------------

WRONG = {
    "shape": (
        {"prompt": [31] * 6, "items": {"actions": [ZEROS[:5]]}},
        "items.actions[0]",
        "terra.actions[0]: expected a (6, 3) float32 tensor, got shape (5, 3).",
    ),
    "too few items": (
        {"prompt": [31] * 12, "items": {"actions": [ZEROS]}},
        "items.actions",
        "terra.actions: expected 1 placeholder(s) [31] * 6 in the prompt for 1 item, got 2. "
        "Write one placeholder per item, and nothing else with its id.",
    ),
    "no items": ({"prompt": [31] * 6}, "items.actions", NO_ITEM),
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
        "items.actions[0]: expected a (6, 3) float32 tensor, got a part of kind image.",
    ),
    "nothing": ({"max_tokens": 1}, "prompt", "prompt: expected a prompt or messages, got none."),
    "messages": (
        {"messages": [{"role": "user", "content": "drive"}]},
        "messages",
        "messages: expected a prompt, since the server has no tokenizer, got messages.",
    ),
    "both": (
        {"prompt": [1], "messages": [{"role": "user", "content": "drive"}]},
        "prompt",
        "prompt: expected none beside messages, got some. Write what belongs there into the messages.",
    ),
    "template": (
        {"prompt": [1], "add_generation_prompt": False},
        "add_generation_prompt",
        "add_generation_prompt: expected messages beside it, got none.",
    ),
    "model": ({"prompt": [1], "model": "gpt"}, "model", "model: expected one of terra, got 'gpt'."),
    "stop": (
        {"prompt": [1], "stop": ["x"]},
        "stop",
        "stop: expected stop_token_ids, since the server has no tokenizer, got texts.",
    ),
    "choice": (
        {"prompt": [1], "structured_outputs": {"choice": ["x"]}},
        "structured_outputs",
        "structured_outputs: expected none, since the server has no tokenizer, got a constraint.",
    ),
    "format": (
        {"prompt": [1], "response_format": {"type": "json_object"}},
        "response_format",
        "response_format: expected none, since the server has no tokenizer, got a constraint.",
    ),
    "bias": (
        {"prompt": [1], "logit_bias": {"32": 1}},
        "logit_bias",
        "logit_bias: expected ids from 0 to 31, got 32.",
    ),
    "stop id": (
        {"prompt": [1], "stop_token_ids": [32]},
        "stop_token_ids",
        "stop_token_ids: expected ids from 0 to 31, got 32.",
    ),
    "kwargs": (
        {"prompt": [1], "mm_processor_kwargs": {"a": 1}},
        "mm_processor_kwargs",
        "mm_processor_kwargs: expected none, got some. They can make a request costly: "
        "--trust-request-mm-kwargs allows them.",
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
        pytest.param(b" " * (LIMITS["BODY_BYTES"] + 1), "body", id="body"),
        pytest.param({"items": {"actions": [[0] * (LIMITS["ELEMENTS"] + 1)]}}, "items.actions[0]", id="elements"),
        pytest.param({"items": {"actions": [[0]] * (LIMITS["ITEMS"] + 1)}}, "items.actions", id="items"),
    ],
)
def test_limits(server, body, param):
    answer = post(server, body if isinstance(body, bytes) else {"prompt": [1], **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (413, "RequestEntityTooLargeError", param)


@pytest.mark.parametrize(("ids", "message"), [([1, 2**31], WRONG["id"][2]), ([31] * 6, NO_ITEM)])
def test_the_stock_routes_are_guarded_too(server, ids, message):
    answer = post(server, {"model": "terra", "prompt": ids, "max_tokens": 1}, "/v1/completions")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


def test_a_chat_needs_a_tokenizer(server):
    body = {"model": "terra", "messages": [{"role": "user", "content": "on"}]}
    answer = post(server, body, "/v1/chat/completions")
    message = "messages: expected a prompt at /v1/mm/generate, since the server has no tokenizer, got messages."
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


@pytest.mark.parametrize(
    ("method", "path", "code", "kind"),
    [
        ("GET", "/v1/mm/generate", 405, "MethodNotAllowedError"),
        ("POST", "/v1/mm/session", 405, "MethodNotAllowedError"),
        ("GET", "/v1/mm/pooling", 405, "MethodNotAllowedError"),
        ("POST", "/v1/mm/none", 404, "NotFoundError"),
        ("POST", "/v1/mm", 404, "NotFoundError"),
    ],
)
def test_there_is_no_such_route(server, method, path, code, kind):
    answer = httpx.request(method, server.url + path, headers=HEADERS, timeout=240)
    message = (
        "path: expected POST /v1/mm/generate, POST /v1/mm/pooling, GET /v1/mm/modalities or a websocket at "
        f"/v1/mm/session, got {method} {path}."
    )
    assert answer.json() == {"error": {"message": message, "type": kind, "param": None, "code": code}}
    assert answer.status_code == code


def test_a_model_that_generates_pools_nothing(client):
    with pytest.raises(RequestError, match="model: expected a pooling model, got one that generates") as refused:
        client.pool([3])
    assert refused.value.code == 400


def test_a_session_refuses_and_goes_on(client, frames):
    refusals = {
        "terra.actions[0]: expected a (6, 3) float32 tensor, got shape (5, 3)": ({"actions": [ZEROS[:5]]}, None),
        "items.actions: expected at most 24 item(s) in one session, got 25": ({"actions": [ZEROS] * 22}, None),
        "max_tokens: expected at most 1476 more tokens in this session, got 1500 of the prompt": (None, [1] * 1500),
        "terra.prompt[0]: expected a token id from 0 to 31, got 99": (None, [99]),
    }
    with client.session(PROMPT, ITEMS, **SAMPLING) as session:
        for message, (items, ids) in refusals.items():
            with pytest.raises(RequestError) as caught:
                session.next(items, ids, max_tokens=1)
            assert str(caught.value).startswith(message)
            assert caught.value.code == 400
        assert session.next({"actions": [ACTIONS[3]]}).token_ids == frames[1].tolist()


def test_messages_out_of_order(server):
    started = {"type": "start", "prompt": [1], "max_tokens": 1}
    turns = [
        (b"x", "message: expected JSON text, got bytes. Send text frames."),
        ("x", "message: expected JSON, got invalid character (byte 0)."),
        ({"type": "x"}, "type: expected one of start, next, close, got 'x'."),
        ({"type": "next"}, 'type: expected "start" as the first message, got "next".'),
        ({"type": "start"}, "max_tokens: expected a value, got none."),
        (
            {**started, "response_format": {"type": "json_object"}},
            "response_format: expected none in a session, where vLLM begins no grammar anew with a chunk, got one. "
            "Ask /v1/mm/generate, with all that came before.",
        ),
        (started, "chunk"),
        (started, 'type: expected "next" or "close" in a session that has started, got "start".'),
        ({"type": "close"}, "closed"),
    ]
    with connect(server.url.replace("http", "ws") + SESSION, additional_headers=HEADERS) as socket:
        assert json.loads(socket.recv(240))["type"] == "ready"
        for message, expected in turns:
            socket.send(json.dumps(message) if isinstance(message, dict) else message)
            answer = json.loads(socket.recv(240))
            assert expected == (answer["error"]["message"] if answer["type"] == "error" else answer["type"])


def test_metrics_tell_of_refusals_and_sessions(server, client):
    def scraped():
        return httpx.get(f"{server.url}/metrics", timeout=240).text

    name = 'mmkit:refused_requests_total{modality="actions",reason="item",route="generate"}'

    def refusals():
        return sum(float(line.rpartition(" ")[2]) for line in scraped().splitlines() if line.startswith(name))

    before = refusals()
    post(server, {"prompt": [31] * 6})
    assert refusals() == before + 1
    with client.session(PROMPT, ITEMS, **SAMPLING):
        assert metrics(scraped())["mmkit:sessions_open"] == 1
    assert metrics(scraped())["mmkit:sessions_open"] == 0
