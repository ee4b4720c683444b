"""What clients send to a server of Terra: good requests, requests drawn from its published schema and against it, and
conversations. What they raise is what is wrong with an answer. tests/engine/terra_server has the sentences.
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
from mmkit.serve.decoding import build_schema
from mmkit.serve.protocol import ErrorInfo, GenerateRequest, NextMessage, StartMessage
from mmkit.serve.wire import encode
from tests.engine.terra import rollouts

KEY = "a key"
HEADERS = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
LIMITS = {"BODY_BYTES": 1_000_000, "ELEMENTS": 100_000, "ITEMS": 256, "SESSIONS": 8, "IDLE_SECONDS": 20}
PAD = rollouts.PAD
VOCAB, STEP, LIMIT, MAX_LEN = PAD + 1, 6, 24, 1750
GENERATE, SESSION = "/v1/mm/generate", "/v1/mm/session"
BOUND_SECONDS = 120.0
"""How long any answer may take."""
SHOWN = 600
"""Characters of a request or an answer that a report shows."""
SOCKETS = Semaphore(4)  # sessions at once, beside those of good clients

Body = dict[str, Any]


# -- good requests -----------------------------------------------------------------------------------------------------

FRAMES, ACTIONS = rollouts.stack_episodes(range(6))
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def prompt_of(episode: int, frames: int) -> list[int]:
    """The first frames of an episode, each with the placeholders of the action after it."""
    return [token for frame in FRAMES[episode, :frames].tolist() for token in [*frame, *[PAD] * STEP]]


def asking(**fields: Any) -> Body:
    """A body of these fields; what is none of a request is a sampling parameter."""
    own = {name: fields.pop(name) for name in (*StartMessage.__struct_fields__, "type") if name in fields}
    return {**own, "sampling_params": fields}


def raw(array: Any, **other: Any) -> Body:
    return {**encode({"x": array})["x"], **other}


def dumped(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode("utf-8", "surrogatepass")


def good(draw: Callable[..., Any], **more: Any) -> Body:
    """A body that the server takes; of few tokens."""
    episode, frames = draw(st.integers(0, len(FRAMES) - 1)), draw(st.integers(1, 3))
    form = draw(st.sampled_from((np.ndarray.tolist, raw, lambda actions: [*map(raw, actions)])))
    items = {"actions": form(ACTIONS[episode, :frames])}
    options = {"stream": draw(st.booleans()), "max_tokens": draw(st.integers(1, 4)), **GREEDY, **more}
    return asking(prompt=prompt_of(episode, frames), items=items, **options)


# -- the schema --------------------------------------------------------------------------------------------------------


def array(of: Body, **bounds: int) -> Body:
    return {"type": "array", "items": of, **bounds}


def fields(**properties: Body) -> Body:
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def encoded(shape: Body) -> Body:
    """An array in base64."""
    told = fields(data={"type": "string"}, dtype={"enum": list(DTYPES)}, shape=shape)
    return {**told, "type": "object", "required": ["data", "dtype", "shape"]}


def ids(most: int, **bounds: int) -> Body:
    return array({"type": "integer", "minimum": 0, "maximum": most}, **bounds)


ACTION = array(array({"type": "number", "minimum": -1000, "maximum": 1000}, minItems=3, maxItems=3), minItems=STEP,
    maxItems=STEP)  # fmt: skip
ANY_ITEM = {"anyOf": [ACTION, encoded({"const": [STEP, 3]}), {"type": "null"}]}
SHAPE = array({"type": "integer"}, minItems=2, maxItems=3)  # of one item, or of a batch
OF_THE_MODEL: Body = {
    "prompt": {"anyOf": [ids(PAD), {"type": "null"}]},
    "items": fields(actions={"anyOf": [ACTION, array(ANY_ITEM, maxItems=LIMIT), encoded(SHAPE)]}),
    "uuids": fields(actions={**array({"type": ["string", "null"], "maxLength": 256}), "type": ["array", "null"]}),
    "model": {"enum": ["terra", None]},
    "output": {"enum": ["frame", None]},
    "mm_processor_kwargs": {"type": ["object", "null"], "maxProperties": 0},
}
"""What is known of a field by the model's spec, as every client can ask for it."""
FEW, UNIT = {"type": "integer", "minimum": 1, "maximum": 4}, {"type": "number", "minimum": 0, "maximum": 1}
SAMPLING = dict.fromkeys(("max_tokens", "n", "top_k", "seed", "logprobs"), FEW)
SAMPLING |= dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"), UNIT)
SAMPLING |= dict.fromkeys(("stop_token_ids", "allowed_token_ids"), ids(PAD, minItems=1))
SAMPLING |= {"ignore_eos": {"type": "boolean"}, "logit_bias": {"type": "object"}}
ANSWERED: Body = {
    "prompt": {"anyOf": [{"const": prompt_of(0, 1)}, ids(PAD - 1, minItems=1, maxItems=20)]},
    "items": fields(actions=array(ACTION, minItems=1, maxItems=1)),
    "uuids": {"type": "null"},
    "output": {"type": "null"},
    "sampling_params": {**fields(**SAMPLING), "type": "object", "required": ["max_tokens"]},
}
"""Parts of that, of which more is answered, in few tokens."""
MESSAGES = {"generate": GenerateRequest, "start": StartMessage, "next": NextMessage}
STOCK = ("/v1/completions", "/inference/v1/generate")  # vLLM's own


