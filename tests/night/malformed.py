"""Malformed requests for a server of Terra, and what it may answer.

They are good requests with changes along the published JSON schema, which says what has to be refused, or with other
bytes, and conversations. tests/engine/terra_server has the sentences. Request i of a seed is always the same one.
"""

from __future__ import annotations

import copy
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from socket import SHUT_RDWR
from typing import Any

import msgspec
import numpy as np
from jsonschema import Draft202012Validator
from websockets.sync.client import ClientConnection

from examples.terra.worlds import make_episode
from mmkit.items.tensor import DTYPES
from mmkit.serve.protocol import ErrorInfo, GenerateRequest, NextMessage, StartMessage, schema
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

REFUSED, TAKEN, EITHER = "refused", "taken", "either"
STOCK = "stock"
"""What a request expects: 4xx, 200, one of both, or, of vLLM's own routes, any answer at all."""

Body = dict[str, Any]


# -- good requests -----------------------------------------------------------------------------------------------------

EPISODES = [make_episode(seed) for seed in range(6)]
FRAMES = np.stack([episode.frames.reshape(len(episode.frames), -1) for episode in EPISODES])
ACTIONS = np.stack([episode.actions for episode in EPISODES]).astype(np.float32)
ITEM = ACTIONS[0, 0]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def prompt_of(episode: int, frames: int) -> list[int]:
    """The first frames of an episode, each with the placeholders of the action after it."""
    return rollouts.prompt_of(EPISODES[episode], frames)


def good(rng: Random) -> Body:
    """A body that the server takes; of few tokens."""
    episode, frames = rng.randrange(len(EPISODES)), rng.randint(1, 3)
    actions = ACTIONS[episode, :frames]
    items = rng.choice((actions.tolist(), raw(actions), [raw(action) for action in actions]))
    prompt = prompt_of(episode, frames)
    return asking(prompt=prompt, items={"actions": items}, max_tokens=rng.randint(1, 4), **GREEDY)


def asking(**fields: Any) -> Body:
    """A body of these fields; what is none of a request is a sampling parameter."""
    own = {name: fields.pop(name) for name in (*StartMessage.__struct_fields__, "type") if name in fields}
    return {**own, "sampling_params": fields}


def sampled(body: Body, **fields: Any) -> Body:
    """The sampling parameters of a body, of which some are these."""
    return {"sampling_params": {**body["sampling_params"], **fields}}


def raw(array: Any, **other: Any) -> Body:
    return {**encode({"x": array})["x"], **other}


def dumped(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode("utf-8", "surrogatepass")


# -- the schema --------------------------------------------------------------------------------------------------------


def or_null(schema: Body) -> Body:
    return {"anyOf": [schema, {"type": "null"}]}


def array(of: Body, **bounds: int) -> Body:
    return {"type": "array", "items": of, **bounds}


def fields(**properties: Body) -> Body:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def encoded(shape: Body) -> Body:
    """An array in base64."""
    plain = fields(data={"type": "string"}, dtype={"enum": list(DTYPES)}, shape=shape)
    return {**plain, "required": ["data", "dtype", "shape"]}


ID = {"type": "integer", "minimum": 0, "maximum": VOCAB - 1}
NUMBER = {"type": "number", "minimum": -1000, "maximum": 1000}
ACTION = array(array(NUMBER, minItems=3, maxItems=3), minItems=STEP, maxItems=STEP)
ANY_ITEM = {"anyOf": [ACTION, encoded({"const": [STEP, 3]}), {"type": "null"}]}
SHAPE = array({"type": "integer"}, minItems=2, maxItems=3)  # of one item, or of a batch
BATCH = {"anyOf": [array(ANY_ITEM, maxItems=LIMIT), encoded(SHAPE)]}
NULL, NOTHING = {"type": "null"}, {"type": ["array", "object", "null"], "maxItems": 0, "maxProperties": 0}
INT32 = 2**31 - 1
SAMPLING: Body = {
    "n": {"type": "integer", "minimum": 1, "maximum": 16384},
    "max_tokens": or_null({"type": "integer", "minimum": 1, "maximum": INT32}),
    "min_tokens": {"type": "integer", "minimum": 0, "maximum": INT32},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1, "maximum": INT32},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "seed": or_null({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}),
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
    "logprobs": or_null({"type": "integer", "minimum": 0, "maximum": 20}),
    "stop_token_ids": or_null(array(ID)),
    "allowed_token_ids": or_null(array(ID, minItems=1)),
    "logit_bias": or_null({"type": "object", "additionalProperties": {"type": "number"}}),
    "ignore_eos": {"type": "boolean"},
    "skip_special_tokens": {"type": "boolean"},
    "structured_outputs": NULL,  # without a tokenizer
    "stop": NOTHING,
}
"""What vLLM takes of `SamplingParams`, as far as it is drawn here."""
OF_THE_MODEL: Body = {
    "prompt": or_null(array(ID)),
    "items": fields(actions=BATCH),
    "uuids": or_null(fields(actions=or_null(array(or_null({"type": "string", "maxLength": 256}))))),
    "model": {"enum": ["terra", None]},
    "sampling_params": or_null(fields(**SAMPLING)),
    "output": {"enum": ["frame", None]},
    "mm_processor_kwargs": NOTHING,
}
"""What is known of a field by the model's spec, as every client can ask for it, and by vLLM."""


