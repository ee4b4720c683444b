"""What clients send to a server of Terra: good requests, requests that fit its published schema or not, and sessions.

A client raises an error if an answer is wrong. tests/engine/terra_server has the sentences of refusals.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Semaphore
from typing import Any

import httpx
import msgspec
import numpy as np
from hypothesis import strategies as st
from websockets.sync.client import ClientConnection, connect

from mmkit.language.items.tensor import DTYPES
from mmkit.serve.protocol import ErrorInfo, GenerateRequest, NextMessage, StartMessage, build_schema
from mmkit.wire.items import encode
from tests.engine.terra import rollouts

KEY = "a key"
HEADERS = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
LIMITS = {"BODY_BYTES": 1_000_000, "ELEMENTS": 100_000, "ITEMS": 256, "SESSIONS": 8, "IDLE_SECONDS": 20}
PAD = rollouts.PAD
VOCAB = PAD + 1
STEP = rollouts.TOKENS_OF_ACTION
LIMIT = 24
"""Actions of a request."""
MAX_LEN = 1750
GENERATE = "/v1/mm/generate"
SESSION = "/v1/mm/session"
BOUND_SECONDS = 120.0
"""How long any answer may take."""
MAX_CHARACTERS_SHOWN = 600
"""Characters of a request or an answer that a report shows."""
SOCKETS = Semaphore(4)
"""Bounds the sessions that are open at once, without those of good clients."""

Body = dict[str, Any]


# -- good requests -----------------------------------------------------------------------------------------------------

FRAMES, ACTIONS = rollouts.stack_episodes(range(6))
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def make_prompt(episode: int, frames: int) -> list[int]:
    """Return the ids of the first frames of an episode, each with the placeholders of the action after it."""
    ids: list[int] = []
    for frame in FRAMES[episode, :frames].tolist():
        ids += frame
        ids += [PAD] * STEP
    return ids


def build_body(**fields: Any) -> Body:
    """Return a body of these fields. A field that a request does not have becomes a sampling parameter."""
    body: Body = {}
    sampling_params: Body = {}
    for name, value in fields.items():
        if name == "type" or name in StartMessage.__struct_fields__:
            body[name] = value
        else:
            sampling_params[name] = value
    body["sampling_params"] = sampling_params
    return body


def encode_array(array: Any, **changes: Any) -> Body:
    """Return an array in base64, with changes of its fields."""
    return encode({"x": array})["x"] | changes


def encode_each(arrays: Any) -> list[Body]:
    return [encode_array(array) for array in arrays]


def dump_body(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode("utf-8", "surrogatepass")


def draw_good_body(draw: Callable[..., Any], **fields: Any) -> Body:
    """Draw a body that the server accepts, whose answer has few tokens."""
    episode = draw(st.integers(0, len(FRAMES) - 1))
    frames = draw(st.integers(1, 3))
    encode_actions = draw(st.sampled_from((np.ndarray.tolist, encode_array, encode_each)))
    body = {
        "prompt": make_prompt(episode, frames),
        "items": {"actions": encode_actions(ACTIONS[episode, :frames])},
        "stream": draw(st.booleans()),
        "max_tokens": draw(st.integers(1, 4)),
    }
    return build_body(**(body | GREEDY | fields))


# -- the schema --------------------------------------------------------------------------------------------------------


def describe_array(items: Body, **bounds: int) -> Body:
    return {"type": "array", "items": items, **bounds}


def describe_object(**properties: Body) -> Body:
    """Return the schema of an object of these properties, or null."""
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def describe_encoded_array(shape: Body) -> Body:
    """Return the schema of an array in base64."""
    schema = describe_object(data={"type": "string"}, dtype={"enum": list(DTYPES)}, shape=shape)
    return schema | {"type": "object", "required": ["data", "dtype", "shape"]}


def describe_ids(largest: int, **bounds: int) -> Body:
    return describe_array({"type": "integer", "minimum": 0, "maximum": largest}, **bounds)


NUMBER = {"type": "number", "minimum": -1000, "maximum": 1000}
ROW = describe_array(NUMBER, minItems=3, maxItems=3)
ACTION = describe_array(ROW, minItems=STEP, maxItems=STEP)
ENCODED_ACTION = describe_encoded_array({"const": [STEP, 3]})
ANY_ITEM = {"anyOf": [ACTION, ENCODED_ACTION, {"type": "null"}]}
SHAPE_OF_ITEM_OR_BATCH = describe_array({"type": "integer"}, minItems=2, maxItems=3)
ENCODED_ACTIONS = describe_encoded_array(SHAPE_OF_ITEM_OR_BATCH)
UUID = {"type": ["string", "null"], "maxLength": 256}
FIELDS_OF_THE_MODEL: Body = {
    "prompt": {"anyOf": [describe_ids(PAD), {"type": "null"}]},
    "items": describe_object(actions={"anyOf": [ACTION, describe_array(ANY_ITEM, maxItems=LIMIT), ENCODED_ACTIONS]}),
    "uuids": describe_object(actions=describe_array(UUID) | {"type": ["array", "null"]}),
    "model": {"enum": ["terra", None]},
    "output": {"enum": ["frame", None]},
    "mm_processor_kwargs": {"type": ["object", "null"], "maxProperties": 0},
}
"""Schemas of fields by the model's spec, which a client can ask the server for."""
UP_TO_FOUR = {"type": "integer", "minimum": 1, "maximum": 4}
UP_TO_ONE = {"type": "number", "minimum": 0, "maximum": 1}
SAMPLING_PARAMS = {
    "max_tokens": UP_TO_FOUR,
    "n": UP_TO_FOUR,
    "top_k": UP_TO_FOUR,
    "seed": UP_TO_FOUR,
    "logprobs": UP_TO_FOUR,
    "temperature": UP_TO_ONE,
    "top_p": UP_TO_ONE,
    "min_p": UP_TO_ONE,
    "presence_penalty": UP_TO_ONE,
    "repetition_penalty": UP_TO_ONE,
    "stop_token_ids": describe_ids(PAD, minItems=1),
    "allowed_token_ids": describe_ids(PAD, minItems=1),
    "ignore_eos": {"type": "boolean"},
    "logit_bias": {"type": "object"},
}
FIELDS_LIKELY_ACCEPTED: Body = {
    "prompt": {"anyOf": [{"const": make_prompt(0, 1)}, describe_ids(PAD - 1, minItems=1, maxItems=20)]},
    "items": describe_object(actions=describe_array(ACTION, minItems=1, maxItems=1)),
    "uuids": {"type": "null"},
    "output": {"type": "null"},
    "sampling_params": describe_object(**SAMPLING_PARAMS) | {"type": "object", "required": ["max_tokens"]},
}
"""Narrower schemas: more of these requests are answered, and in few tokens."""
MESSAGES = {"generate": GenerateRequest, "start": StartMessage, "next": NextMessage}
ROUTES_OF_VLLM = ("/v1/completions", "/inference/v1/generate")