def cases(url: str) -> dict[str, st.SearchStrategy[Any]]:
    """What a client may say, by message or route: a case of schemathesis, which fits the published schema or not."""
    import schemathesis
    from schemathesis import GenerationMode

    told = httpx.get(f"{url}/openapi.json", timeout=BOUND_SECONDS).json()
    responses = told["paths"][GENERATE]["post"]["responses"]

    def operation(of: Body, known: Body, *needed: str) -> Body:
        properties = {name: known.get(name, own) for name, own in of["properties"].items()}
        whole = {**of, "properties": properties, "required": [*of.get("required", ()), *needed]}
        body = {"required": True, "content": {"application/json": {"schema": whole}}}
        return {"post": {"requestBody": body, "responses": responses}}

    told["paths"] = {path: told["paths"][path] for path in STOCK}
    for name, message in MESSAGES.items():
        fitting = operation(build_schema(message), OF_THE_MODEL | ANSWERED, "prompt", "sampling_params")
        told["paths"] |= {f"/{name}": operation(build_schema(message), OF_THE_MODEL), f"/{name}, fitting": fitting}
    drawn = schemathesis.openapi.from_dict(told)

    def either(fitting: str, other: str) -> st.SearchStrategy[Any]:
        one, two = drawn[fitting]["POST"], drawn[other]["POST"]
        return one.as_strategy(generation_mode=GenerationMode.POSITIVE) | two.as_strategy(
            generation_mode=GenerationMode.NEGATIVE
        )

    own = {name: either(f"/{name}, fitting", f"/{name}") for name in MESSAGES}
    return own | {path: either(path, path) for path in STOCK}


def fits(case: Any) -> bool:
    """Whether a case fits the schema: it may be answered."""
    return case.meta.generation.mode.is_positive


def content_of(case: Any, **more: Any) -> bytes:
    """The bytes of a case, with other values where it is an object; none where it has no body."""
    if not isinstance(case.body, dict | list | str | int | float | None):
        return case.body if isinstance(case.body, bytes) else b""
    return dumped({**case.body, **more} if isinstance(case.body, dict) else case.body)


# -- what a client does ------------------------------------------------------------------------------------------------


class Wrong(Exception):
    """An answer that should not be."""


class Attempt:
    """A client of a server, which draws what it does, and what it has said so far."""

    def __init__(self, url: str, draw: Callable[..., Any], cases: Mapping[str, st.SearchStrategy[Any]]) -> None:
        self.url, self.draw, self._cases = url, draw, cases
        self.said: list[str] = []
        self.status = "cut"

    def case(self, name: str) -> Any:
        return self.draw(self._cases[name])

    def post(self, path: str, content: bytes, expected: str, timeout: float = BOUND_SECONDS, **headers: str) -> Any:
        """The answer, whose status begins with one of the expected digits."""
        self.said.append(f"POST {path} {content[:SHOWN]!r} {headers}")
        # no connection is used twice: what a malformed request does to one is the server's to choose
        answer = httpx.post(self.url + path, content=content, headers={**HEADERS, **headers}, timeout=timeout)
        self.status = str(answer.status_code)
        if self.status[0] not in expected:
            raise Wrong(f"{expected} was expected, answered {self.status}: {answer.text[:300]}")
        return answer

    @contextmanager
    def session(self) -> Iterator[Talk]:
        """A session, as soon as the server has a place for it."""
        url = self.url.replace("http", "ws") + SESSION
        options = {"open_timeout": BOUND_SECONDS, "max_size": None, "proxy": None, "ping_interval": None}
        while True:
            with SOCKETS, connect(url, additional_headers=HEADERS, **options) as socket:
                told = json.loads(socket.recv(BOUND_SECONDS))
                if told["type"] == "ready":
                    yield Talk(socket, self.said)
                    self.status = "200"
                    return
                if told["error"]["code"] != 429:
                    raise Wrong(f"{told}"[:SHOWN])
            time.sleep(0.2)


Message = Body | str | bytes
Turn = tuple[Message, str]
"""What the client says, and the type of the answer."""


class Talk:
    """One session, from the client's side; every message is checked as it comes."""

    def __init__(self, socket: ClientConnection, said: list[str]) -> None:
        self.socket, self.said = socket, said
        self.remaining = 0

    def say(self, message: Message) -> None:
        self.said.append(f"{message!r}"[:SHOWN])
        self.socket.send(dumped(message).decode() if isinstance(message, dict) else message)

    def hear(self, *types: str) -> str:
        """The type of the next message that does not only tell tokens."""
        message: Body = {"type": "tokens"}
        while message["type"] == "tokens":
            message = json.loads(self.socket.recv(BOUND_SECONDS))
        kind = message["type"]
        if kind == "error":
            if (problem := wrong_error(message)) or message["error"]["code"] >= 500 or message["fatal"]:
                raise Wrong(problem or f"the end of a session: {message}"[:SHOWN])
            if self.remaining not in (0, message["remaining"]):
                raise Wrong(f"a refusal changed remaining from {self.remaining} to {message['remaining']}")
        if kind not in types:
            raise Wrong(f"expected {' or '.join(types)}, got {message}"[:SHOWN])
        if kind == "chunk":
            self.remaining = message["remaining"]
        return kind

    def turns(self, *turns: Turn) -> None:
        for message, answer in turns:
            self.say(message)
            self.hear(answer)


