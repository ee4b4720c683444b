"""Malformed requests for a server of the road world, and what it may answer.

Request number i of a seed is always the same one. Each is of a named kind: a good body with one change, a body that is
no JSON, a conversation, or a request at one of vLLM's own routes.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import gzip
import io
import itertools
import json
import math
import pickle
import random
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import ValidationError
from safetensors.torch import save as save_safetensors
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from examples.terra.world import make_episode
from mmkit.serve.protocol import ErrorInfo
from mmkit.serve.wire import encode

KEY = "a key"
HEADERS = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
LIMITS = {"BODY_BYTES": 1_000_000, "ELEMENTS": 100_000, "ITEMS": 256, "SESSIONS": 8, "IDLE_SECONDS": 20}
PAD, VOCAB, STEP, LIMIT, MAX_LEN = 31, 32, 6, 24, 1750
GENERATE, SESSION = "/v1/mm/generate", "/v1/mm/session"
BOUND_SECONDS = 120.0
"""How long any answer may take."""
SHOWN = 600
"""Characters of a request or an answer that a report shows."""

REFUSED, TAKEN, EITHER = "refused", "taken", "either"
STOCK = "stock"
"""What a kind expects: 4xx, 200, one of both, or, of vLLM's own routes, any answer at all."""

NAN, INF = math.nan, math.inf
Body = dict[str, Any]
Change = Callable[[Random, Body], Body]
"""The fields that differ from those of a good body; GONE for one that is missing."""
GONE = object()


# -- good requests -----------------------------------------------------------------------------------------------------

EPISODES = [make_episode(seed) for seed in range(6)]
FRAMES = np.stack([episode.frames.reshape(len(episode.frames), -1) for episode in EPISODES])
ACTIONS = np.stack([episode.actions for episode in EPISODES]).astype(np.float32)
ITEM = ACTIONS[0, 0]
LISTED = ITEM.tolist()
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def prompt_of(episode: int, frames: int) -> list[int]:
    """The first frames of an episode, each with the placeholders of the action after it."""
    return [token for frame in FRAMES[episode, :frames].tolist() for token in [*frame, *[PAD] * STEP]]


def good(rng: Random) -> Body:
    """A body that the door takes; of few tokens."""
    episode, frames = rng.randrange(len(EPISODES)), rng.randint(1, 3)
    actions = ACTIONS[episode, :frames]
    items = rng.choice((actions.tolist(), raw(actions), [raw(action) for action in actions]))
    prompt = prompt_of(episode, frames)
    return {"prompt": prompt, "items": {"actions": items}, "max_tokens": rng.randint(1, 4), **GREEDY}


def raw(array: Any, **other: Any) -> Body:
    return {**encode({"x": array})["x"], **other}


def packed(tensors: Any) -> Body:
    content = tensors if isinstance(tensors, bytes) else save_safetensors(tensors)
    return {"safetensors": base64.b64encode(content).decode()}