def published(message: type[Any]) -> Body:
    """The schema of a message of this model: what does not fit it has to be refused."""
    told = schema(message)
    return {**told, "properties": {name: OF_THE_MODEL.get(name, of) for name, of in told["properties"].items()}}


SCHEMAS = {message: published(message) for message in (GenerateRequest, StartMessage, NextMessage)}
SCHEMAS[GenerateRequest] |= {"required": ["prompt"]}
for properties in (of["properties"] for of in SCHEMAS.values()):
    properties["items"] = or_null(properties["items"])  # the server takes null for no items
SCHEMAS[NextMessage]["properties"]["sampling_params"] = or_null(fields(max_tokens=SAMPLING["max_tokens"]))


def expected(content: bytes, message: type[Any] = GenerateRequest) -> str:
    """What the schema says of a message: that it is refused, or else nothing, since it does not say all."""
    if len(content) > LIMITS["BODY_BYTES"]:
        return REFUSED
    try:
        body = json.loads(content.decode(), parse_constant=int)  # int refuses NaN
    except (ValueError, RecursionError):
        return REFUSED
    return EITHER if Draft202012Validator(SCHEMAS[message]).is_valid(body) else REFUSED


def parts(value: Any, depth: int = 0) -> Iterator[tuple[int, Any, Any]]:
    """Depth, container and key of everything inside; answers stay short, so the number of tokens is left out."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(pairs):
        if key != "max_tokens":
            yield depth, value, key
            yield from parts(part, depth + 1)


INSIDE = [(str(key), holder[key]) for _, holder, key in parts(list(SCHEMAS.values()))]
BOUNDS = sorted(
    {bound for key, bound in INSIDE if key[:3] in ("min", "max", "exc") and isinstance(bound, (int, float))}
)
EDGES = [bound + step for bound in BOUNDS for step in (-1, 0, 1)]
WORDS = sorted({word for key, word in INSIDE if key.isdigit() and isinstance(word, str)})
"""Names and values that schemas list."""
ODD: tuple[Any, ...] = (
    *WORDS, None, True, False, -0.0, 1.0, 1.5, 5e-324, 1e38, 1e300,
    math.nan, math.inf, 2**31, 2**53, 2**64, 2**70, 10**400, "", "1", "AA=", "é", "\x00", "x" * 10_000, [], [[]], [1],
    [1.5], [None], [VOCAB], [2**31], [1] * 1025, {}, {"x": 1}, {"1": 1}, {"-1": 1}, {"type": "text"}, {"choice": ["a"]},
    {"actions": ["a"]}, {"image": ["a"]}, {"role": "user", "content": "drive"}, {"image_url": {"url": "data:,"}},
    {"actions_embeds": []}, {"keep": 3}, [0, 2**40], [2**62, 2**62, 0], [0] * 32, [3, 6], [-6, -3], "../x", "ü\u2028",
)  # fmt: skip


def odd(rng: Random) -> Any:
    return copy.deepcopy(rng.choice((rng.choice(ODD), rng.choice(EDGES))))


def mutate(rng: Random, body: Body, names: Any) -> None:
    """Set a field of these names, or drop, replace, move or lengthen what is there; containers as often as numbers."""
    places = list(parts(body))
    if rng.random() < 0.4 or not places:
        body[rng.choice([*names, "x"])] = odd(rng)
        return
    depth = rng.choice(sorted({place[0] for place in places}))
    _, holder, key = rng.choice([place for place in places if place[0] == depth])
    _, other, name = rng.choice(places)
    value = holder[key]
    match rng.randrange(4):
        case 0:
            del holder[key]
        case 1 if isinstance(value, (list, str)):
            holder[key] = rng.choice((value[:-1], value * rng.choice((0, 2, 5))))
        case 2:
            holder[key] = copy.deepcopy(other[name])
        case _:
            holder[key] = odd(rng)


def mutated(rng: Random, body: Body, message: type[Any] = GenerateRequest) -> bytes:
    for _ in range(rng.choice((1, 1, 2))):
        mutate(rng, body, SCHEMAS[message]["properties"])
    sampling = body.get("sampling_params")
    if sampling is None and message is not NextMessage:
        body["sampling_params"] = {"max_tokens": 2}
    elif isinstance(sampling, dict):
        most = sampling.get("max_tokens")
        if (most is None and message is not NextMessage) or (isinstance(most, int) and most > 64):
            sampling["max_tokens"] = 2
    return dumped(body)


# -- kinds -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Post:
    """One HTTP request."""

    content: bytes
    expects: str
    path: str = GENERATE
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    leave: float | None = None  # seconds after which the client goes away


Play = Callable[["Talk"], None]
"""A conversation."""


def flipped(rng: Random, content: bytes, end: int) -> bytes:
    """Some bytes, of which up to three before an end are others."""
    odd = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        odd[rng.randrange(end)] = rng.choice((rng.randrange(256), *b'09[]{}",:.-eE ntfN'))
    return bytes(odd)


def extremes(schema: Body) -> list[Any]:
    """The ends of the range of a field, if it has one; without that of numbers above 0, the least of these."""
    bounds = schema.get("anyOf", [schema])[0]
    return [bounds.get("minimum", 5e-324), bounds["maximum"]] if "maximum" in bounds else []


EXTREMES = {name: ends for name, of in SAMPLING.items() if (ends := extremes(of))}
NAMES = sorted(EXTREMES.keys() - {"max_tokens", "min_tokens", "n"})  # which contradict others


def extreme(rng: Random) -> Body:
    """Two sampling parameters at an end of their range."""
    return {name: rng.choice(EXTREMES[name]) for name in rng.sample(NAMES, 2)}


# fmt: off
SAMPLED = {"max_tokens": 2, "min_tokens": 0, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0, "logprobs": 1,
           "logit_bias": {"1": 1.0}, "stop_token_ids": [2], "allowed_token_ids": [1, 2], "repetition_penalty": 1.0}
FEATURES = {"mm_hashes": {"actions": ["x"]}, "mm_placeholders": {"actions": [{"offset": 0, "length": 6}]},
            "kwargs_data": {"actions": ["AAAA"]}}
STOCK_BODIES: tuple[tuple[str, Body], ...] = (
    ("/v1/completions", {"prompt": [1, 2, 3], **SAMPLED}),
    ("/inference/v1/generate", {"token_ids": [1, 2, 3], "sampling_params": SAMPLED}),
    ("/inference/v1/generate", {"token_ids": [PAD] * 6, "sampling_params": {"max_tokens": 2}, "features": FEATURES}),
)
# fmt: on


def taken(rng: Random, **more: Any) -> Post:
    body = {**good(rng), "stream": rng.random() < 0.15}
    return Post(dumped({**body, **sampled(body, **more)}), TAKEN)


def written(rng: Random) -> Post:
    """A body of which the schema says what it is, in spite of its headers: changed, cut, or with other bytes."""
    headers = rng.choice(({}, {}, {"content-encoding": "gzip"}, {"content-type": "multipart/form-data; boundary=x"}))
    body = good(rng)
    text = dumped(body)
    match rng.randrange(12):
        case 0:
            text = flipped(rng, text, text.index(b'"sampling_params"'))
        case 1:
            text = rng.choice((b"[" * 100_000, text[: rng.randrange(len(text))], text + text, text + b" " * 10**6))
        case _:
            text = mutated(rng, body)
    return Post(text, expected(text), headers=headers)


def stock(rng: Random, path: str, body: Body) -> Post:
    body = copy.deepcopy({"model": "terra", **body})
    for _ in range(rng.randint(1, 2)):
        mutate(rng, body, ("prompt", "token_ids", *SAMPLED))
    return Post(dumped({**body, "max_tokens": 2}), STOCK, path)


def leaving(rng: Random) -> Post:
    body = good(rng)
    body |= {**sampled(body, max_tokens=200), "stream": rng.random() < 0.5}
    return Post(dumped(body), EITHER, leave=rng.random() * 0.3)


KINDS: dict[str, tuple[float, Callable[[Random], Post | Play]]] = {
    "modalities": (1, lambda rng: Post(b"", TAKEN, "/v1/mm/modalities", "GET")),
    "leaving": (3, leaving),
    "fine": (10, taken),
    "extremes": (20, lambda rng: taken(rng, **extreme(rng))),
    "written": (300, written),
    **{f"stock.{i}": (15, partial(stock, path=path, body=body)) for i, (path, body) in enumerate(STOCK_BODIES)},
}
"""How often a kind of request is drawn, and what is drawn."""


# -- sessions ----------------------------------------------------------------------------------------------------------


class Wrong(Exception):
    """An answer that should not be."""


class Busy(Exception):
    """All sessions are taken."""


Message = Body | str | bytes
Turn = tuple[Message, str]
"""What the client says, and the type of the answer."""


class Talk:
    """One session, from the client's side; every message is checked as it comes."""

    def __init__(self, socket: ClientConnection, rng: Random) -> None:
        self.socket, self.rng = socket, rng
        self.remaining = 0

    def say(self, message: Message) -> None:
        self.socket.send(dumped(message).decode() if isinstance(message, dict) else message)

    def hear(self, *types: str) -> str:
        """The type of the next message that does not only tell tokens."""
        message: Body = {"type": "tokens"}
        while message["type"] == "tokens":
            message = json.loads(self.socket.recv(BOUND_SECONDS))
        kind = message["type"]
        if kind == "error":
            code = message["error"]["code"]
            if code == 429:
                raise Busy
            if (problem := wrong_error(message)) or code >= 500 or message["fatal"]:
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