def build_cases(url: str) -> dict[str, st.SearchStrategy[Any]]:
    """Return the cases of schemathesis, by message or route, that fit the published schema or do not."""
    import schemathesis
    from schemathesis import GenerationMode

    document = httpx.get(f"{url}/openapi.json", timeout=BOUND_SECONDS).json()
    responses = document["paths"][GENERATE]["post"]["responses"]

    def describe_operation(message: Body, fields: Body, required: list[str]) -> Body:
        """Return an operation whose body is the message, with these schemas of its fields."""
        schema = message.copy()
        schema["properties"] = {name: fields.get(name, field) for name, field in message["properties"].items()}
        schema["required"] = message.get("required", []) + required
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        return {"post": {"requestBody": body, "responses": responses}}

    paths = {path: document["paths"][path] for path in ROUTES_OF_VLLM}
    for name, message_class in MESSAGES.items():
        message = build_schema(message_class)
        paths[f"/{name}"] = describe_operation(message, FIELDS_OF_THE_MODEL, [])
        paths[f"/{name}, fitting"] = describe_operation(
            message, FIELDS_OF_THE_MODEL | FIELDS_LIKELY_ACCEPTED, ["prompt", "sampling_params"]
        )
    document["paths"] = paths
    operations = schemathesis.openapi.from_dict(document)

    def build_strategy(path_of_fitting: str, path_of_others: str) -> st.SearchStrategy[Any]:
        fitting = operations[path_of_fitting]["POST"].as_strategy(generation_mode=GenerationMode.POSITIVE)
        not_fitting = operations[path_of_others]["POST"].as_strategy(generation_mode=GenerationMode.NEGATIVE)
        return fitting | not_fitting

    cases = {}
    for name in MESSAGES:
        cases[name] = build_strategy(f"/{name}, fitting", f"/{name}")
    for path in ROUTES_OF_VLLM:
        cases[path] = build_strategy(path, path)
    return cases


def fits_schema(case: Any) -> bool:
    """Return whether a case fits the schema: it may be answered."""
    return case.meta.generation.mode.is_positive


def encode_case(case: Any, **fields: Any) -> bytes:
    """Return the bytes of a case, empty if it has no body. These fields replace those of an object."""
    body = case.body
    if isinstance(body, bytes):
        return body
    if isinstance(body, dict):
        return dump_body(body | fields)
    if body is None or isinstance(body, list | str | int | float):
        return dump_body(body)
    return b""


# -- what a client does ------------------------------------------------------------------------------------------------


class WrongAnswerError(Exception):
    """An answer that a server should not give."""