def wrong_error(body: Any) -> str:
    """What is wrong with the form of a refusal; nothing if it is empty."""
    try:
        message = msgspec.convert(body["error"], ErrorInfo).message
    except (msgspec.ValidationError, LookupError, TypeError):
        return f"no error body: {body}"[:SHOWN]
    sentence = message and "\n" not in message and "Traceback" not in message and len(message) <= 1000
    return "" if sentence else f"no sentence: {message[:400]!r}"


NEXT: Body = {"type": "next", "items": {"actions": [ACTIONS[0, 0].tolist()]}, "sampling_params": {"max_tokens": 2}}
CHUNK: Turn = (NEXT, "chunk")
CLOSED: Turn = ({"type": "close"}, "closed")
GARBAGE: tuple[Message, ...] = (
    "", "x", "[]", "null", '{"type":[]}', '{"type":"ready"}', '{"type":"close","x":1}', "[" * 100_000, '{"a":' * 50_000,
    "\x00", "NaN", "ü\u2028" * 1000, '{"type":"\\ud800"}', '{"type":"start","type":1}', b"", b"x", bytes(1000),
    " " * 1_000_001 + "{}", '{"type":"start","sampling_params":{"max_tokens":1},"prompt":[1],"cache_salt":"\\ud800"}',
)  # fmt: skip


def start(draw: Callable[..., Any], **more: Any) -> Body:
    return {"type": "start", **good(draw, **more)}


def written(this: Attempt) -> None:
    """A body of which the schema says what it is, in spite of its headers."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    case = this.case("generate")
    headers = this.draw(st.sampled_from(({}, {"content-encoding": "gzip"}, {"content-type": "multipart/form-data"})))
    answer = this.post(GENERATE, content_of(case), "24" if fits(case) else "4", **headers)
    wrong = wrong_error(answer.json()) if this.status[0] == "4" else '"error":{' in answer.text
    told = (checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance)
    try:
        case.validate_response(answer, checks=[not_a_server_error, *told])
    except BaseExceptionGroup as failures:
        wrong = failures
    if wrong:
        raise Wrong(f"{wrong}: {answer.text[:300]}")


def stock(this: Attempt) -> None:
    """A body for one of vLLM's own routes, which may answer as it likes."""
    path = this.draw(st.sampled_from(STOCK))
    few = {"max_tokens": 2, "n": 1}
    this.post(path, content_of(this.case(path), model="terra", sampling_params=few, **few), "245")


def messages(this: Attempt) -> None:
    """Begin or go on with messages of which the schema says what they are; some are taken."""
    begun = fine = this.draw(st.booleans())
    with this.session() as talk:
        if fine:
            talk.turns((start(this.draw), "chunk"))
        for _ in range(3):
            case = this.case("next" if begun else "start")
            talk.say(content_of(case).decode(errors="replace"))
            begun |= talk.hear("error", *["chunk"] * fits(case)) == "chunk"
        talk.turns(*[CHUNK] * fine, CLOSED)


def garbage(this: Attempt) -> None:
    """Say what is no message, or comes out of order."""
    before, after = (this.draw(st.lists(st.sampled_from(GARBAGE), max_size=4)) for _ in range(2))
    with this.session() as talk:
        talk.turns(*((message, "error") for message in (NEXT, *before)), (start(this.draw), "chunk"))
        more = ((message, "error") for message in (*after, start(this.draw)))
        talk.turns(*more, CHUNK, ({"type": "next"}, "chunk"), CLOSED)


def interrupting(this: Attempt) -> None:
    """Say more before the chunk is whole; what would be right after it may come too late to be refused."""
    odd = st.sampled_from((NEXT, "x", '{"type":"start"}', '{"type":"next","x":1}', "[]"))
    more = this.draw(st.lists(odd, min_size=1, max_size=3))
    with this.session() as talk:
        for message in (start(this.draw, max_tokens=64), *more):
            talk.say(message)
        answers = [talk.hear("chunk", "error") for _ in range(len(more) + 1)]
        if not 1 <= answers.count("chunk") <= 1 + more.count(NEXT):
            raise Wrong(f"{answers} for {len(more)} message(s) during a chunk")
        talk.turns(CHUNK, CLOSED)


Kind = Callable[[Attempt], None]
BY_DAY: tuple[Kind, ...] = (garbage, interrupting)  # what needs no schemathesis
KINDS: tuple[Kind, ...] = (*[written] * 10, *[messages] * 4, stock, *BY_DAY)  # as often as they are drawn