NEXT: Body = {"type": "next", "items": {"actions": [ITEM.tolist()]}, "sampling_params": {"max_tokens": 2}}
CHUNK: Turn = (NEXT, "chunk")
CLOSED: Turn = ({"type": "close"}, "closed")
GARBAGE: tuple[Message, ...] = (
    "", "x", "[]", "null", '{"type":1}', '{"type":[]}', '{"type":"ready"}', '{"type":"close","x":1}', "[" * 100_000,
    '{"a":' * 50_000, "\x00", "NaN", "ü\u2028" * 1000, '{"type":"\\ud800"}', '{"type":"start","type":1}', b"", b"x",
    '{"type":"start","prompt":[],"sampling_params":{"max_tokens":1}}', bytes(1000), " " * 1_000_001 + "{}",
    '{"type":"start","prompt":[1],"sampling_params":{"max_tokens":1750}}',
    '{"type":"start","sampling_params":{"max_tokens":1},"prompt":[1],"cache_salt":"\\ud800"}',
)  # fmt: skip


def start(rng: Random, **more: Any) -> Body:
    body = good(rng)
    return {"type": "start", **body, "stream": rng.random() < 0.3, **sampled(body, **more)}


def mutated_messages(talk: Talk) -> None:
    """Begin or go on with changed messages, some of which are taken."""
    begun = fine = talk.rng.random() < 0.5
    if fine:
        talk.turns((start(talk.rng), "chunk"))
    for _ in range(3):
        of, body = (NextMessage, copy.deepcopy(NEXT)) if begun else (StartMessage, start(talk.rng))
        content = mutated(talk.rng, body, of)
        talk.say(content.decode())
        begun |= talk.hear("error", *["chunk"] * (expected(content, of) is EITHER)) == "chunk"
    talk.turns(*[CHUNK] * fine, CLOSED)