class Attempt:
    """A client of a server, which draws what it sends.

    Attributes:
        messages: all that it has sent, for a report.
        status: the status of the last answer, or "cut" before one.
    """

    def __init__(self, url: str, draw: Callable[..., Any], cases: Mapping[str, st.SearchStrategy[Any]]) -> None:
        self.url = url
        self.draw = draw
        self.messages: list[str] = []
        self.status = "cut"
        self._cases = cases

    def draw_case(self, name: str) -> Any:
        return self.draw(self._cases[name])

    def post(self, path: str, content: bytes, expected: str, timeout: float = BOUND_SECONDS, **headers: str) -> Any:
        """Return the answer.

        Raises:
            WrongAnswerError: its status begins with none of the expected digits.
        """
        self.messages.append(f"POST {path} {content[:MAX_CHARACTERS_SHOWN]!r} {headers}")
        # each request has its own connection, since a server may close that of a malformed request
        answer = httpx.post(self.url + path, content=content, headers=HEADERS | headers, timeout=timeout)
        self.status = str(answer.status_code)
        if self.status[0] not in expected:
            raise WrongAnswerError(f"{expected} was expected, answered {self.status}: {answer.text[:300]}")
        return answer

    @contextmanager
    def open_session(self) -> Iterator[Session]:
        """Open a session, as soon as the server has a place for it."""
        url = self.url.replace("http", "ws") + SESSION
        options = {"open_timeout": BOUND_SECONDS, "max_size": None, "proxy": None, "ping_interval": None}
        while True:
            with SOCKETS, connect(url, additional_headers=HEADERS, **options) as socket:
                message = json.loads(socket.recv(BOUND_SECONDS))
                if message["type"] == "ready":
                    yield Session(socket, self.messages)
                    self.status = "200"
                    return
                if message["error"]["code"] != 429:
                    raise WrongAnswerError(f"{message}"[:MAX_CHARACTERS_SHOWN])
            time.sleep(0.2)


Message = Body | str | bytes
Turn = tuple[Message, str]
"""A message of the client, and the type of the answer."""


class Session:
    """A session from its client's side, which checks each message as it comes.

    Attributes:
        remaining: the positions that the last chunk left, 0 before the first chunk.
    """

    def __init__(self, socket: ClientConnection, messages: list[str]) -> None:
        self.socket = socket
        self.messages = messages
        self.remaining = 0

    def send(self, message: Message) -> None:
        self.messages.append(f"{message!r}"[:MAX_CHARACTERS_SHOWN])
        if isinstance(message, dict):
            message = dump_body(message).decode()
        self.socket.send(message)

    def receive(self, *types: str) -> str:
        """Return the type of the next message that is no "tokens".

        Raises:
            WrongAnswerError: it is none of these types, or an error that is wrong.
        """
        message: Body = {"type": "tokens"}
        while message["type"] == "tokens":
            message = json.loads(self.socket.recv(BOUND_SECONDS))

        message_type = message["type"]
        if message_type == "error":
            self._check_error(message)
        if message_type not in types:
            raise WrongAnswerError(f"expected {' or '.join(types)}, got {message}"[:MAX_CHARACTERS_SHOWN])
        if message_type == "chunk":
            self.remaining = message["remaining"]
        return message_type

    def take_turns(self, *turns: Turn) -> None:
        for message, answer in turns:
            self.send(message)
            self.receive(answer)

    def _check_error(self, message: Body) -> None:
        fault = find_fault_of_error(message)
        if fault:
            raise WrongAnswerError(fault)
        if message["error"]["code"] >= 500 or message["fatal"]:
            raise WrongAnswerError(f"the end of a session: {message}"[:MAX_CHARACTERS_SHOWN])
        if self.remaining not in (0, message["remaining"]):
            raise WrongAnswerError(f"a refusal changed remaining from {self.remaining} to {message['remaining']}")


def find_fault_of_error(body: Any) -> str:
    """Return what is wrong with the form of a refusal, empty if it is right."""
    try:
        message = msgspec.convert(body["error"], ErrorInfo).message
    except (msgspec.ValidationError, LookupError, TypeError):
        return f"no error body: {body}"[:MAX_CHARACTERS_SHOWN]
    is_sentence = message and "\n" not in message and "Traceback" not in message and len(message) <= 1000
    if is_sentence:
        return ""
    return f"no sentence: {message[:400]!r}"


