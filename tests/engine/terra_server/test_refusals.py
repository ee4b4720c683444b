"""What a real server refuses: each in one sentence with its path, in the form of OpenAI's errors."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.sync.client import ClientConnection

from examples.server import Server
from tests import ROOT
from tests.engine.terra_server import clients
from tests.night.malformed import (
    ACTIONS,
    GENERATE,
    GREEDY,
    LIMITS,
    PAD,
    build_body,
    encode_array,
    find_fault_of_error,
    make_prompt,
)

pytestmark = pytest.mark.timeout(600)

ACTION = [PAD] * 6
ZEROS = [[0.0] * 3] * 6
TYPES = {400: "BadRequestError", 413: "RequestEntityTooLargeError"}

PARAMS = "sampling_params"
NO_TOKENIZER = "since the server has no tokenizer, got"
NO_ITEM = (
    f"terra.actions: expected one item per placeholder, got 6 placeholders [{PAD}] and no item. "
    'Send items of "actions", or leave the placeholders out.'
)
LARGE_ID = f"terra.prompt[1]: expected a token id from 0 to {PAD}, got 2147483648. Check the tokenizer."
FIVE_ROWS = "terra.actions[0]: expected a (6, 3) float32 tensor, got shape (5, 3)."


def make_long_prompt() -> list[int]:
    """Return frames without actions, after which no other frame fits."""
    frames = [token for token in make_prompt(0, 3) if token != PAD]
    return frames * 9


def assert_refused(server: Server, body: Any, sentence: str, param: str | None, code: int, path: str) -> None:
    """Check the error in the answer to a request."""
    answer = clients.ask(server, body, path)
    assert not find_fault_of_error(answer.json())
    error = answer.json()["error"]
    assert error["message"].startswith(sentence)
    assert error["param"] == param
    assert error["type"] == TYPES[code]
    assert answer.status_code == code


def assert_generate_refuses(server: Server, fields: dict[str, Any], sentence: str, param: str | None) -> None:
    """Check a refusal of the id 1 with other fields, also where the answer would be a stream."""
    body = build_body(**{"prompt": [1], **fields})
    assert_refused(server, body, sentence, param, 400, GENERATE)
    assert_refused(server, {**body, "stream": True}, sentence, param, 400, GENERATE)


def get_path(sentence: str) -> str:
    """Return the path at the start of a sentence."""
    return sentence.partition(":")[0]


# -- sampling parameters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"min_tokens": 5, "max_tokens": 1},
            f"{PARAMS}: expected parameters that vLLM takes, got min_tokens must be less than",
        ),
        (
            {"temperature": -1},
            f"{PARAMS}.temperature: expected parameters that vLLM takes, "
            "got temperature must be non-negative, got -1.0.",
        ),
        ({"n": "1"}, f"{PARAMS}.n: expected int, got str."),
        (
            {"output_kind": 1},
            f"{PARAMS}.output_kind: expected fields among ['n', 'presence_penalty', 'frequency_penalty', ",
        ),
        ({"logit_bias": {"x": 1}}, f"{PARAMS}.logit_bias: expected int, got str."),
        ({"logit_bias": {"-1": 1}}, f"{PARAMS}.logit_bias: expected int >= 0, got another."),
        ({"seed": 2**63}, f"{PARAMS}.seed: expected int <= 9223372036854775807, got another."),
        (
            {"allowed_token_ids": [PAD, PAD + 1]},
            f"{PARAMS}.allowed_token_ids[1]: expected int <= {PAD}, got another.",
        ),
        ({"stop": ["x"]}, f"{PARAMS}.stop: expected stop_token_ids, {NO_TOKENIZER} texts."),
    ],
    ids=["both", "temperature", "n", "output_kind", "text", "negative", "seed", "allowed_token_ids", "stop"],
)
def test_a_sampling_parameter_is_refused(server: Server, fields: dict[str, Any], sentence: str) -> None:
    assert_generate_refuses(server, fields, sentence, get_path(sentence))


def test_a_constraint_needs_a_tokenizer(server: Server) -> None:
    sentence = "Structured outputs requires a tokenizer so it can't be used"
    assert_generate_refuses(server, {"structured_outputs": {"regex": "x"}}, sentence, None)


# -- items -------------------------------------------------------------------------------------------------------------

PICTURE = {"image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("fields", "sentence", "param"),
    [
        (
            {"items": {"actions": [PICTURE]}},
            "items.actions[0]: expected a (6, 3) float32 tensor, got a part of kind image.",
            "items.actions[0]",
        ),
        ({"prompt": ACTION, "items": {"actions": [ZEROS[:5]]}}, FIVE_ROWS, "items.actions[0]"),
        (
            {"prompt": ACTION * 2, "items": {"actions": [ZEROS]}},
            f"terra.actions: expected 1 layout [{PAD}] * 6 in the prompt for 1 item, got 2. Write one layout per",
            "items.actions",
        ),
        ({"prompt": ACTION}, NO_ITEM, "items.actions"),
        ({"items": {"image": []}}, "items.image: expected modalities among ['actions'], got 'image'.", "items.image"),
        ({"uuids": {"actions": ["a"]}}, "uuids.actions: expected a field", "uuids.actions"),
    ],
    ids=["a picture", "five rows", "two layouts", "no item", "another modality", "a uuid without an item"],
)
def test_an_item_is_refused(server: Server, fields: dict[str, Any], sentence: str, param: str) -> None:
    assert_generate_refuses(server, fields, sentence, param)


# -- prompts and other fields ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "sentence", "param"),
    [
        ({"prompt": [1, 2**31]}, LARGE_ID, "prompt[1]"),
        ({"prompt": "hello"}, f"prompt: expected token ids, {NO_TOKENIZER} a text.", "prompt"),
        ({"prompt": None}, "prompt: expected a prompt, got none.", "prompt"),
        ({"model": "gpt"}, "model: expected one of terra, got 'gpt'.", "model"),
        (
            {"mm_processor_kwargs": {"a": 1}},
            "mm_processor_kwargs: expected none, got some. They can make a request costly: "
            "--trust-request-mm-kwargs allows",
            "mm_processor_kwargs",
        ),
        ({"output": "film"}, "output: expected one of frame, got 'film'.", "output"),
    ],
    ids=["a large id", "a text", "none", "model", "options", "output"],
)
def test_a_field_is_refused(server: Server, fields: dict[str, Any], sentence: str, param: str) -> None:
    assert_generate_refuses(server, fields, sentence, param)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"max_tokens": 63},
            "max_tokens: expected 64 or none beside output 'frame', got 63. It follows from the",
        ),
        (
            {"ignore_eos": False},
            "ignore_eos: expected True or none beside output 'frame', got False. It follows from",
        ),
        ({"stop_token_ids": [3]}, "stop_token_ids: expected none beside output 'frame', got some."),
        ({"allowed_token_ids": [3]}, "allowed_token_ids: expected none beside output 'frame', got some."),
        (
            {"prompt": make_long_prompt()},
            "prompt: expected at most 1686 tokens before the 64 that follow, got 1728.",
        ),
    ],
    ids=["max_tokens", "ignore_eos", "stop_token_ids", "allowed_token_ids", "a long prompt"],
)
def test_what_contradicts_an_output_is_refused(server: Server, fields: dict[str, Any], sentence: str) -> None:
    assert_generate_refuses(server, {"output": "frame", **fields}, sentence, get_path(sentence))


# -- limits, and vLLM's routes -----------------------------------------------------------------------------------------


def test_too_many_numbers_are_refused(server: Server) -> None:
    body = build_body(prompt=[1], items={"actions": [[0] * (LIMITS["ELEMENTS"] + 1)]})
    sentence = "items.actions[0]: expected at most 100000"
    assert_refused(server, body, sentence, "items.actions[0]", 413, GENERATE)


def test_too_many_items_are_refused(server: Server) -> None:
    body = build_body(prompt=[1], items={"actions": [[0]] * (LIMITS["ITEMS"] + 1)})
    assert_refused(server, body, "items.actions: expected at most 256", "items.actions", 413, GENERATE)


def test_too_many_bytes_are_refused(server: Server) -> None:
    body = b" " * (LIMITS["BODY_BYTES"] + 1)
    assert_refused(server, body, "body: expected at most 1000000 bytes, got", "body", 413, GENERATE)


@pytest.mark.parametrize(
    ("prompt", "sentence", "param"), [([1, 2**31], LARGE_ID, "prompt[1]"), (ACTION, NO_ITEM, "items.actions")]
)
def test_a_prompt_at_vllms_own_route_is_refused(server: Server, prompt: list[int], sentence: str, param: str) -> None:
    body = {"model": "terra", "prompt": prompt}
    assert_refused(server, body, sentence, param, 400, "/v1/completions")


def test_a_chat_needs_a_tokenizer(server: Server) -> None:
    body = {"model": "terra", "messages": [{"role": "user", "content": "drive"}]}
    sentence = f"messages: expected a prompt at /v1/mm/generate, {NO_TOKENIZER} messages."
    assert_refused(server, body, sentence, "messages", 400, "/v1/chat/completions")


def count_refusals_of_items(server: Server) -> float:
    name = 'mmkit:refused_requests_total{modality="actions",reason="item",route="generate"}'
    metrics = httpx.get(f"{server.url}/metrics", timeout=clients.WAIT).text
    total = 0.0
    for line in metrics.splitlines():
        if line.startswith(name):
            total += float(line.rpartition(" ")[2])
    return total


def test_refusals_are_counted(server: Server) -> None:
    before = count_refusals_of_items(server)
    clients.ask(server, {"prompt": ACTION})
    assert count_refusals_of_items(server) == before + 1


def test_the_server_has_the_metrics_of_the_alerts_and_of_the_board(server: Server) -> None:
    """A counter is shown from its first event on."""
    clients.ask(server, {"prompt": ACTION})
    metrics = httpx.get(f"{server.url}/metrics", timeout=clients.WAIT).text
    files = "".join((ROOT / "deploy" / name).read_text() for name in ("alerts.yaml", "grafana.json"))
    named = set(re.findall(r"\b(?:vllm|mmkit):\w+", files))
    assert len(named) > 10
    missing = {name for name in named if name not in metrics}
    assert missing <= {"mmkit:unsound_items_total"}


# -- sessions ----------------------------------------------------------------------------------------------------------

FOURTH_ACTION = encode_array(ACTIONS[0, 3:4])
CLOSE = {"type": "close"}


def make_start(**fields: Any) -> dict[str, Any]:
    """Return a start with three frames and their actions."""
    items = {"actions": encode_array(ACTIONS[0, :3])}
    body = build_body(prompt=make_prompt(0, 3), items=items, max_tokens=64, **GREEDY)
    return {"type": "start", **body, **fields}


def make_next(actions: Any = FOURTH_ACTION, **sampling: Any) -> dict[str, Any]:
    return {"type": "next", "items": {"actions": actions}, "sampling_params": sampling}


def make_zeros(count: int) -> Any:
    return encode_array(np.zeros((count, 6, 3), np.float32))


class SessionClient:
    """A client that knows what it is to hear."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        assert clients.receive(connection)["type"] == "ready"

    def expect_refusal(self, message: Any, sentence: str) -> None:
        clients.send(self._connection, message)
        answer = clients.receive(self._connection)
        assert answer["type"] == "error", answer
        assert answer["error"]["message"].startswith(sentence)

    def expect_chunk(self, message: Any, ids: np.ndarray) -> None:
        """Check a chunk of a session whose window has dropped nothing."""
        clients.send(self._connection, message)
        answer = clients.receive(self._connection)
        assert answer["type"] == "chunk", answer
        assert answer["token_ids"] == ids.tolist()
        assert "slid" not in answer

    def expect_end(self, message: Any) -> None:
        clients.send(self._connection, message)
        assert clients.receive(self._connection)["type"] == "closed"