def dumped(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode("utf-8", "surrogatepass")


# -- kinds -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Post:
    """One HTTP request."""

    content: bytes
    path: str = GENERATE
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"
    leave: float | None = None  # seconds after which the client goes away


@dataclass(frozen=True)
class Script:
    """A conversation."""

    play: Callable[[Talk], Awaitable[None]]
    shown: str


@dataclass(frozen=True)
class Kind:
    """One kind of request: what may come back, and how often it is drawn."""

    name: str
    expects: str
    weight: float
    build: Callable[[Random], Post | Script]
    change: Change | None = None


KINDS: dict[str, Kind] = {}


def add(name: str, expects: str, weight: float, build: Callable[[Random], Any], change: Change | None = None) -> None:
    assert name not in KINDS, name
    KINDS[name] = Kind(name, expects, weight, build, change)


def apply(change: Change, rng: Random, body: Body) -> Body:
    """A body with a change."""
    return {key: value for key, value in {**body, **change(rng, body)}.items() if value is not GONE}


def changed(name: str, expects: str, weight: float, change: Change) -> None:
    """A kind that is a good body with one change."""

    def build(rng: Random) -> Post:
        return Post(dumped(apply(change, rng, {**good(rng), "stream": rng.random() < 0.15})))

    add(name, expects, weight, build, change)


def drawn(rng: Random, values: Sequence[Any]) -> Any:
    """One of some values, or what one of them, a function, gives."""
    value = rng.choice(values)
    return value(rng) if callable(value) else value


def setting(name: str, key: str, expects: str, *values: Any, weight: float | None = None) -> None:
    """A kind whose change is one field."""
    changed(name, expects, weight or 1 + len(values) / 4, lambda rng, body: {key: drawn(rng, values)})


def actions(name: str, expects: str, *values: Any, weight: float | None = None) -> None:
    """A kind whose change is another value for all of the items."""
    setting(name, "items", expects, lambda rng: {"actions": drawn(rng, values)}, weight=weight or 1 + len(values) / 4)


def listed(body: Body) -> list[Any]:
    """As many actions as the prompt of a good body has places for."""
    return [LISTED] * (body["prompt"].count(PAD) // STEP)


def one_item(name: str, expects: str, *values: Any, weight: float | None = None) -> None:
    """A kind whose change is another value for one of the items."""

    def change(rng: Random, body: Body) -> Body:
        items = listed(body)
        items[rng.randrange(len(items))] = drawn(rng, values)
        return {"items": {"actions": items}}

    changed(name, expects, weight or 1 + len(values) / 4, change)


def named(body: Body, names: Sequence[Any]) -> Body:
    """A body's items with these uuids."""
    return {"items": {"actions": listed(body)}, "uuids": {"actions": list(names)}}


@cache
def picture() -> str:
    """A few KB that become 64 million pixels."""
    file = io.BytesIO()
    Image.new("1", (8000, 8000)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def pixels(rng: Random) -> Body:
    kind, of = rng.choice((("image", "image/png"), ("video", "video/jpeg"), ("video", "image/png")))
    return {f"{kind}_url": {"url": f"data:{of};base64,{picture()}"}}


# fmt: off
# -- prompts

IDS = (VOCAB, 99, -1, 2**31, -(2**31), 2**32, 2**63, 2**64, 2**70, 1.5, 1.0, True, "1", None, [1], {}, NAN, INF)
PROMPTS = ([], "drive", 7, {"a": 1}, True, [[1, 2], [3]], [1] * MAX_LEN, [1] * 20_000)
SPELLED = ("prompt.missing",)
"""Refused in a request only: a session writes the prompt."""


def inserted(rng: Random, prompt: list[int]) -> list[int]:
    at = rng.choice((0, len(prompt), rng.randint(1, 63)))
    return [*prompt[:at], *[PAD] * rng.choice((2, 6, 7)), *prompt[at:]]


PROMPT_CHANGES: dict[str, tuple[float, Change]] = {
    "whole": (6, lambda rng, body: {"prompt": rng.choice(PROMPTS), "items": rng.choice((body["items"], GONE))}),
    "missing": (2, lambda rng, body: {"prompt": rng.choice((None, GONE))}),
    "id": (18, lambda rng, body: {"prompt": [rng.choice(IDS), *body["prompt"][1:]]}),
    "id_without_items": (18, lambda rng, body: {"prompt": [1, 2, rng.choice(IDS)][rng.randrange(3):], "items": GONE}),
    "placeholders_without_items": (3, lambda rng, body: {"items": rng.choice((GONE, {}))}),
    "items_without_placeholders": (2, lambda rng, body: {"prompt": body["prompt"][:64]}),
    "fewer_items": (3, lambda rng, body: {"prompt": prompt_of(0, 4), "items": {"actions": listed(body)}}),
    "more_items": (3, lambda rng, body: {"items": {"actions": [*listed(body), *[LISTED] * rng.randint(1, 20)]}}),
    "other_run": (5, lambda rng, body: {"prompt": inserted(rng, body["prompt"])}),
    "cut_run": (2, lambda rng, body: {"prompt": body["prompt"][: -rng.randint(1, 5)]}),
}
for name, (weight, change) in PROMPT_CHANGES.items():
    changed(f"prompt.{name}", REFUSED, weight, change)

# -- shapes, values and dtypes

SHAPES = ((5, 3), (6, 4), (3, 6), (7, 3), (18,), (1, 6, 3), (6, 3, 1), (), (0,), (0, 3), (6, 0), (1, 1), (12, 3),
          (2, 6, 3), (1,) * 9)
BATCHES = ((0, 6, 3), (2, 5, 3), (18,), (), (25, 6, 3))
DTYPES = ("complex64", "complex128", "float8", "float8_e4m3fn", "object", "<f4", "f4", "float32 ", "FLOAT32", "", "str",
          "uint16", "uint64", "torch.float32", "O", None, 7, True, [], {}, ["float32"], "float32\x00",
          "float64", "float16")
INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "bool")
TORCH_DTYPES = (torch.complex64, torch.bool, torch.int64, torch.uint8, torch.uint16, torch.uint64, torch.float8_e4m3fn)
NO_NUMBERS = (True, "1", None, {"real": 1, "imag": 2}, 2**31, 2**63, 2**70, 10**400)
UNEVEN = ([[1] * 3] * 5 + [[1]], [[1, 2, 3]] * 5 + [1], json.loads("[" * 40 + "1" + "]" * 40), [[]] * 6)


def formed(rng: Random, array: Any) -> Any:
    """An array in one of the forms of the wire."""
    return drawn(rng, (array.tolist(), lambda _: raw(array), lambda _: packed({"x": torch.as_tensor(array)})))


def odd_number(rng: Random) -> Any:
    item = torch.from_numpy(ITEM).double()
    item[rng.randrange(6), rng.randrange(3)] = rng.choice((NAN, INF, -INF, 1e38, 1e300, 2000.0))
    return formed(rng, item.to(rng.choice((torch.float16, torch.bfloat16, torch.float32, torch.float64))))


one_item("shape.item", REFUSED, lambda rng: formed(rng, np.full(rng.choice(SHAPES), 0.5, np.float32)), weight=20)
one_item("shape.uneven", REFUSED, *UNEVEN)
actions("shape.batch", REFUSED, lambda rng: raw(np.zeros(rng.choice(BATCHES), np.float32)), weight=5)
one_item("value.odd", REFUSED, odd_number, weight=15)
one_item("value.no_number", REFUSED, lambda rng: [[rng.choice(NO_NUMBERS), 2, 3]] * 6, weight=6)
one_item("value.fine", TAKEN, lambda rng: formed(rng, ITEM), [[1000.0, -1000.0, 0.0]] * 6, [[1, 2, 3]] * 6,
         [[1e-45, -0.0, 1e-300]] * 6, raw(ITEM.astype(np.float64)), raw(torch.from_numpy(ITEM).bfloat16()))
one_item("dtype.integers", EITHER, lambda rng: raw(np.ones((6, 3), rng.choice(INTEGERS))), weight=2)
one_item("dtype.unknown", REFUSED, lambda rng: raw(ITEM, dtype=rng.choice(DTYPES)), weight=5)
one_item("dtype.safetensors", EITHER, lambda rng: packed({"x": torch.ones(6, 3).to(rng.choice(TORCH_DTYPES))}))

# -- forms of items

URLS = ("http://127.0.0.1:9/x.png", "file:///etc/passwd", "data:x", "data:image/png;base64,AAAA", "", "ftp://x",
        "x" * 5000, "data:image/png;base64,", "data:video/mp4;base64,AAAA", "data:audio/wav;base64,UklGRg==",
        "http://[", "DATA:,", "data:;base64,iVBORw0KGgoAAAANSUhEUv////8=")
NO_URLS = ("x", None, {}, {"url": None}, {"url": 3}, [], {"url": ["x"]})
BASE64 = ("!", "AA=", "A", "AAAA=AAA", "é", "AAAA\n", " ", "\x00", None, 1, [], {}, "AA AA")
SIZES = ([6], [6, 3, 1], [3, 6], [-6, -3], [-1, 3], [6.0, 3], ["6", 3], [True, 18], [None], None, 18, "6x3", {}, [],
         [2**31, 2**33], [2**70], [18] + [1] * 40, [[6, 3]], [1] * 40, [6, 3, 0])
NO_SIZES = ([0, 2**40], [2**40, 2**40, 0], [2**62, 2**62, 0], [2**63, 0], [2**70, 0], [0] * 32, [0, -1], [2**63 - 1, 0])
NAMES = ("actionz", "action", "Actions", "image", "video", "", "actions.0", "__class__", "actions\x00")
FINE = save_safetensors({"x": torch.from_numpy(ITEM.copy())})

NO_FILES = (b"", b"x", bytes(8), FINE[:-1], FINE[:20], FINE + b"x", struct.pack("<Q", 2**63) + b"{}",
            *(struct.pack("<Q", len(text)) + text for text in (b"{", b"[]", b"{}", b'{"__metadata__":{"a":"b"}}',
                                                               b'{"x":' * 2000 + b"1" + b"}" * 2000)),
            save_safetensors({"a": torch.zeros(6, 3), "b": torch.zeros(6, 3)}), pickle.dumps(ITEM))
TENSORS = list(itertools.product(
    ("F32", "C64", "F4", "F8_E8M0", "X"),
    ([6, 3], [3, 3], [-6, -3], [2**62, 2**62], [2**62, 2**62, 0], [0, 2**62], [2**64, 0]),
    ([0, 72], [72, 0], [0, 0], [0, 9], [0, 18], [0, 2**62]),
))[1:]
"""Dtypes, shapes and offsets in the head of a safetensors file; the first ones were right."""


def odd_file(rng: Random) -> Body:
    dtype, shape, offsets = rng.choice(TENSORS)
    text = dumped({"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}})
    return packed(struct.pack("<Q", len(text)) + text + bytes(min(offsets[1], 72)))


def flipped(rng: Random) -> Body:
    content = bytearray(FINE)
    for _ in range(rng.randint(1, 4)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    return packed(bytes(content))


def media(rng: Random, parts: Sequence[Any], **more: str) -> Body:
    return {rng.choice(("image_url", "video_url", "audio_url")): rng.choice(parts), **more}


one_item("item.no_form", REFUSED, None, "x", {}, True, 1.5, {"data": ""}, {"shape": [6, 3]}, {"dtype": "x"},
         {"data": "", "dtype": "float32", "shape": [0], "x": 1})
actions("items.no_form", REFUSED, None, "x", {}, True, 1.5, [])
setting("items.no_object", "items", REFUSED, None, "x", [], True, 1.5)
actions("items.embeds", REFUSED, {"actions_embeds": raw(np.zeros((6, 128), np.float32))},
        json.loads('{"a_embeds":' * 100 + "[]" + "}" * 100))
actions("items.too_large", REFUSED, [[0] * 60_000] * 2, lambda rng: raw(np.zeros(100_001, np.uint8)), weight=0.4)
actions("items.too_many", REFUSED, *([LISTED] * count for count in (25, 256, 257, 1000)), weight=0.5)
setting("items.name", "items", REFUSED, lambda rng: {rng.choice(NAMES): [LISTED]}, weight=3)
changed("items.another_name", REFUSED, 1, lambda rng, body: {"items": {**body["items"], rng.choice(NAMES): [LISTED]}})
one_item("media.url", REFUSED, lambda rng: media(rng, [{"url": url} for url in URLS]), weight=3)
one_item("media.pixels", REFUSED, lambda rng: pixels(rng), weight=1)
setting("media.of_no_modality", "items", REFUSED, lambda rng: {"image": [pixels(rng)] * 10}, weight=0.5)
one_item("media.no_url", REFUSED, lambda rng: media(rng, NO_URLS, type="image_url"))
one_item("raw.base64", REFUSED, lambda rng: raw(ITEM, data=rng.choice(BASE64)), weight=3)
CONTENTS = [base64.b64encode(content).decode() for content in (b"", b"x", bytes(71), bytes(73), pickle.dumps(ITEM))]
one_item("raw.length", REFUSED, lambda rng: raw(ITEM, data=rng.choice(CONTENTS)), weight=2)
one_item("raw.shape", REFUSED, lambda rng: raw(ITEM, shape=rng.choice(SIZES)), weight=4)
one_item("raw.nothing", REFUSED, lambda rng: raw(ITEM, data="", shape=rng.choice(NO_SIZES)), weight=3)
one_item("raw.bool_bytes", REFUSED, raw(np.zeros((6, 12), np.uint8) + 2, dtype="bool"))
one_item("safetensors.broken", REFUSED, odd_file, lambda rng: packed(rng.choice(NO_FILES)), weight=10)
one_item("safetensors.flipped", EITHER, flipped, weight=3)
one_item("safetensors.no_text", REFUSED, *({"safetensors": value} for value in (None, 1, [], {}, "!", "AAA")))

# -- fields

COUNTS = (-1, 1.5, "1", True, [], {}, 2**31, 2**63, 2**70, -(2**31), NAN, INF)
NUMBERS = ("1", True, [], {}, NAN, INF, -INF, 1e400, -200)
ODD_IDS = ([VOCAB], [-1], [2**31], [2**63], [2**70], [1.5], ["1"], [True], [None], 1, "1", {}, [[1]], [1, 99])
SAID = {"role": "user", "content": "drive"}
FIELDS: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {
    "max_tokens": ((0, *COUNTS), ()),
    "min_tokens": (COUNTS, ()),
    "n": ((None, 0, 129, 10**6, *COUNTS), ()),
    "temperature": ((-1, 2.1, 101, 1e38, *NUMBERS), (0, 1e-300, 5e-324, 1e-5, 0.009, 2, None)),
    "top_p": ((0, 0.0, 1.0000001, -1, 2**70, *NUMBERS), (5e-324, 1e-30, 1, 1.0, None)),
    "min_p": ((-0.1, 1.1, 1e300, *NUMBERS), (0, 1, 1.0, 5e-324, None)),
    "top_k": (COUNTS, (0, 1, 31, 32, 33, 2**31 - 1, None)),
    "seed": ((2**63, -(2**63) - 1, 2**64, 2**70, 1.5, "1", True, [], {}, NAN), (2**63 - 1, -(2**63), 0, -1, None)),
    "presence_penalty": ((-2.1, 2.1, 2**70, *NUMBERS), (-2, 2, 0)),
    "frequency_penalty": ((-2.1, 2.1, 1e308, *NUMBERS), (-2, 2, 0)),
    "repetition_penalty": ((0, -1, 101, 1e308, *NUMBERS), (5e-324, 1e-30, 100, 1)),
    "logprobs": ((21, 1000, VOCAB, *COUNTS), (0, 1, 20, None)),
    "stop_token_ids": (([1] * 1025, *ODD_IDS), ([], [31], list(range(32)), [1] * 1024, None)),
    "allowed_token_ids": (([], [31], *ODD_IDS), ([0], list(range(32)), [1] * 1000, None)),
    "logit_bias": (([], 1, {"x": 1}, {"-1": 1}, {"1.0": 1}, {str(VOCAB): 1}, {str(2**31): 1}, {"1": 101}, {"1": "1"},
                    {"1": None}), ({}, {"0": -100}, {"31": 100}, {str(i): 0.5 for i in range(VOCAB)}, None)),
    "structured_outputs": (({}, [], 1, "x", {"choice": ["a"]}, {"regex": "("}, {"json": {}}, {"x": 1}), (None,)),
    "response_format": (({}, [], 1, "json", {"type": "xml"}, {"type": "json_object"}, {"type": "json_schema"}),
                        ({"type": "text"}, None)),
    "ignore_eos": ((0, 1, "true", [], {}, 1.0), ()),
    "skip_special_tokens": ((0, "false", [], 2), ()),
    "stop": ((["x"], "x", [1], [""], ["x"] * 65, {}, [None], 1), ()),
    "stream": ((1, "true", None, [], {}), ()),
    "model": (("gpt", "", 1, [], {}, "terra\x00", "x" * 10_000, True), ()),
    "cache_salt": (("", 1, [], {}, True), ("\x00", "ü", "x" * 10_000, None)),
    "mm_processor_kwargs": (({"a": 1}, {"fps": 2}, [], 1, "x", {"terra": None}), ()),
    "messages": ((1, "x", {}, [], [1], [{}], [SAID], [{**SAID, "content": [{"type": "actions", "actions": LISTED}]}]),
                 (None,)),
    "add_generation_prompt": ((0, "x", [], True, False), (None,)),
    "chat_template_kwargs": ((1, "x", [], {}, {"chat_template": "x"}), (None,)),
    "uuids": (({"image": ["a"]}, {"actions": "a"}, {"actions": [1]}, [], 1, "x"), ({"actions": None},)),
}
UNKNOWN = ("prompt_logprobs", "truncate_prompt_tokens", "use_beam_search", "best_of", "",
           "multi_modal_data", "prompt_embeds", "extra_args", "type", "__proto__")


def sampled(rng: Random, body: Body) -> Body:
    return {
        "temperature": rng.choice((0.5, 1.0, 2.0)), "top_p": rng.random() * 0.99 + 0.01, "top_k": rng.choice((0, 1, 5)),
        "min_p": rng.random(), "seed": rng.getrandbits(62), "repetition_penalty": rng.choice((0.5, 2.0, 100)),
        "n": rng.randint(1, 4), "logprobs": rng.randint(0, 20), "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
    }


def beyond(rng: Random, body: Body) -> Body:
    return {"prompt": [1] * 1700, "items": GONE, "max_tokens": rng.choice((51, 100, 2**31 - 1))}


def never_seen(rng: Random, body: Body) -> Body:
    names = [f"never-{rng.random()}" for _ in listed(body)]
    return {"items": {"actions": [None] * len(names)}, "uuids": {"actions": names}}


def odd_names(rng: Random, body: Body) -> Body:
    odd = ("", "\x00", "a" * 10_000, "ü\u2028", "../x", None, f"shared-{rng.randrange(3)}")
    return named(body, [rng.choice(odd) for _ in listed(body)])


def of_another(rng: Random, body: Body) -> Body:
    """Names that requests without a salt, or with another one, may have given."""
    names = [rng.choice(("", f"shared-{rng.randrange(3)}", f"own-{rng.randrange(3)}")) for _ in listed(body)]
    salt = {"cache_salt": f"stranger-{rng.random()}"}
    return {"items": {"actions": [None] * len(names)}, "uuids": {"actions": names}, **salt}


def own_names(rng: Random, body: Body) -> Body:
    names = [f"own-{rng.randrange(3)}" for _ in listed(body)]
    return {**named(body, names), "cache_salt": f"tenant-{rng.randrange(3)}"}


def many(rng: Random, body: Body) -> Body:
    """Thousands of mistakes in one body."""
    count = rng.choice((1000, 100_000))
    wrong = rng.choice((-1, "x", None, [], 1.5))
    return rng.choice((
        {"allowed_token_ids": [wrong] * count}, {"stop_token_ids": [wrong] * count}, {"prompt": ["x"] * count},
        {"uuids": {"actions": [1] * count}}, {"uuids": {f"u{i}": [None] for i in range(count // 10)}},
        {"items": {f"m{i}": [] for i in range(count // 10)}}, {"items": {"actions": [[]] * count}},
    ))


def long_names(rng: Random, body: Body) -> Body:
    """Texts that an error must not repeat."""
    text = rng.choice(("n", "ü", "\n", "%s")) * rng.choice((1000, 100_000))
    return rng.choice((
        {text: 1}, {"items": {text: [LISTED]}}, {"items": {"actions": [{text: 1}]}}, {"items": {f"{text}_embeds": [1]}},
        {"uuids": {text: ["x"]}}, {"model": text}, {"items": {"actions": {"data": "", "dtype": text, "shape": [1]}}},
        named(body, [text for _ in listed(body)]),
    ))


for name, (refused, taken) in FIELDS.items():
    setting(f"field.{name}", name, REFUSED, *refused, weight=2)
    if taken:
        setting(f"extreme.{name}", name, TAKEN, *taken)
changed("messages.alone", REFUSED, 2, lambda rng, body: {
    "prompt": GONE, "items": GONE, "messages": rng.choice(([SAID], [1], [{"role": 1}], [SAID] * 20_000))})
changed("field.unknown", REFUSED, 2, lambda rng, body: {rng.choice(UNKNOWN): rng.choice((1, None, {}, [], "x"))})
changed("field.several_greedy", REFUSED, 1, lambda rng, body: {"n": rng.choice((2, 128))})
changed("field.min_above_max", REFUSED, 1, lambda rng, body: {"min_tokens": rng.choice((5, 100, 2**31 - 1))})
changed("extreme.n", TAKEN, 1, lambda rng, body: {"n": rng.choice((1, 2, 16)), "temperature": 1.0})
changed("extreme.beyond_the_model", TAKEN, 0.3, beyond)
changed("extreme.min_tokens_and_all_stops", TAKEN, 1, lambda rng, body: {
    "min_tokens": body["max_tokens"], "stop_token_ids": list(range(32)), "ignore_eos": False})
changed("extreme.sampled", TAKEN, 2, sampled)
changed("uuids.never_seen", REFUSED, 2, never_seen)
changed("uuids.wrong_count", REFUSED, 2, lambda rng, body: named(body, ["u"] * rng.choice((0, 4, 100))))
changed("uuids.too_long", REFUSED, 2, lambda rng, body: named(
    body, ["n" * rng.choice((257, 10_000, 300_000)) for _ in listed(body)]))
changed("uuids.of_another_tenant", REFUSED, 4, of_another)
changed("uuids.of_a_tenant", TAKEN, 2, own_names)
changed("costs.many_mistakes", REFUSED, 0.5, many)
changed("costs.long_names", REFUSED, 0.5, long_names)
changed("uuids.fine", TAKEN, 1, lambda rng, body: named(body, [f"{rng.random()}" for _ in listed(body)]))
changed("uuids.odd_or_shared", EITHER, 2, odd_names)
changed("fine.generate", TAKEN, 10, lambda rng, body: {})
CHANGES = [name for name, kind in KINDS.items() if kind.weight >= 1]
"""What a body can have several of."""


# -- bodies that are no JSON, and JSON at random -----------------------------------------------------------------------

SURROGATES = (b',"cache_salt":"\\ud800"}', b',"model":"\\udfff"}', b',"uuids":{"actions":["\\ud83d"]}}',
              b',"model":"\xed\xa0\x80"}')


def nested(rng: Random, before: bytes, opening: bytes, closing: bytes) -> bytes:
    deep = rng.choice((40, 190, 1000, 20_000))
    return b'{"prompt":[1],"items":' + before + opening * deep + b"1" + closing * deep + b"}" * (1 + bool(before))


BODIES: dict[str, tuple[str, float, Callable[[Random, bytes], bytes]]] = {
    "no_json": (REFUSED, 2, lambda rng, text: rng.choice((b"", b"hello", b"{", b"\x00" * 50, b"a=1&b=2", b"{'a': 1}"))),
    "no_object": (REFUSED, 1, lambda rng, text: rng.choice((b"[]", b"1", b"null", b"true", b"[" + text + b"]"))),
    "cut": (REFUSED, 3, lambda rng, text: text[: rng.randrange(1, len(text) - 1)]),
    "two": (REFUSED, 1, lambda rng, text: text + text),
    "encoding": (REFUSED, 1, lambda rng, text: text.decode().encode(rng.choice(("utf-16", "utf-32", "utf-16-be")))),
    "latin_1": (REFUSED, 1, lambda rng, text: text[:-1] + ',"model":"ü"}'.encode("latin-1")),
    "bom": (EITHER, 1, lambda rng, text: b"\xef\xbb\xbf" + text),
    "surrogates": (REFUSED, 1, lambda rng, text: text[:-1] + rng.choice(SURROGATES)),
    "gzip": (REFUSED, 1, lambda rng, text: gzip.compress(text, mtime=0)),
    "no_gzip": (EITHER, 1, lambda rng, text: text),
    "content_type": (EITHER, 1, lambda rng, text: text),
    "form": (REFUSED, 1, lambda rng, text: b"--x\r\n\r\n" + text + b"\r\n--x--"),
    "unclosed": (REFUSED, 1, lambda rng, text: rng.choice((b"[", b'{"a":')) * rng.choice((150, 1000, 100_000))),
    "deep_items": (REFUSED, 2, lambda rng, text: nested(rng, b'{"actions":', b"[", b"]")),
    "deep_objects": (REFUSED, 1, lambda rng, text: nested(rng, b"", b'{"a":', b"}")),
    "long_number": (REFUSED, 1, lambda rng, text: text[:-1] + b',"n":' + b"9" * rng.choice((30, 4301, 50_000)) + b"}"),
    "same_keys": (EITHER, 1, lambda rng, text: text[:-1] + b',"max_tokens":1,"max_tokens":2}'),
    "too_large": (REFUSED, 0.4, lambda rng, text: text[:-1] + b" " * 1_000_001 + b"}"),
    "far_too_large": (REFUSED, 0.05, lambda rng, text: b"[" * 5_000_000),
    "many_keys": (REFUSED, 0.3, lambda rng, text: dumped({f"k{i}": i for i in range(5000)})),
    "spaces": (TAKEN, 0.5, lambda rng, text: b" \n\t" * 1000 + text + b"\r\n"),
}
BODY_HEADERS = {
    "gzip": {"content-encoding": "gzip"}, "no_gzip": {"content-encoding": "gzip"},
    "content_type": {"content-type": "text/plain"}, "form": {"content-type": "multipart/form-data; boundary=x"},
}
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 31, 32, 2**31, 2**53, 2**63, 2**70, 1.5, -0.0, 1e38, 1e300, NAN, INF, "", "x",
    "actions", "AAAA", "float32", "\x00", "ü", [], [[]], [1], {}, {"x": 1}, [None], [True], [1.5],
    {"data": "AAAA", "dtype": "uint8", "shape": [3]}, {"image_url": {"url": "data:,"}}, {"safetensors": "AAAA"},
)


def add_body(name: str, expects: str, weight: float, content: Callable[[Random, bytes], bytes]) -> None:
    headers = BODY_HEADERS.get(name, {})
    add(f"body.{name}", expects, weight, lambda rng: Post(content(rng, dumped(good(rng))), headers=headers))


for name, row in BODIES.items():
    add_body(name, *row)
METHODS = ("GET", "PUT", "DELETE", "PATCH")
PATHS = ("/v1/mm/x", "/v1/mm", "/v1/mm/generate/x", SESSION)
add("path.method", REFUSED, 1, lambda rng: Post(b'{"prompt":[1]}', method=rng.choice(METHODS)))
add("path.unknown", REFUSED, 1, lambda rng: Post(b'{"prompt":[1]}', path=rng.choice(PATHS)))
add("fine.modalities", TAKEN, 1, lambda rng: Post(b"", path="/v1/mm/modalities", method="GET"))


def parts(value: Any, depth: int = 0) -> Iterator[tuple[int, Any, Any]]:
    """Depth, container and key of everything inside; answers stay short, so the number of tokens is left out."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(pairs):
        if key != "max_tokens":
            yield depth, value, key
            yield from parts(part, depth + 1)


def mutate(rng: Random, body: Body) -> None:
    """Drop, replace, double or move something; containers as often as numbers."""
    places = list(parts(body))
    if not places:
        return
    depth = rng.choice(sorted({place[0] for place in places}))
    _, holder, key = rng.choice([place for place in places if place[0] == depth])
    _, other, name = rng.choice(places)
    value = copy.deepcopy(rng.choice((rng.choice(ODD), rng.choice(ODD), other[name])))
    if len(dumped(value)) > 5000:
        return
    match rng.randrange(4):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, list):
            holder.insert(key, value)
        case 1:
            holder[rng.choice((*FIELDS, "prompt", "items", "x"))] = value
            body["max_tokens"] = 2
        case _:
            holder[key] = value


def mutated_json(rng: Random) -> Post:
    body = good(rng)
    for _ in range(rng.randint(1, 3)):
        mutate(rng, body)
    return Post(dumped(body))


def mutated_bytes(rng: Random) -> Post:
    body = {"prompt": prompt_of(0, 1), "items": {"actions": [raw(ITEM)]}, "max_tokens": 2, **GREEDY}
    text = bytearray(dumped(body))
    end = text.index(b'"max_tokens"')
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(end)
        odd = (bytes([rng.randrange(256)]), rng.choice('0123456789[]{}",:.-eE ntfN').encode())
        if rng.random() < 0.7:
            text[at : at + 1] = rng.choice(odd)
        else:
            text[at:at] = text[at : at + rng.randint(1, 20)]
    return Post(bytes(text))


def combined(rng: Random) -> Post:
    body = good(rng)
    for name in rng.sample(CHANGES, rng.randint(2, 3)):
        with suppress(Exception):  # what one takes away the next may want
            body = apply(KINDS[name].change, rng, body)
    if body.get("max_tokens") is None:
        body["max_tokens"] = 2
    return Post(dumped(body))


def left(rng: Random) -> Post:
    body = {**good(rng), "max_tokens": 200, "stream": rng.random() < 0.5}
    return Post(dumped(body), leave=rng.random() * 0.3)


add("mutated.json", EITHER, 60, mutated_json)
add("mutated.bytes", EITHER, 30, mutated_bytes)
add("mutated.combined", EITHER, 40, combined)
add("client.leaves", EITHER, 3, left)


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

    async def say(self, message: Message) -> None:
        await self.socket.send(dumped(message).decode() if isinstance(message, dict) else message)

    async def hear(self, *types: str) -> str:
        """The type of the next message that does not only tell tokens."""
        message: Body = {"type": "tokens"}
        while message["type"] == "tokens":
            message = json.loads(await self.socket.recv())
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

    async def turns(self, *turns: Turn) -> None:
        for message, answer in turns:
            await self.say(message)
            await self.hear(answer)


def wrong_error(body: Any) -> str:
    """What is wrong with the form of a refusal; nothing if it is empty."""
    try:
        message = ErrorInfo.model_validate(body["error"], strict=True).message
    except (ValidationError, LookupError, TypeError):
        return f"no error body: {body}"[:SHOWN]
    sentence = message and "\n" not in message and "Traceback" not in message and len(message) <= 1000
    return "" if sentence else f"no sentence: {message[:400]!r}"


NEXT: Body = {"type": "next", "items": {"actions": [LISTED]}, "max_tokens": 2}
CHUNK: Turn = (NEXT, "chunk")
CLOSED: Turn = ({"type": "close"}, "closed")
ITEM_KINDS = ("shape.", "value.", "dtype.", "item.", "items.", "raw.", "safetensors.", "media.")
REFUSED_CHANGES = [name for name in KINDS if KINDS[name].change and KINDS[name].expects is REFUSED]
GARBAGE = (
    "", "x", "{", "[]", "null", "1", '"start"', "{}", '{"type":1}', '{"type":null}', '{"type":[]}', '{"type":"x"}',
    '{"type":"ready"}', '{"type":"start"}', '{"type":"close","x":1}', "[" * 100_000, '{"a":' * 50_000, "\x00", "NaN",
    '{"type":"start","max_tokens":1}', '{"type":"start","prompt":[1]}', '{"type":"next","x":1}', "ü\u2028" * 1000,
    '{"type":"start","prompt":[],"max_tokens":1}', '{"type":"start","max_tokens":1,"items":{}}', "\ud7ff",
    '{"type":"\\ud800"}', '{"type":"start","max_tokens":1,"prompt":[1],"cache_salt":"\\ud800"}',
    '{"type":"start","type":1}', '{"type":"start","prompt":[1],"max_tokens":1750}',
    '{"type":"start","prompt":[1],"max_tokens":2147483648}',
)


def start(rng: Random, **more: Any) -> Body:
    return {"type": "start", **good(rng), "stream": rng.random() < 0.3, **more}


def started(rng: Random) -> Turn:
    return start(rng), "chunk"


def odd_turns(rng: Random, prefixes: tuple[str, ...] = ("",), **form: Any) -> list[Turn]:
    """Up to three messages with one change each, all of them refused; with no field but the items in a `next`, which
    goes on where there are none."""
    names = [name for name in REFUSED_CHANGES if name.startswith(prefixes) and name not in SPELLED]
    bodies = [apply(KINDS[name].change, rng, good(rng)) for name in rng.choices(names, k=rng.randint(1, 3))]
    if form["type"] == "next":
        bodies = [{"items": body["items"]} for body in bodies if not empty(body["items"])]
    messages = [{**form, **body} for body in bodies]
    return [(message, "error") for message in messages if len(dumped(message)) < LIMITS["BODY_BYTES"]]


def empty(items: Any) -> bool:
    """Whether these are no items, in one of their forms."""
    if not isinstance(items, dict):
        return items is None
    actions = items.get("actions")
    return actions == [] or (isinstance(actions, dict) and actions.get("shape") == [0, 6, 3])


def garbage(rng: Random, count: int) -> list[Turn]:
    return [(text, "error") for text in rng.choices(GARBAGE, k=count)]


def outgrowing(rng: Random) -> list[Turn]:
    plain = {"type": "start", "prompt": [1] * 1700, **GREEDY}
    left = MAX_LEN - 1702
    more = (([1] * left, 1), ([1], left), ([], left + 1), ([1] * (left + 1), 1), ([], 2**31 - 1))
    refusals = [({"type": "next", "prompt": prompt, "max_tokens": most}, "error") for prompt, most in more]
    last = {"type": "next", "prompt": [1] * (left - 2), "max_tokens": 2}
    return [({**plain, "max_tokens": 51}, "error"), ({**plain, "max_tokens": 2}, "chunk"), *refusals, (last, "chunk"),
            ({"type": "next", "max_tokens": 1}, "error"), CLOSED]


TALKS: dict[str, tuple[float, Callable[[Random], list[Turn]]]] = {
    "fine": (5, lambda rng: [started(rng), *[CHUNK] * rng.randint(0, 3), CLOSED]),
    "refused_start": (25, lambda rng: [*odd_turns(rng, type="start"), started(rng), CLOSED]),
    "refused_next": (25, lambda rng: [
        started(rng), *odd_turns(rng, ITEM_KINDS, type="next", max_tokens=2), CHUNK, CLOSED]),
    "next_first": (2, lambda rng: [(NEXT, "error"), started(rng), CLOSED]),
    "two_starts": (2, lambda rng: [started(rng), (start(rng), "error"), CHUNK, CLOSED]),
    "empty_next": (1, lambda rng: [started(rng), ({"type": "next"}, "chunk"), CLOSED]),
    "only_close": (1, lambda rng: [CLOSED]),
    "garbage": (6, lambda rng: [*garbage(rng, 5), started(rng), *garbage(rng, 1), CHUNK, CLOSED]),
    "bytes": (2, lambda rng: [(rng.choice((b"", b"x", dumped(start(rng)), bytes(1000))), "error"), CLOSED]),
    "too_large": (0.5, lambda rng: [(" " * 1_000_001 + "{}", "error"), started(rng), CLOSED]),
    "outgrowing": (2, outgrowing),
}


async def interrupting(talk: Talk) -> None:
    """Say more before the chunk is whole; what would be right after it may come too late to be refused."""
    more = talk.rng.choices((NEXT, "x", '{"type":"start"}', '{"type":"next","x":1}', "[]"), k=talk.rng.randint(1, 3))
    for message in (start(talk.rng, max_tokens=64), *more):
        await talk.say(message)
    answers = [await talk.hear("chunk", "error") for _ in range(len(more) + 1)]
    if not 1 <= answers.count("chunk") <= 1 + more.count(NEXT):
        raise Wrong(f"{answers} for {len(more)} message(s) during a chunk")
    await talk.turns(CHUNK, CLOSED)


async def closing(talk: Talk) -> None:
    """Close during a chunk, which may be whole by then."""
    await talk.say(start(talk.rng, max_tokens=1000))
    await asyncio.sleep(talk.rng.random() * 0.2)
    await talk.say({"type": "close"})
    if await talk.hear("closed", "chunk") == "chunk":
        await talk.hear("closed")


async def breaking(talk: Talk) -> None:
    """Send what the protocol of websockets does not allow, or more than anybody takes."""
    with suppress(ConnectionClosed):  # before all of it is sent
        await talk.socket.send(talk.rng.choice((b"\xff\xfe", b" " * 40_000_000)), text=True)
    await talk.socket.wait_closed()


async def vanishing(talk: Talk) -> None:
    """Leave without a word: at once, within a frame, during a chunk or after it."""
    stage = talk.rng.randrange(3)
    if stage == 0:
        frames = (b"", b"\x81\xff", b"\x81\x05he", b"\xff" * 50, b"\x88\x80", bytes(9))
        talk.socket.transport.write(talk.rng.choice(frames))
    elif stage == 1:
        await talk.say(start(talk.rng, max_tokens=1000))
    else:
        await talk.turns(started(talk.rng))
    await asyncio.sleep(talk.rng.random() * 0.2)
    talk.socket.transport.abort()


async def flooding(talk: Talk) -> None:
    """Send frames that make no message, and read nothing, until one is cut off."""
    fragment, ping = b"\x00\x81\0\0\0\0a", b"\x89\xfd\0\0\0\0" + b"p" * 125
    begins, frame = talk.rng.choice(((b"\x01\x80\0\0\0\0", fragment), (b"", ping)))
    talk.socket.transport.pause_reading()
    talk.socket.transport.write(begins + frame * 10_000)
    await asyncio.sleep(talk.rng.random())
    talk.socket.transport.resume_reading()
    await talk.socket.wait_closed()


def add_talk(name: str, weight: float, turns: Callable[[Random], list[Turn]]) -> None:
    def build(rng: Random) -> Script:
        messages = turns(rng)
        return Script(lambda talk: talk.turns(*messages), " ".join(str(message)[:200] for message, _ in messages))

    add(f"session.{name}", TAKEN, weight, build)


def add_script(play: Callable[[Talk], Awaitable[None]], weight: float) -> None:
    add(f"session.{play.__name__}", TAKEN, weight, lambda rng: Script(play, play.__name__))


for name, talk in TALKS.items():
    add_talk(name, *talk)
for play, weight in ((interrupting, 9), (closing, 3), (breaking, 0.5), (flooding, 2), (vanishing, 15)):
    add_script(play, weight)


# -- vLLM's own routes -------------------------------------------------------------------------------------------------

COMPLETION: Body = {"model": "terra", "prompt": [1, 2, 3], "max_tokens": 2}
TOKENS: Body = {"model": "terra", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}}
PLACED: Body = {"mm_hashes": {"actions": ["x"]}, "mm_placeholders": {"actions": [{"offset": 0, "length": 6}]}}
FEATURES = (
    {}, PLACED, {**PLACED, "kwargs_data": {"actions": ["AAAA"]}}, {**PLACED, "kwargs_data": {"actions": [None]}},
    {**PLACED, "mm_placeholders": {"actions": [{"offset": 2**40, "length": -6}]}, "kwargs_data": None}, [], 1, "x",
    {"mm_hashes": {"image": ["x"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 6}]}},
)
STOCK_PROMPTS = (*([1, odd, 2] for odd in IDS), *([odd] for odd in IDS), *PROMPTS, None, [PAD] * 6, [1, *[PAD] * 6, 2],
                 [[1], [2**31]], [[]], [[1, 2], "x"])
BIASES = (*({str(odd): 1.0} for odd in IDS), *({"1": odd} for odd in (1e38, -1e38, 1e300, NAN, INF, "x", None)), [], 1,
          {str(i): 1 for i in range(2000)})


def stock_prompt(rng: Random) -> tuple[str, Body]:
    prompt = rng.choice(STOCK_PROMPTS)
    body = {**COMPLETION, "prompt": prompt, **rng.choice(({}, {}, {"use_beam_search": True, "n": 2}))}
    return rng.choice((("/v1/completions", body), ("/inference/v1/generate", {**TOKENS, "token_ids": prompt})))


def stock_features(rng: Random) -> tuple[str, Body]:
    return "/inference/v1/generate", {**TOKENS, "token_ids": [PAD] * 6, "features": rng.choice(FEATURES)}


def stock_field(rng: Random) -> tuple[str, Body]:
    name, values = rng.choice([*FIELDS.items(), ("logit_bias", (BIASES, ()))])
    change = {"min_tokens": rng.choice((0, 2)), name: rng.choice([*values[0], *values[1]])}
    below = {**TOKENS, "sampling_params": {**TOKENS["sampling_params"], **change}}
    return rng.choice((("/v1/completions", {**COMPLETION, **change}), ("/inference/v1/generate", below)))


def stock_scores(rng: Random) -> tuple[str, Body]:
    body: Body = {"model": "terra", "query": [1], "items": [[2]], "label_token_ids": [1]}
    key = rng.choice(("query", "items", "label_token_ids"))
    return "/generative_scoring", {**body, key: [[rng.choice(IDS)]] if key == "items" else [rng.choice(IDS)]}


def add_stock(request: Callable[[Random], tuple[str, Body]], weight: float) -> None:
    def build(rng: Random) -> Post:
        path, body = request(rng)
        return Post(dumped(body), path=path)

    add(f"stock.{request.__name__.removeprefix('stock_')}", STOCK, weight, build)


for request, weight in ((stock_prompt, 20), (stock_features, 5), (stock_field, 40), (stock_scores, 3)):
    add_stock(request, weight)
# fmt: on


# -- requests by number ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One request."""

    number: int
    kind: Kind
    request: Post | Script

    @property
    def shown(self) -> str:
        """As a report shows it."""
        if isinstance(self.request, Script):
            return self.request.shown[:SHOWN]
        text = self.request.content.decode(errors="replace")
        text = text if len(text) <= SHOWN else f"{text[:100]}...{text[-SHOWN + 110 :]}"
        return f"{self.request.method} {self.request.path} {text}"


def case(seed: int, number: int) -> Case:
    """Request `number` of a seed. The first ones have one of each kind."""
    names = list(KINDS)
    random.Random(seed).shuffle(names)
    rng = random.Random(f"{seed}-{number}")
    name = names[number] if number < len(names) else rng.choices(names, [KINDS[name].weight for name in names])[0]
    return Case(number, KINDS[name], KINDS[name].build(rng))