NEXT: Body = {
    "type": "next",
    "items": {"actions": [ACTIONS[0, 0].tolist()]},
    "sampling_params": {"max_tokens": 2},
}
CHUNK: Turn = (NEXT, "chunk")
CLOSED: Turn = ({"type": "close"}, "closed")
GARBAGE: tuple[Message, ...] = (
    "",
    "x",
    "[]",
    "null",
    '{"type":[]}',
    '{"type":"ready"}',
    '{"type":"close","x":1}',
    "[" * 100_000,
    '{"a":' * 50_000,
    "\x00",
    "NaN",
    "ü\u2028" * 1000,
    '{"type":"\\ud800"}',
    '{"type":"start","type":1}',
    b"",
    b"x",
    bytes(1000),
    " " * 1_000_001 + "{}",
    '{"type":"start","sampling_params":{"max_tokens":1},"prompt":[1],"cache_salt":"\\ud800"}',
)


def draw_start(draw: Callable[..., Any], **fields: Any) -> Body:
    return {"type": "start", **draw_good_body(draw, **fields)}


def send_request(attempt: Attempt) -> None:
    """Send a body that fits the schema or does not, and headers that contradict it."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    case = attempt.draw_case("generate")
    headers = attempt.draw(st.sampled_from(({}, {"content-encoding": "gzip"}, {"content-type": "multipart/form-data"})))
    expected = "24" if fits_schema(case) else "4"

    answer = attempt.post(GENERATE, encode_case(case), expected, **headers)

    fault: Any = ""
    if answer.is_client_error:
        fault = find_fault_of_error(answer.json())
    elif '"error":{' in answer.text:
        fault = "an error in an answer"
    try:
        case.validate_response(
            answer,
            checks=[
                not_a_server_error,
                checks.status_code_conformance,
                checks.content_type_conformance,
                checks.response_schema_conformance,
            ],
        )
    except BaseExceptionGroup as failures:
        fault = failures
    if fault:
        raise WrongAnswerError(f"{fault}: {answer.text[:300]}")


def send_to_vllm(attempt: Attempt) -> None:
    """Send a body to one of vLLM's own routes, which may give any answer."""
    path = attempt.draw(st.sampled_from(ROUTES_OF_VLLM))
    case = attempt.draw_case(path)
    content = encode_case(case, model="terra", max_tokens=2, n=1, sampling_params={"max_tokens": 2, "n": 1})
    attempt.post(path, content, "245")


def send_messages(attempt: Attempt) -> None:
    """Send messages of a session that fit the schema or do not. Some are answered."""
    is_started_well = attempt.draw(st.booleans())
    is_started = is_started_well
    with attempt.open_session() as session:
        if is_started_well:
            session.take_turns((draw_start(attempt.draw), "chunk"))
        for _ in range(3):
            case = attempt.draw_case("next" if is_started else "start")
            session.send(encode_case(case).decode(errors="replace"))
            if fits_schema(case):
                answer = session.receive("error", "chunk")
            else:
                answer = session.receive("error")
            if answer == "chunk":
                is_started = True
        if is_started_well:
            session.take_turns(CHUNK)
        session.take_turns(CLOSED)


def send_garbage(attempt: Attempt) -> None:
    """Send texts that are no messages, and messages out of order."""
    garbage = st.lists(st.sampled_from(GARBAGE), max_size=4)
    garbage_before_start = attempt.draw(garbage)
    garbage_after_start = attempt.draw(garbage)
    with attempt.open_session() as session:
        session.take_turns((NEXT, "error"))
        for message in garbage_before_start:
            session.take_turns((message, "error"))

        session.take_turns((draw_start(attempt.draw), "chunk"))

        for message in garbage_after_start:
            session.take_turns((message, "error"))
        session.take_turns((draw_start(attempt.draw), "error"), CHUNK, ({"type": "next"}, "chunk"), CLOSED)


def interrupt_chunk(attempt: Attempt) -> None:
    """Send more messages before a chunk is complete.

    A message that is right after a chunk may arrive so late that it is answered.
    """
    any_message = st.sampled_from((NEXT, "x", '{"type":"start"}', '{"type":"next","x":1}', "[]"))
    interruptions = attempt.draw(st.lists(any_message, min_size=1, max_size=3))
    with attempt.open_session() as session:
        session.send(draw_start(attempt.draw, max_tokens=64))
        for message in interruptions:
            session.send(message)

        answers = [session.receive("chunk", "error") for _ in range(len(interruptions) + 1)]

        most_chunks = 1 + interruptions.count(NEXT)
        if not 1 <= answers.count("chunk") <= most_chunks:
            raise WrongAnswerError(f"{answers} for {len(interruptions)} message(s) during a chunk")
        session.take_turns(CHUNK, CLOSED)


Kind = Callable[[Attempt], None]
"""What a client does."""
BY_DAY: tuple[Kind, ...] = (send_garbage, interrupt_chunk)
"""Kinds that need no schemathesis."""
KINDS: tuple[Kind, ...] = (send_request,) * 10 + (send_messages,) * 4 + (send_to_vllm,) + BY_DAY
"""Each kind as often as it is drawn."""