@pytest.fixture
def session(server: Server) -> Iterator[SessionClient]:
    with clients.open_session(server) as connection:
        yield SessionClient(connection)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (b"x", "body: expected JSON, got invalid JSON at byte 0: invalid character."),
        (
            "x" * (LIMITS["BODY_BYTES"] + 1),
            "message: expected at most 1000000 bytes, got more. Send less at once, or raise",
        ),
        ({"type": "x"}, "type: expected one of start, next, close, got 'x'."),
        (make_next(), 'type: expected "start" at first, got "next".'),
        ({"type": "start"}, f"{PARAMS}.max_tokens: expected a value, got none."),
        (
            {"type": "start", "sampling_params": {"max_tokens": 1}},
            "prompt: expected at least one token in the first",
        ),
        (make_start(sampling_params={"n": 2}), f"{PARAMS}.n: expected 1 in a session, got 2."),
        (make_start(window=3), "window: expected object | null, got int."),
        (make_start(window={"keep": 0}), "window.keep: expected int >= 1, got another."),
        (make_start(window={"keep": 3, "size": 4}), "window.size: expected fields among ['keep'], got 'size'."),
    ],
    ids=["bytes", "long", "type", "next", "no max_tokens", "no prompt", "n", "window", "keep", "window.size"],
)
def test_a_first_message_that_is_refused_begins_nothing(
    session: SessionClient, frames: np.ndarray, message: Any, sentence: str
) -> None:
    session.expect_refusal(message, sentence)
    session.expect_chunk(make_start(), frames[0])


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (make_start(), 'type: expected "next" or "close" after the start, got "start".'),
        (make_next([ZEROS[:5]]), FIVE_ROWS),
        (
            make_next(make_zeros(22), max_tokens=1),
            "terra.actions: expected fewer items, got 25. At most 24 actions(s) may be",
        ),
        (
            {"type": "next", "prompt": [1] * 1500},
            f"{PARAMS}.max_tokens: expected at most 1476 more tokens, got 1500",
        ),
        ({"type": "next", "prompt": [999]}, f"terra.prompt[0]: expected a token id from 0 to {PAD}, got 999"),
    ],
    ids=["start", "five rows", "items", "a long prompt", "an id"],
)
def test_a_message_that_is_refused_adds_nothing(
    session: SessionClient, frames: np.ndarray, message: Any, sentence: str
) -> None:
    session.expect_chunk(make_start(), frames[0])
    session.expect_refusal(message, sentence)
    session.expect_chunk(make_next(), frames[1])
    session.expect_end(CLOSE)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (make_next(max_tokens=10), "max_tokens: expected 64 or none beside output 'frame', got 10"),
        (make_next(make_zeros(25)), "terra.actions: expected fewer items, got 25. At most 24"),
        # at least the last frame remains
        (
            {"type": "next", "prompt": [1] * 1700},
            f"{PARAMS}.max_tokens: expected at most 1686 more tokens, got 1700",
        ),
        (make_next([ZEROS[:5]]), FIVE_ROWS),
    ],
    ids=["max_tokens", "items", "a long prompt", "five rows"],
)
def test_a_message_that_is_refused_moves_no_window(
    session: SessionClient, frames: np.ndarray, message: Any, sentence: str
) -> None:
    session.expect_chunk(make_start(output="frame", window={"keep": 2}), frames[0])
    session.expect_refusal(message, sentence)
    session.expect_chunk(make_next(), frames[1])