def garbage(talk: Talk) -> None:
    """Say what is no message, or comes out of order."""
    before, after = talk.rng.choices((NEXT, *GARBAGE), k=5), talk.rng.choices((start(talk.rng), *GARBAGE), k=2)
    talk.turns(*((message, "error") for message in before), (start(talk.rng), "chunk"))
    talk.turns(*((message, "error") for message in after), CHUNK, ({"type": "next"}, "chunk"), CLOSED)


def interrupting(talk: Talk) -> None:
    """Say more before the chunk is whole; what would be right after it may come too late to be refused."""
    more = talk.rng.choices((NEXT, "x", '{"type":"start"}', '{"type":"next","x":1}', "[]"), k=talk.rng.randint(1, 3))
    for message in (start(talk.rng, max_tokens=64), *more):
        talk.say(message)
    answers = [talk.hear("chunk", "error") for _ in range(len(more) + 1)]
    if not 1 <= answers.count("chunk") <= 1 + more.count(NEXT):
        raise Wrong(f"{answers} for {len(more)} message(s) during a chunk")
    talk.turns(CHUNK, CLOSED)


def vanishing(talk: Talk) -> None:
    """Leave without a word: within a frame, during a chunk or after it."""
    match talk.rng.randrange(3):
        case 0:
            frames = (b"", b"\x81\xff", b"\x81\x05he", b"\xff" * 50, b"\x88\x80", b"\x81\x82\0\0\0\0\xff\xfe")
            talk.socket.socket.sendall(talk.rng.choice(frames))
        case 1:
            talk.say(start(talk.rng, max_tokens=1000))
        case _:
            talk.turns((start(talk.rng), "chunk"))
    time.sleep(talk.rng.random() * 0.2)
    with suppress(OSError):  # the server was first
        talk.socket.socket.shutdown(SHUT_RDWR)


PLAYS: dict[Play, float] = {mutated_messages: 70, garbage: 8, interrupting: 12, vanishing: 15}
KINDS |= {f"session.{play.__name__}": (weight, partial(lambda play, rng: play, play)) for play, weight in PLAYS.items()}


# -- requests by number ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One request."""

    number: int
    kind: str
    request: Post | Play

    @property
    def shown(self) -> str:
        """As a report shows it."""
        if not isinstance(self.request, Post):
            return self.request.__name__
        text = self.request.content.decode(errors="replace")
        text = text if len(text) <= SHOWN else f"{text[:100]}...{text[-SHOWN + 110 :]}"
        return f"{self.request.method} {self.request.path} {text}"


def case(seed: int, number: int) -> Case:
    """Request `number` of a seed. The first ones have one of each kind."""
    names = list(KINDS)
    random.Random(seed).shuffle(names)
    rng = random.Random(f"{seed}-{number}")
    name = names[number] if number < len(names) else rng.choices(names, [KINDS[name][0] for name in names])[0]
    return Case(number, name, KINDS[name][1](rng))
