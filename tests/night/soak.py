"""Malformed requests by the thousand at a server of the road world, beside good clients that check every answer.

    python -m tests.night.soak --requests 10000 --seed 0 --store soak.json

Request number i of a seed is always the same one. Each is of a named kind that says what a server may answer: the
door's kinds are refused by one sentence, are taken, or may be either; of vLLM's own routes only hangs and the engine's
death count, and their 5xx are listed. The server is started here unless --url names one, with limits that are reached
cheaply. The exit status is 1 if anything was violated.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import copy
import gzip
import json
import math
import pickle
import random
import statistics
import struct
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
import torch
from safetensors.torch import save as save_safetensors
from tqdm import tqdm
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from examples.terra.world import make_episode
from mmkit.serve.process import Server
from mmkit.serve.wire import encode

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "examples/terra/checkpoint"
OPTIONS = ("--dtype", "float32", "--skip-tokenizer-init", "--block-size", "32", "--served-model-name", "terra",
    "--enable-scale-out", "--mm-processor-cache-gb", "0.0002", "--num-gpu-blocks-override", "1024")  # fmt: skip
"""Caches that are full soon: what grows after that is a leak. vLLM counts an action in its processor cache as the 72
bytes of its tensor, so these are 3,000 actions; 1,024 blocks are 32,768 tokens."""
LIMITS = {"BODY_BYTES": 1_000_000, "ELEMENTS": 100_000, "ITEMS": 256, "SESSIONS": 8, "IDLE_SECONDS": 5}
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    **{f"MMKIT_SERVE_{name}": str(value) for name, value in LIMITS.items()},
}
PAD, VOCAB, STEP, LIMIT, MAX_LEN = 31, 32, 6, 24, 1750
GENERATE, SESSION = "/v1/mm/generate", "/v1/mm/session"
BOUND_SECONDS = 60.0
"""How long any answer may take."""
CONCURRENCY, MOST_SOCKETS = 12, 4
SHOWN = 600
"""Characters of a request that the report shows."""

REFUSED, TAKEN, EITHER = "refused", "taken", "either"
STOCK = "stock"
"""What a kind expects: 4xx, 200, one of both, or, of vLLM's own routes, any answer at all."""

Body = dict[str, Any]
Change = Callable[[random.Random, Body], Any]


# -- good requests -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drive:
    """One episode: ids of frames, and actions."""

    frames: list[list[int]]
    actions: np.ndarray

    def prompt(self, frames: int) -> list[int]:
        return [token for frame in self.frames[:frames] for token in [*frame, *[PAD] * STEP]]


DRIVES = []
for _seed in range(6):
    _episode = make_episode(_seed)
    _frames = np.asarray(_episode.frames).reshape(len(_episode.frames), -1).tolist()
    DRIVES.append(Drive(_frames, np.asarray(_episode.actions, dtype=np.float32)))

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def good(rng: random.Random) -> Body:
    """A body that the door takes; of few tokens."""
    drive, frames = rng.choice(DRIVES), rng.randint(1, 3)
    actions = drive.actions[:frames]
    items = rng.choice((actions.tolist, lambda: encode({"a": actions})["a"], lambda: encode({"a": list(actions)})["a"]))
    return {"prompt": drive.prompt(frames), "items": {"actions": items()}, "max_tokens": rng.randint(1, 4), **GREEDY}


def listed(body: Body) -> list[Any]:
    """The actions of a good body as a list of nested lists."""
    count = sum(token == PAD for token in body["prompt"]) // STEP
    body["items"] = {"actions": DRIVES[0].actions[:count].tolist()}
    return body["items"]["actions"]


# -- kinds -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Post:
    """One HTTP request."""

    content: bytes
    path: str = GENERATE
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    method: str = "POST"
    leave: float | None = None  # seconds after which the client goes away


@dataclass(frozen=True)
class Raw:
    """Bytes on a socket, which is closed after some seconds if nothing comes back."""

    content: bytes
    seconds: float
    wait: bool  # for an answer; else the client leaves


@dataclass(frozen=True)
class Script:
    """A conversation."""

    play: Callable[[Talk], Awaitable[None]]
    shown: str


@dataclass(frozen=True)
class Kind:
    """One kind of request: how it is made, how often it is drawn, and what may come back."""

    name: str
    expects: str
    make: Callable[[random.Random], Post | Raw | Script]
    weight: float
    change: Change | None = None


KINDS: dict[str, Kind] = {}


def add(name: str, expects: str, make: Callable[[random.Random], Any], weight: float = 1.0, change: Any = None) -> None:
    assert name not in KINDS, name
    KINDS[name] = Kind(name, expects, make, weight, change)


def dumped(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode("utf-8", "surrogatepass")


def changed(name: str, expects: str, change: Change, weight: float = 1.0) -> None:
    """A kind that is a good body with one change."""

    def make(rng: random.Random) -> Post:
        body = good(rng)
        if rng.random() < 0.15:
            body["stream"] = True
        change(rng, body)
        return Post(dumped(body))

    add(name, expects, make, weight, change)


def one_item(name: str, expects: str, value: Callable[[random.Random], Any], weight: float = 1.0) -> None:
    """A kind whose change is another value for one of the items."""

    def change(rng: random.Random, body: Body) -> None:
        items = listed(body)
        items[rng.randrange(len(items))] = value(rng)

    changed(name, expects, change, weight)


def the_items(name: str, expects: str, value: Callable[[random.Random], Any], weight: float = 1.0) -> None:
    """A kind whose change is another value for all of the items."""

    def change(rng: random.Random, body: Body) -> None:
        body["items"] = {"actions": value(rng)}

    changed(name, expects, change, weight)


def setting(name: str, expects: str, *values: Any, weight: float = 1.0) -> None:
    """A kind whose change is one field."""
    *_, key = name.split(".")

    def change(rng: random.Random, body: Body) -> None:
        body[key] = rng.choice(values)

    changed(name, expects, change, weight)


def raw(array: Any, **other: Any) -> Body:
    return {**encode({"x": array})["x"], **other}


def packed(tensors: Any) -> Body:
    return {
        "safetensors": base64.b64encode(tensors if isinstance(tensors, bytes) else save_safetensors(tensors)).decode()
    }


ITEM = DRIVES[0].actions[0]


def _prompts() -> None:
    def fewer(rng: random.Random, body: Body) -> None:
        body["prompt"] = DRIVES[0].prompt(3)
        listed(body)
        del body["items"]["actions"][rng.randrange(3) :]
        if not body["items"]["actions"]:
            body["items"] = {}

    def more(rng: random.Random, body: Body) -> None:
        listed(body).extend([ITEM.tolist()] * rng.randint(1, 20))

    def run(length: int) -> Change:
        def change(rng: random.Random, body: Body) -> None:
            listed(body)
            places = [0, len(body["prompt"]), rng.randint(1, 63)]
            at = rng.choice(places)
            body["prompt"][at:at] = [PAD] * length

        return change

    def shorter(rng: random.Random, body: Body) -> None:
        listed(body)
        del body["prompt"][-rng.randint(1, 5) :]

    def bare(rng: random.Random, body: Body) -> None:
        del body["items"]

    def unplaced(rng: random.Random, body: Body) -> None:
        body["prompt"] = [token for token in body["prompt"] if token != PAD]

    changed("prompt.fewer_items", REFUSED, fewer, 3)
    changed("prompt.more_items", REFUSED, more, 3)
    changed("prompt.extra_run", REFUSED, run(6), 3)
    changed("prompt.extra_long_run", REFUSED, run(7))
    changed("prompt.extra_short_run", REFUSED, run(2))
    changed("prompt.cut_run", REFUSED, shorter, 2)
    changed("prompt.placeholders_without_data", REFUSED, bare, 3)
    changed("prompt.items_without_placeholders", REFUSED, unplaced, 2)

    ids = {
        "id_at_vocabulary": VOCAB, "id_beyond": 99, "id_negative": -1, "id_2_31": 2**31, "id_minus_2_31": -(2**31),
        "id_2_32": 2**32, "id_2_63": 2**63, "id_2_64": 2**64, "id_2_70": 2**70, "id_float": 1.5, "id_whole_float": 1.0,
        "id_bool": True, "id_text": "1", "id_null": None, "id_list": [1], "id_object": {}, "id_nan": math.nan,
        "id_infinity": math.inf,
    }  # fmt: skip
    for name, odd in ids.items():

        def change(rng: random.Random, body: Body, odd: Any = odd) -> None:
            body["prompt"][rng.randrange(64)] = odd

        def alone(rng: random.Random, body: Body, odd: Any = odd) -> None:
            body.pop("items")
            body["prompt"] = [1, 2, odd][rng.randrange(3) :]

        changed(f"prompt.{name}", REFUSED, change)
        changed(f"prompt.{name}_without_items", REFUSED, alone)
    whole = {
        "empty": [], "text": "drive", "number": 7, "object": {"a": 1}, "bool": True, "nested": [[1, 2], [3]],
        "too_long": [1] * MAX_LEN, "far_too_long": [1] * 20_000, "null": None,
    }  # fmt: skip
    for name, value in whole.items():

        def replaced(rng: random.Random, body: Body, value: Any = value) -> None:
            body["prompt"] = value
            if rng.random() < 0.5:
                body.pop("items")

        changed(f"prompt.{name}", REFUSED, replaced, 0.3 if name == "far_too_long" else 1)
    changed("prompt.missing", REFUSED, lambda rng, body: body.pop("prompt"))


def _shapes() -> None:
    shapes = {
        "5x3": (5, 3), "6x4": (6, 4), "3x6": (3, 6), "7x3": (7, 3), "18": (18,), "1x6x3": (1, 6, 3), "6x3x1": (6, 3, 1),
        "scalar": (), "empty": (0,), "0x3": (0, 3), "6x0": (6, 0), "1x1": (1, 1), "12x3": (12, 3), "2x6x3": (2, 6, 3),
        "9d": (1,) * 9,
    }  # fmt: skip
    for name, shape in shapes.items():

        def value(rng: random.Random, shape: Any = shape) -> Any:
            array = np.full(shape, 0.5, dtype=np.float32)
            if (form := rng.randrange(3)) == 0:
                return array.tolist()
            return raw(array) if form == 1 else packed({"x": torch.from_numpy(array)})

        one_item(f"shape.{name}", REFUSED, value, 2)
    batches = {"0x6x3": (0, 6, 3), "2x5x3": (2, 5, 3), "18": (18,), "scalar": (), "25x6x3": (25, 6, 3)}
    for name, shape in batches.items():
        the_items(f"batch.{name}", REFUSED, lambda rng, shape=shape: raw(np.zeros(shape, np.float32)))
    one_item("shape.ragged", REFUSED, lambda rng: [[1, 2, 3]] * 5 + [[1, 2]])
    one_item("shape.half_nested", REFUSED, lambda rng: [[1, 2, 3]] * 5 + [1])
    one_item("shape.deep", REFUSED, lambda rng: json.loads("[" * 40 + "1" + "]" * 40))
    one_item("shape.empty_lists", REFUSED, lambda rng: [[]] * 6)


def _values() -> None:
    odd = {"nan": math.nan, "inf": math.inf, "minus_inf": -math.inf, "1e38": 1e38, "beyond": 1001.0, "1e300": 1e300}
    for name, number in odd.items():

        def value(rng: random.Random, number: float = number) -> Any:
            item = ITEM.astype(rng.choice((np.float32, np.float64)))
            with np.errstate(over="ignore"):
                item[rng.randrange(6), rng.randrange(3)] = number
            form = rng.randrange(3)
            return [item.tolist, lambda: raw(item), lambda: packed({"x": torch.from_numpy(item)})][form]()

        one_item(f"value.{name}", REFUSED, value, 3)
    for name in ("float16", "bfloat16"):

        def small(rng: random.Random, name: str = name) -> Any:
            item = torch.from_numpy(ITEM.copy()).to(getattr(torch, name))
            item[rng.randrange(6), 1] = rng.choice((math.nan, math.inf, -math.inf))
            return raw(item)

        one_item(f"value.odd_{name}", REFUSED, small)
        one_item(
            f"value.fine_{name}",
            TAKEN,
            lambda rng, name=name: raw(torch.from_numpy(ITEM.copy()).to(getattr(torch, name))),
        )
    one_item("value.fine_float64", TAKEN, lambda rng: raw(ITEM.astype(np.float64)))
    one_item("value.at_the_bound", TAKEN, lambda rng: [[1000.0, -1000.0, 0.0]] * 6)
    one_item("value.denormal", TAKEN, lambda rng: [[1e-45, -0.0, 1e-300]] * 6)
    one_item("value.whole_numbers", TAKEN, lambda rng: [[1, 2, 3]] * 6)
    one_item("value.huge_whole", REFUSED, lambda rng: [[rng.choice((2**31, 2**63, 2**70, 10**400)), 2, 3]] * 6)
    one_item("value.bools", REFUSED, lambda rng: [[True, False, True]] * 6)
    one_item("value.one_bool", REFUSED, lambda rng: [[True, 1.0, 2.0]] * 6)
    one_item("value.text", REFUSED, lambda rng: [["1", 1.0, 2.0]] * 6)
    one_item("value.null", REFUSED, lambda rng: [[None, 1.0, 2.0]] * 6)
    one_item("value.object", REFUSED, lambda rng: [[{"real": 1, "imag": 2}, 1.0, 2.0]] * 6)
    dtypes = ("uint8", "int8", "int16", "int32", "int64", "bool")
    one_item("dtype.integers_and_bools", REFUSED, lambda rng: raw(np.ones((6, 3), rng.choice(dtypes))), 2)
    unknown = (
        "complex64", "complex128", "float8", "float8_e4m3fn", "object", "<f4", "f4", "float32 ", "FLOAT32", "", "str",
        "uint16", "uint64", "torch.float32", "O", None, 7, True, [], {}, ["float32"], "float32\x00",
    )  # fmt: skip
    one_item("dtype.unknown", REFUSED, lambda rng: raw(ITEM, dtype=rng.choice(unknown)), 3)
    one_item("dtype.of_another_size", REFUSED, lambda rng: raw(ITEM, dtype=rng.choice(("float64", "float16"))), 2)

    def safetensors(rng: random.Random) -> Any:
        kinds = (torch.complex64, torch.bool, torch.int64, torch.uint8, torch.uint16, torch.uint64, torch.float8_e4m3fn)
        return packed({"x": torch.ones(6, 3).to(rng.choice(kinds))})

    one_item("dtype.safetensors", REFUSED, safetensors, 2)


def _forms() -> None:
    for name, value in {"null": None, "text": "x", "object": {}, "bool": True, "number": 1.5}.items():
        one_item(f"item.{name}", REFUSED, lambda rng, value=value: value)
    for name, whole in {"null": None, "text": "x", "object": {}, "bool": True, "number": 1.5, "empty": []}.items():
        the_items(f"items.{name}", REFUSED, lambda rng, whole=whole: whole)
    for name, whole in {"null": None, "text": "x", "list": [], "bool": True, "number": 1.5}.items():

        def change(rng: random.Random, body: Body, whole: Any = whole) -> None:
            body["items"] = whole

        changed(f"items.all_{name}", REFUSED, change)

    def renamed(rng: random.Random, body: Body) -> None:
        name = rng.choice(
            ("actionz", "action", "Actions", "image", "video", "", "actions.0", "__class__", "actions\x00")
        )
        body["items"] = {name: body["items"]["actions"]}

    def another(rng: random.Random, body: Body) -> None:
        body["items"][rng.choice(("image", "x", "actions ", "terra"))] = [ITEM.tolist()]

    def many(rng: random.Random, body: Body) -> None:
        count = rng.choice((25, 256, 257, 1000))
        body["items"] = {"actions": [ITEM.tolist()] * count}
        body["prompt"] = body["prompt"][:64] + [PAD] * STEP * min(count, 200)

    changed("items.wrong_name", REFUSED, renamed, 2)
    changed("items.another_name", REFUSED, another)
    changed("items.too_many", REFUSED, many, 0.5)
    the_items("items.embeds", REFUSED, lambda rng: {"actions_embeds": raw(np.zeros((6, 128), np.float32))})
    the_items("items.embeds_deep", REFUSED, lambda rng: json.loads('{"a_embeds":' * 100 + "[]" + "}" * 100))
    the_items("items.too_many_numbers", REFUSED, lambda rng: [[0] * 60_000] * 2, 0.2)
    the_items("items.too_many_raw", REFUSED, lambda rng: raw(np.zeros(100_001, rng.choice(("uint8", "float16")))), 0.3)
    media = ("image_url", "video_url", "audio_url")
    urls = (
        "http://127.0.0.1:9/x.png", "file:///etc/passwd", "data:x", "data:image/png;base64,AAAA", "", "ftp://x",
        "x" * 5000,
        "data:image/png;base64,", "data:video/mp4;base64,AAAA", "data:audio/wav;base64,UklGRg==", "http://[", "DATA:,",
        "data:;base64,iVBORw0KGgoAAAANSUhEUv////8=",
    )  # fmt: skip
    one_item("media.urls", REFUSED, lambda rng: {rng.choice(media): {"url": rng.choice(urls)}}, 3)
    no_url = ("x", None, {}, {"url": None}, {"url": 3}, [], {"url": ["x"]})
    one_item("media.malformed", REFUSED, lambda rng: {rng.choice(media): rng.choice(no_url), "type": "image_url"})
    one_item("item.another_object", REFUSED, lambda rng: {"data": "", "dtype": "float32", "shape": [0], "x": 1})
    one_item("item.half_object", REFUSED, lambda rng: rng.choice(({"data": ""}, {"shape": [6, 3]}, {"dtype": "x"})))

    bad = ("!", "AA=", "A", "AAAA=AAA", "é", "AAAA\n", " ", "\x00", None, 1, [], {}, "AA AA")
    one_item("raw.bad_base64", REFUSED, lambda rng: raw(ITEM, data=rng.choice(bad)), 3)
    one_item(
        "raw.wrong_length",
        REFUSED,
        lambda rng: raw(ITEM, data=base64.b64encode(bytes(rng.choice((0, 1, 71, 73)))).decode()),
    )
    one_item("raw.pickle", REFUSED, lambda rng: raw(ITEM, data=base64.b64encode(pickle.dumps(ITEM)).decode()))
    sizes = (
        [6], [6, 3, 1], [3, 6], [-6, -3], [-1, 3], [6.0, 3], ["6", 3], [True, 18], [None], None, 18, "6x3", {}, [],
        [2**31, 2**33], [2**70], [18] + [1] * 40, [[6, 3]], [1] * 40, [6, 3, 0],
    )  # fmt: skip
    one_item("raw.wrong_shape", REFUSED, lambda rng: raw(ITEM, shape=rng.choice(sizes)), 4)
    nothing = (
        [0, 2**40],
        [2**40, 2**40, 0],
        [2**62, 2**62, 0],
        [2**63, 0],
        [2**70, 0],
        [0] * 32,
        [0, -1],
        [2**63 - 1, 0],
    )
    one_item("raw.nothing", REFUSED, lambda rng: raw(ITEM, data="", shape=rng.choice(nothing)), 3)
    one_item("raw.bool_bytes", REFUSED, lambda rng: raw(np.zeros((6, 12), np.uint8) + 2, dtype="bool"))

    def header(told: Any, tail: bytes = b"") -> bytes:
        text = told if isinstance(told, bytes) else json.dumps(told).encode()
        return struct.pack("<Q", len(text)) + text + tail

    def broken(rng: random.Random) -> Any:
        fine = save_safetensors({"x": torch.from_numpy(ITEM.copy())})
        entry = {"dtype": "F32", "shape": [6, 3], "data_offsets": [0, 72]}
        files = (
            b"", b"x", bytes(8), fine[:-1], fine[:20], fine + b"x", struct.pack("<Q", 2**63) + b"{}",
            struct.pack("<Q", 2**40) + b"{}", header(b"{"), header(b"[]"), header({}),
            header({"__metadata__": {"a": "b"}}),
            header({"x": {**entry, "data_offsets": [0, 2**62]}}), header({"x": {**entry, "data_offsets": [72, 0]}},
            bytes(72)),
            header({"x": {**entry, "shape": [2**62, 2**62]}}, bytes(72)), header({"x": {**entry, "dtype": "X"}},
            bytes(72)),
            header({"x": {**entry, "dtype": "C64", "shape": [3, 3]}}, bytes(72)),
            header({"x": {"dtype": "F32", "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}}),
            header({"x": {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}}),
            header({"x": {"dtype": "F32", "shape": [2**64, 0], "data_offsets": [0, 0]}}),
            header({"x": {"dtype": "F4", "shape": [6, 3], "data_offsets": [0, 9]}}, bytes(9)),
            header({"x": {"dtype": "F8_E8M0", "shape": [6, 3], "data_offsets": [0, 18]}}, bytes(18)),
            header({"x": {"dtype": "F32", "shape": [-6, -3], "data_offsets": [0, 72]}}, bytes(72)),
            save_safetensors({}), save_safetensors({"a": torch.zeros(6, 3), "b": torch.zeros(6, 3)}),
            pickle.dumps(ITEM),
            header(b'{"x":' * 2000 + b"1" + b"}" * 2000),
        )  # fmt: skip
        chosen = bytearray(rng.choice(files))
        return packed(bytes(chosen))

    def flipped(rng: random.Random) -> Any:
        fine = bytearray(save_safetensors({"x": torch.from_numpy(ITEM.copy())}))
        for _ in range(rng.randint(1, 4)):
            fine[rng.randrange(len(fine))] = rng.randrange(256)
        return packed(bytes(fine))

    one_item("safetensors.broken", REFUSED, broken, 5)
    one_item("safetensors.flipped", EITHER, flipped, 3)
    one_item("safetensors.no_text", REFUSED, lambda rng: {"safetensors": rng.choice((None, 1, [], {}, "!", "AAA"))})
    one_item("safetensors.fine", TAKEN, lambda rng: packed({"anything": torch.from_numpy(ITEM.copy())}))


def _fields() -> None:
    counts = (0, -1, 1.5, "1", True, [], {}, 2**31, 2**63, 2**70, -(2**31), math.nan, math.inf)
    setting("sampling.max_tokens", REFUSED, *counts, weight=2)
    setting("sampling.min_tokens", REFUSED, *counts[1:], weight=2)
    setting("sampling.n", REFUSED, None, 129, 10**6, *counts, weight=2)
    numbers = ("1", True, [], {}, math.nan, math.inf, -math.inf, 1e400, -1e-9 - 200)
    setting("sampling.temperature", REFUSED, -1, 2.1, 101, 1e38, *numbers, weight=2)
    setting("sampling.top_p", REFUSED, 0, 0.0, 1.0000001, -1, 2**70, *numbers, weight=2)
    setting("sampling.min_p", REFUSED, -0.1, 1.1, 1e300, *numbers)
    setting("sampling.top_k", REFUSED, *counts[1:], weight=2)
    setting("sampling.seed", REFUSED, 2**63, -(2**63) - 1, 2**64, 2**70, 1.5, "1", True, [], {}, math.nan, weight=2)
    setting("sampling.presence_penalty", REFUSED, -2.1, 2.1, 2**70, *numbers)
    setting("sampling.frequency_penalty", REFUSED, -2.1, 2.1, 1e308, *numbers)
    setting("sampling.repetition_penalty", REFUSED, 0, -1, 101, 1e308, *numbers)
    setting("sampling.logprobs", REFUSED, 21, 1000, VOCAB, *counts[1:], weight=2)
    odd_ids = ([VOCAB], [-1], [2**31], [2**63], [2**70], [1.5], ["1"], [True], [None], 1, "1", {}, [[1]], [1, 99])
    setting("sampling.stop_token_ids", REFUSED, [1] * 1025, *odd_ids, weight=3)
    setting("sampling.allowed_token_ids", REFUSED, [], *odd_ids, weight=3)
    setting("sampling.ignore_eos", REFUSED, 0, 1, "true", [], {}, 1.0)
    setting("sampling.skip_special_tokens", REFUSED, 0, "false", [], 2)
    setting("sampling.stop", REFUSED, ["x"], "x", [1], [""], ["x"] * 65, {}, [None], 1)
    setting("field.stream", REFUSED, 1, "true", None, [], {})
    setting("field.model", REFUSED, "gpt", "", 1, [], {}, "terra\x00", "x" * 10_000, True)
    setting("field.cache_salt", REFUSED, "", 1, [], {}, True)
    setting("field.mm_processor_kwargs", REFUSED, {"a": 1}, {"fps": 2}, [], 1, "x", {"terra": None})
    setting("field.uuids", REFUSED, {"image": ["a"]}, {"actions": "a"}, {"actions": [1]}, {"actions": None}, [], 1, "x")
    unknown = ("logit_bias", "prompt_logprobs", "truncate_prompt_tokens", "use_beam_search", "best_of", "messages",
               "multi_modal_data", "prompt_embeds", "structured_outputs", "extra_args", "type", "",
               "__proto__")  # fmt: skip

    def extra(rng: random.Random, body: Body) -> None:
        body[rng.choice(unknown)] = rng.choice((1, None, {}, [], "x", {"1": 100}))

    changed("field.unknown", REFUSED, extra, 2)

    def uuid_counts(rng: random.Random, body: Body) -> None:
        count = len(listed(body))
        body["uuids"] = {"actions": [f"u{rng.random()}"] * rng.choice((0, count + 1, count + 100))}

    def uuid_without_item(rng: random.Random, body: Body) -> None:
        count = len(listed(body))
        body["items"]["actions"] = [None] * count
        body["uuids"] = {"actions": [f"never-{rng.random()}-{i}" for i in range(count)]}

    def uuid_fine(rng: random.Random, body: Body) -> None:
        body["uuids"] = {"actions": [f"{rng.random()}" for _ in listed(body)]}

    def uuid_odd(rng: random.Random, body: Body) -> None:
        odd = ("", "\x00", "a" * 10_000, "ü\u2028", "../x", None)
        body["uuids"] = {"actions": [rng.choice(odd) for _ in listed(body)]}

    def uuid_shared(rng: random.Random, body: Body) -> None:
        body["uuids"] = {"actions": [f"shared-{rng.randrange(3)}" for _ in listed(body)]}

    changed("uuids.wrong_count", REFUSED, uuid_counts, 2)
    changed("uuids.unknown_without_item", REFUSED, uuid_without_item, 2)
    changed("uuids.fine", TAKEN, uuid_fine)
    changed("uuids.odd", EITHER, uuid_odd)
    changed("uuids.shared_by_other_items", EITHER, uuid_shared)

    setting("extreme.seed", TAKEN, 2**63 - 1, -(2**63), 0, -1, None, weight=2)
    setting("extreme.top_k", TAKEN, 0, 1, 31, 32, 33, 2**31 - 1, None)
    setting("extreme.top_p", TAKEN, 5e-324, 1e-30, 1, 1.0, None)
    setting("extreme.min_p", TAKEN, 0, 1, 1.0, 5e-324, None)
    setting("extreme.temperature", TAKEN, 0, 1e-300, 5e-324, 1e-5, 0.009, 2, None, weight=2)
    setting("extreme.presence_penalty", TAKEN, -2, 2, 0)
    setting("extreme.frequency_penalty", TAKEN, -2, 2, 0)
    setting("extreme.repetition_penalty", TAKEN, 5e-324, 1e-30, 100, 1)
    setting("extreme.logprobs", TAKEN, 0, 1, 20, None)
    setting("extreme.stop_token_ids", TAKEN, [], [31], list(range(32)), [1] * 1024, None)
    setting("extreme.allowed_token_ids", TAKEN, [0], [31], list(range(32)), [1] * 1000, None)

    def several(rng: random.Random, body: Body) -> None:
        body.update(n=rng.choice((1, 2, 16)), temperature=1.0)

    def several_greedy(rng: random.Random, body: Body) -> None:
        body["n"] = rng.choice((2, 128))

    changed("extreme.n", TAKEN, several)
    changed("sampling.several_greedy", REFUSED, several_greedy)
    setting("extreme.cache_salt", TAKEN, "\x00", "ü", "x" * 10_000, None)

    def beyond(rng: random.Random, body: Body) -> None:  # of what fits
        body.update(prompt=[1] * 1700, max_tokens=rng.choice((51, 100, 2**31 - 1)))
        del body["items"]

    def minimum(rng: random.Random, body: Body) -> None:
        body.update(min_tokens=body["max_tokens"], stop_token_ids=list(range(32)), ignore_eos=False)

    def minimum_beyond(rng: random.Random, body: Body) -> None:
        body["min_tokens"] = rng.choice((5, 100, 2**31 - 1))

    def sampled(rng: random.Random, body: Body) -> None:
        body.update(
            temperature=rng.choice((0.5, 1.0, 2.0)), top_p=rng.random() * 0.99 + 0.01, top_k=rng.choice((0, 1, 5)),
            min_p=rng.random(), seed=rng.getrandbits(62), repetition_penalty=rng.choice((0.5, 2.0, 100)),
            n=rng.randint(1, 4),
            logprobs=rng.randint(0, 20), presence_penalty=rng.uniform(-2, 2), frequency_penalty=rng.uniform(-2, 2),
        )  # fmt: skip

    changed("extreme.max_tokens_beyond_the_model", TAKEN, beyond, 0.3)
    changed("extreme.min_tokens_and_all_stops", TAKEN, minimum)
    changed("sampling.min_above_max_tokens", REFUSED, minimum_beyond)
    changed("extreme.sampled", TAKEN, sampled, 2)
    changed("fine.generate", TAKEN, lambda rng, body: None, 10)


def _bodies() -> None:
    plain = {"content-type": "application/json"}

    def body(name: str, expects: str, make: Callable[[random.Random, bytes], bytes], weight: float = 1.0, **head: str):
        headers = {**plain, **{key.replace("_", "-"): value for key, value in head.items()}}
        add(name, expects, lambda rng: Post(make(rng, dumped(good(rng))), headers=headers), weight)

    body("body.empty", REFUSED, lambda rng, text: b"")
    body(
        "body.no_json",
        REFUSED,
        lambda rng, text: rng.choice((b"hello", b"{", b"}", b"\x00" * 50, b"a=1&b=2", b"{'a': 1}")),
    )
    body(
        "body.another_type",
        REFUSED,
        lambda rng, text: rng.choice((b"[]", b"1", b'"x"', b"null", b"true", b"[" + text + b"]")),
    )
    body("body.cut", REFUSED, lambda rng, text: text[: rng.randrange(1, len(text) - 1)], 3)
    body("body.two", REFUSED, lambda rng, text: text + text)
    body("body.latin_1", REFUSED, lambda rng, text: text[:-1] + ',"model":"ü"}'.encode("latin-1"))
    body("body.utf_16", REFUSED, lambda rng, text: text.decode().encode(rng.choice(("utf-16", "utf-32", "utf-16-be"))))
    body("body.bom", EITHER, lambda rng, text: b"\xef\xbb\xbf" + text)
    body(
        "body.surrogates",
        REFUSED,
        lambda rng, text: (
            text[:-1]
            + rng.choice(
                (
                    b',"cache_salt":"\\ud800"}',
                    b',"model":"\\udfff"}',
                    b',"uuids":{"actions":["\\ud83d"]}}',
                    b',"model":"\xed\xa0\x80"}',
                )
            )
        ),
    )
    body("body.gzip", REFUSED, lambda rng, text: gzip.compress(text, mtime=0), content_encoding="gzip")
    body("body.encoding_only_told", EITHER, lambda rng, text: text, content_encoding="gzip")
    body("body.wrong_content_type", EITHER, lambda rng, text: text, content_type="text/plain")
    body(
        "body.form",
        REFUSED,
        lambda rng, text: b"--x\r\n\r\n" + text + b"\r\n--x--",
        content_type="multipart/form-data; boundary=x",
    )
    body(
        "body.deep",
        REFUSED,
        lambda rng, text: rng.choice((b"[", b'{"a":', b'{"items":{"actions":[')) * rng.choice((150, 1000, 100_000)),
    )
    body(
        "body.deep_items",
        REFUSED,
        lambda rng, text: (
            b'{"prompt":[1],"items":{"actions":'
            + b"[" * (deep := rng.choice((40, 190, 1000, 20_000)))
            + b"]" * deep
            + b"}}"
        ),
        2,
    )
    body(
        "body.deep_objects",
        REFUSED,
        lambda rng, text: (
            b'{"prompt":[1],"items":'
            + b'{"a":' * (deep := rng.choice((40, 190, 1000, 20_000)))
            + b"1"
            + b"}" * (deep + 1)
        ),
    )
    body(
        "body.long_number",
        REFUSED,
        lambda rng, text: text[:-1] + b',"seed":' + b"9" * rng.choice((30, 4301, 50_000)) + b"}",
    )
    body("body.duplicate_keys", EITHER, lambda rng, text: text[:-1] + b',"max_tokens":1,"max_tokens":2}')
    body("body.too_large", REFUSED, lambda rng, text: text[:-1] + b" " * 1_000_001 + b"}", 0.4)
    body("body.far_too_large", REFUSED, lambda rng, text: b"[" * 5_000_000, 0.05)
    body("body.many_keys", REFUSED, lambda rng, text: dumped({f"k{i}": i for i in range(5000)}), 0.3)
    body("body.spaces", TAKEN, lambda rng, text: b" \n\t" * 1000 + text + b"\r\n", 0.5)
    chunks = dumped({"prompt": [1]})
    for name, method in {"get": "GET", "put": "PUT", "delete": "DELETE", "patch": "PATCH"}.items():
        add(f"method.{name}", REFUSED, lambda rng, method=method: Post(chunks, method=method), 0.3)
    add("path.unknown", REFUSED, lambda rng: Post(chunks, path=rng.choice(("/v1/mm/x", "/v1/mm", "/v1/mm/generate/x"))))
    add(
        "path.session_without_upgrade", REFUSED, lambda rng: Post(b"", path=SESSION, method=rng.choice(("GET", "POST")))
    )
    add("fine.modalities", TAKEN, lambda rng: Post(b"", path="/v1/mm/modalities", method="GET"))

    def surgery(rng: random.Random) -> Post:
        start = good(rng)
        for _ in range(rng.randint(1, 3)):
            _mutate(rng, start)
        return Post(dumped(start))

    def letters(rng: random.Random) -> Post:
        drive = rng.choice(DRIVES)
        whole = {"prompt": drive.prompt(1), "items": {"actions": [raw(drive.actions[0])]}, "max_tokens": 2, **GREEDY}
        text = bytearray(dumped(whole))
        fixed = text.index(b'"max_tokens"')
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(fixed)
            match rng.randrange(3):
                case 0:
                    text[at] = rng.randrange(256)
                case 1:
                    text[at] = rng.choice(b'0123456789[]{}",:.-eE ntfN')
                case 2:
                    text[at:at] = text[at : at + rng.randint(1, 20)]
        return Post(bytes(text))

    def combined(rng: random.Random) -> Post:
        start = good(rng)
        for name in rng.sample(CHANGES, rng.randint(2, 3)):
            with suppress(Exception):  # what one takes away the next may want
                KINDS[name].change(rng, start)  # type: ignore[misc]
        if start.get("max_tokens") is None:
            start["max_tokens"] = 2
        return Post(dumped(start))

    add("mutated.json", EITHER, surgery, 60)
    add("mutated.bytes", EITHER, letters, 30)
    add("mutated.combined", EITHER, combined, 40)
    add(
        "client.leaves",
        EITHER,
        lambda rng: Post(
            dumped({**good(rng), "max_tokens": 200, "stream": rng.random() < 0.5}), leave=rng.random() * 0.3
        ),
        3,
    )

    def on_the_wire(
        name: str, expects: str, make: Callable[[random.Random, bytes], bytes], *, wait: bool, seconds: float
    ):
        add(name, expects, lambda rng: Raw(make(rng, dumped(good(rng))), seconds, wait), 0.5)

    def head(length: Any = None, more: bytes = b"") -> bytes:
        told = b"" if length is None else b"content-length: %s\r\n" % str(length).encode()
        return b"POST /v1/mm/generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + told + more + b"\r\n"

    on_the_wire("wire.cut_and_gone", EITHER, lambda rng, text: head(len(text)) + text[:-9], wait=False, seconds=0.05)
    on_the_wire("wire.cut_and_waiting", REFUSED, lambda rng, text: head(len(text)) + text[:-9], wait=True, seconds=30)
    on_the_wire(
        "wire.bad_length",
        EITHER,
        lambda rng, text: head(rng.choice((-1, "x", 2**70, "1, 2"))) + text,
        wait=True,
        seconds=2,
    )
    on_the_wire(
        "wire.two_lengths",
        EITHER,
        lambda rng, text: head(len(text), b"content-length: 3\r\n") + text,
        wait=True,
        seconds=2,
    )
    on_the_wire(
        "wire.bad_chunks",
        EITHER,
        lambda rng, text: head(None, b"transfer-encoding: chunked\r\n") + b"zz\r\n" + text,
        wait=True,
        seconds=2,
    )
    on_the_wire(
        "wire.cut_chunks",
        EITHER,
        lambda rng, text: head(None, b"transfer-encoding: chunked\r\n") + b"fff\r\n" + text[:50],
        wait=False,
        seconds=0.05,
    )
    on_the_wire("wire.no_http", EITHER, lambda rng, text: rng.randbytes(200), wait=True, seconds=2)
    on_the_wire("wire.only_connects", EITHER, lambda rng, text: b"", wait=False, seconds=0.2)


_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 31, 32, 2**31, 2**53, 2**63, 2**70, 1.5, -0.0, 1e38, 1e300, math.nan, math.inf, "",
    "x",
    "actions", "AAAA", "float32", "\x00", "ü", [], [[]], [1], {}, {"x": 1}, {"data": "AAAA", "dtype": "uint8",
    "shape": [3]},
    {"image_url": {"url": "data:,"}}, {"safetensors": "AAAA"}, [None], [True], [1.5],
)  # fmt: skip


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        if path or key != "max_tokens":  # answers stay short
            yield (*path, key)
            yield from _paths(part, (*path, key))


def _mutate(rng: random.Random, body: Body) -> None:
    """Drop, replace, double or move something somewhere; containers as often as numbers."""
    paths = list(_paths(body))
    if not paths:
        return
    depth = rng.choice([len(path) for path in paths if len(path) < 3] + [len(rng.choice(paths))] * 2)
    *where, key = rng.choice([path for path in paths if len(path) == depth])
    holder: Any = body
    for step in where:
        holder = holder[step]
    match rng.randrange(5):
        case 0:
            del holder[key]
        case 1 | 2:
            holder[key] = copy.deepcopy(rng.choice(_VALUES))
        case 3 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[rng.randrange(len(holder))]))
        case 3:
            name = rng.choice((*body, "x", "uuids", "stream", "n", "logprobs"))
            if name != "max_tokens":
                holder[name] = copy.deepcopy(holder[key])
        case _:
            other = rng.choice(paths)
            with suppress(LookupError, TypeError):
                found: Any = body
                for step in other:
                    found = found[step]
                if len(json.dumps(found)) < 5000:
                    holder[key] = copy.deepcopy(found)


# -- sessions ----------------------------------------------------------------------------------------------------------


class Wrong(Exception):
    """An answer that should not be."""


class Busy(Exception):
    """All sessions are taken."""


class Talk:
    """One session, from the client's side; every message is checked as it comes."""

    def __init__(self, socket: ClientConnection, rng: random.Random, url: str) -> None:
        self.socket, self.rng, self.url = socket, rng, url
        self.codes: Counter[str] = Counter()
        self.remaining = 0

    async def say(self, message: Any) -> None:
        await self.socket.send(message if isinstance(message, str) else dumped(message).decode())

    async def hear(self, *types: str) -> Body:
        """The next message that does not only tell tokens."""
        while True:
            message: Body = json.loads(await self.socket.recv())
            kind = message.get("type")
            if kind == "error":
                if (problem := wrong_error(message)) or message["error"]["code"] >= 500:
                    raise Wrong(problem or f"{message}")
                self.codes[str(message["error"]["code"])] += 1
                if message["error"]["code"] == 429:
                    raise Busy
                if message["fatal"]:
                    raise Wrong(f"a refusal ended the session: {json.dumps(message)[:SHOWN]}")
            if kind == "tokens" and "tokens" not in types:
                continue
            if kind not in types:
                raise Wrong(f"expected {' or '.join(types)}, got {json.dumps(message)[:SHOWN]}")
            if kind == "chunk":
                self.remaining = message["remaining"]
            elif kind == "error" and not message["fatal"] and self.remaining not in (0, message["remaining"]):
                raise Wrong(f"a refusal changed remaining from {self.remaining} to {message['remaining']}")
            return message

    async def start(self, **more: Any) -> Body:
        await self.say(start_of(self.rng, **more))
        return await self.hear("chunk")

    async def next(self) -> Body:
        await self.say({"type": "next", "items": {"actions": [ITEM.tolist()]}, "max_tokens": 2})
        return await self.hear("chunk")

    async def close(self, *, late: bool = False) -> None:
        """End the session; it may come too `late` for a chunk that is complete by then."""
        await self.say({"type": "close"})
        if not late or (await self.hear("closed", "chunk"))["type"] == "chunk":
            await self.hear("closed")

    async def ended(self) -> None:
        """The server closes."""
        with suppress(WebSocketException):
            while True:
                await self.socket.recv()


def start_of(rng: random.Random, **more: Any) -> Body:
    body = good(rng)
    if rng.random() < 0.3:
        body["stream"] = True
    return {"type": "start", **body, **more}


def wrong_error(body: Any) -> str:
    """What is wrong with the form of a refusal."""
    body = body if isinstance(body, dict) else {}
    error = body.get("error")
    if body.get("type") == "error" and isinstance(error, dict):
        error = {"param": None, **error}  # messages of sessions leave out what is null
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        return f"no error body: {str(body)[:200]}"
    message, param = error["message"], error["param"]
    if not isinstance(message, str) or not message or "\n" in message or len(message) > 1000:
        return f"no sentence: {str(message)[:400]!r}"
    if "Traceback" in message or not isinstance(error["type"], str) or type(error["code"]) is not int:
        return f"no error body: {str(body)[:200]}"
    return "" if param is None or isinstance(param, str) else f"param is {param!r}"


ITEM_KINDS = ("shape.", "value.", "dtype.", "item.", "items.", "raw.", "safetensors.", "batch.", "media.")
SPELLED = ("prompt.null", "prompt.missing")
"""Refused in a request only: a session writes the prompt."""


def _sessions() -> None:
    def told(name: str, weight: float = 1.0, expects: str = TAKEN) -> Callable[[Any], Any]:
        def decorate(play: Callable[[Talk], Awaitable[None]]) -> Any:
            add(f"session.{name}", expects, lambda rng: Script(play, name), weight)
            return play

        return decorate

    def scripted(name: str, plan: Callable[[random.Random], tuple[Any, str]], weight: float) -> None:
        def make(rng: random.Random) -> Script:
            play, shown = plan(rng)
            return Script(play, shown)

        add(f"session.{name}", TAKEN, make, weight)

    refused = [name for name, kind in KINDS.items() if kind.change and kind.expects is REFUSED]

    def bad_start(rng: random.Random) -> tuple[Any, str]:
        names = [name for name in rng.choices(refused, k=rng.randint(1, 3)) if name not in SPELLED]
        starts = []
        for name in names:
            body = good(rng)
            KINDS[name].change(rng, body)  # type: ignore[misc]
            starts.append(dumped({"type": "start", **body}).decode())

        async def play(talk: Talk) -> None:
            for start in starts:
                if len(start) < LIMITS["BODY_BYTES"]:
                    await talk.say(start)
                    await talk.hear("error")
            await talk.start()
            await talk.close()

        return play, " ".join(f"{name} {start[-300:]}" for name, start in zip(names, starts, strict=True))

    def bad_next(rng: random.Random) -> tuple[Any, str]:
        names = rng.choices([name for name in refused if name.startswith(ITEM_KINDS)], k=rng.randint(1, 3))
        messages = []
        for name in names:
            body = good(rng)
            KINDS[name].change(rng, body)  # type: ignore[misc]
            messages.append(dumped({"type": "next", "items": body["items"], "max_tokens": 2}).decode())

        async def play(talk: Talk) -> None:
            await talk.start()
            for message in messages:
                if len(message) < LIMITS["BODY_BYTES"]:
                    await talk.say(message)
                    await talk.hear("error")
            await talk.next()
            await talk.close()

        return play, " ".join(f"{name} {text[-300:]}" for name, text in zip(names, messages, strict=True))

    scripted("refused_start", bad_start, 25)
    scripted("refused_next", bad_next, 25)

    @told("fine", 5)
    async def fine(talk: Talk) -> None:
        await talk.start()
        for _ in range(talk.rng.randint(0, 3)):
            await talk.next()
        await talk.close()

    @told("next_first", 2)
    async def next_first(talk: Talk) -> None:
        await talk.say({"type": "next", "items": {"actions": [ITEM.tolist()]}})
        await talk.hear("error")
        await talk.start()
        await talk.close()

    @told("two_starts", 2)
    async def two_starts(talk: Talk) -> None:
        await talk.start()
        await talk.say(start_of(talk.rng))
        await talk.hear("error")
        await talk.next()
        await talk.close()

    @told("empty_next", 1)
    async def empty_next(talk: Talk) -> None:
        await talk.start()
        await talk.say({"type": "next"})
        await talk.hear("chunk")
        await talk.close()

    @told("only_close", 1)
    async def only_close(talk: Talk) -> None:
        await talk.close()

    garbage = (
        "", "x", "{", "[]", "null", "1", '"start"', "{}", '{"type":1}', '{"type":null}', '{"type":[]}', '{"type":"x"}',
        '{"type":"ready"}', '{"type":"start"}', '{"type":"close","x":1}', "[" * 100_000, '{"a":' * 50_000, "\x00",
        "NaN",
        '{"type":"start","max_tokens":1}', '{"type":"start","prompt":[1]}', '{"type":"next","x":1}', "ü\u2028" * 1000,
        '{"type":"start","prompt":[],"max_tokens":1}', '{"type":"start","max_tokens":1,"items":{}}', "\ud7ff",
        '{"type":"\\ud800"}', '{"type":"start","max_tokens":1,"prompt":[1],"cache_salt":"\\ud800"}',
        '{"type":"start","type":1}',
        '{"type":"start","prompt":[1],"max_tokens":1750}', '{"type":"start","prompt":[1],"max_tokens":2147483648}',
    )  # fmt: skip

    @told("garbage", 6)
    async def garbage_first(talk: Talk) -> None:
        for text in talk.rng.choices(garbage, k=5):
            await talk.say(text)
            await talk.hear("error")
        await talk.start()
        await talk.say(talk.rng.choice(garbage))
        await talk.hear("error")
        await talk.next()
        await talk.close()

    @told("bytes", 2)
    async def binary(talk: Talk) -> None:
        await talk.socket.send(talk.rng.choice((b"", b"x", dumped(start_of(talk.rng)), bytes(1000))))
        await talk.hear("error")
        await talk.start()
        await talk.close()

    @told("no_text", 1)
    async def no_text(talk: Talk) -> None:
        await talk.socket.send(b"\xff\xfe", text=True)
        await talk.ended()

    @told("fragments", 1)
    async def fragments(talk: Talk) -> None:
        text = dumped(start_of(talk.rng)).decode()
        await talk.socket.send(text[at : at + 100] for at in range(0, len(text), 100))  # type: ignore[arg-type]
        await talk.hear("chunk")
        await talk.close()

    @told("too_large", 0.5)
    async def too_large(talk: Talk) -> None:
        await talk.say('{"type":"start"' + " " * 1_000_001 + "}")
        await talk.hear("error")
        await talk.start()
        await talk.close()

    @told("far_too_large", 0.05)
    async def far_too_large(talk: Talk) -> None:
        with suppress(WebSocketException):
            await talk.say(" " * 40_000_000)
            await talk.hear("error")
            await talk.close()

    @told("interrupting", 6)
    async def interrupting(talk: Talk) -> None:
        await talk.say(start_of(talk.rng, max_tokens=48))
        odd = talk.rng.choices(('{"type":"start"}', "x", '{"type":"next","x":1}', "[]"), k=talk.rng.randint(1, 3))
        for text in odd:
            await talk.say(text)
        told = [(await talk.hear("chunk", "error"))["type"] for _ in range(len(odd) + 1)]
        if sorted(told) != ["chunk"] + ["error"] * len(odd):
            raise Wrong(f"{told} for {len(odd)} message(s) during a chunk")
        await talk.next()
        await talk.close()

    @told("next_during_chunk", 3)
    async def next_during_chunk(talk: Talk) -> None:
        await talk.say(start_of(talk.rng, max_tokens=64))
        await talk.say({"type": "next", "items": {"actions": [ITEM.tolist()]}, "max_tokens": 2})
        told = [(await talk.hear("chunk", "error"))["type"] for _ in range(2)]
        if "chunk" not in told:
            raise Wrong(f"{told} for one message during a chunk")
        await talk.next()
        await talk.close()

    @told("close_during_chunk", 3)
    async def close_during_chunk(talk: Talk) -> None:
        await talk.say(start_of(talk.rng, max_tokens=1000))
        await asyncio.sleep(talk.rng.random() * 0.2)
        await talk.close(late=True)

    @told("outgrowing", 2)
    async def outgrowing(talk: Talk) -> None:
        plain = {"type": "start", "prompt": [1] * 1700, **GREEDY}
        await talk.say({**plain, "max_tokens": 51})
        await talk.hear("error")
        await talk.say({**plain, "max_tokens": 2})
        left = (await talk.hear("chunk"))["remaining"]
        for prompt, most in (([1] * left, 1), ([1], left), ([], left + 1), ([1] * (left + 1), 1), ([], 2**31 - 1)):
            await talk.say({"type": "next", "prompt": prompt, "max_tokens": most})
            await talk.hear("error")
        await talk.say({"type": "next", "prompt": [1] * (left - 2), "max_tokens": 1})
        if (last := (await talk.hear("chunk"))["remaining"]) > 2:
            raise Wrong(f"{last} remaining at the end")

    @told("full", 0.5)
    async def full(talk: Talk) -> None:
        await talk.say({"type": "start", "prompt": [1] * (MAX_LEN - 4), "max_tokens": 4, **GREEDY})
        if (left := (await talk.hear("chunk"))["remaining"]) != 0:
            raise Wrong(f"{left} remaining in a full session")
        await talk.say({"type": "next", "max_tokens": 1})
        await talk.hear("error")
        await talk.close()

    @told("too_many_items", 2)
    async def too_many_items(talk: Talk) -> None:
        count = talk.rng.randint(20, LIMIT)
        prompt = [token for _ in range(count) for token in (1, *[PAD] * STEP)]
        await talk.say({"type": "start", "prompt": prompt, "items": {"actions": raw(np.zeros((count, 6, 3), "f4"))},
                        "max_tokens": 1, **GREEDY})  # fmt: skip
        await talk.hear("chunk")
        await talk.say({"type": "next", "items": {"actions": [ITEM.tolist()] * (LIMIT + 1 - count)},
                        "prompt": [PAD, PAD, PAD, PAD, PAD, PAD, 1] * (LIMIT + 1 - count)})  # fmt: skip
        await talk.hear("error")
        await talk.close()

    @told("gone_during_chunk", 5)
    async def gone_during_chunk(talk: Talk) -> None:
        await talk.say(start_of(talk.rng, max_tokens=1000))
        await asyncio.sleep(talk.rng.random() * 0.2)
        talk.socket.transport.abort()

    @told("gone_between_chunks", 3)
    async def gone_between_chunks(talk: Talk) -> None:
        await talk.start()
        talk.socket.transport.abort()

    @told("gone_at_once", 2)
    async def gone_at_once(talk: Talk) -> None:
        talk.socket.transport.abort()

    @told("half_a_frame", 2)
    async def half_a_frame(talk: Talk) -> None:
        talk.socket.transport.write(talk.rng.choice((b"\x81\xff", b"\x81\x05he", b"\xff" * 50, b"\x88\x80", bytes(9))))
        await asyncio.sleep(talk.rng.random() * 0.1)
        talk.socket.transport.abort()

    @told("idle", 0.3)
    async def idle(talk: Talk) -> None:
        if talk.rng.random() < 0.5:
            await talk.start()
        async with asyncio.timeout(LIMITS["IDLE_SECONDS"] + 15):
            await talk.hear("closed")

    @told("too_many", 0.1)
    async def too_many(talk: Talk) -> None:
        more: list[ClientConnection] = []
        try:
            for _ in range(LIMITS["SESSIONS"] + 2):
                more.append(await connect(talk.url, proxy=None))
            first = [json.loads(await socket.recv()) for socket in more]
            if not any(message["type"] == "error" and message["error"]["code"] == 429 for message in first):
                raise Wrong("more sessions than allowed")
        finally:
            await asyncio.gather(*(socket.close() for socket in more), return_exceptions=True)


# -- vLLM's own routes -------------------------------------------------------------------------------------------------


def _stock() -> None:
    named = {"model": "terra"}
    completion = {**named, "prompt": [1, 2, 3], "max_tokens": 2}
    tokens = {**named, "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}}
    said = {**named, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    responses = {**named, "input": "hello", "max_output_tokens": 2}
    ids = (VOCAB, 99, -1, 2**31, 2**32, 2**63, 2**70, 1.5, True, "1", None, math.nan, [1], {})

    def stock(name: str, path: str, base: Body, *changes: Body, weight: float = 1.0, nested: str = "") -> None:
        def make(rng: random.Random) -> Post:
            change = rng.choice(changes)
            body = {**base, nested: {**base[nested], **change}} if nested else {**base, **change}
            return Post(dumped(body), path=path)

        add(f"stock.{name}", STOCK, make, weight)

    completions, generate = "/v1/completions", "/inference/v1/generate"
    prompts = [
        *([1, odd, 2] for odd in ids),
        [PAD] * 6,
        [1, *[PAD] * 6, 2],
        [],
        [[1], [odd := 2**31]],
        [[]],
        "x",
        None,
        5,
    ]
    prompts += [[1] * MAX_LEN, [1] * 5000, [[1, 2], "x"], {"a": 1}, [odd], [-1], [VOCAB]]
    stock("completions_prompt", completions, completion, *({"prompt": prompt} for prompt in prompts), weight=8)
    stock("generate_ids", generate, tokens, *({"token_ids": prompt} for prompt in prompts), weight=8)
    lists = [*([odd] for odd in ids), [], list(range(32)), 1, "x", [1] * 5000]
    floor = {"min_tokens": 2}
    for at in (
        ("completions", completions, completion, ""),
        ("generate", generate, tokens, "sampling_params"),
    ):

        def one(name: str, *changes: Body, weight: float = 2.0, at: tuple[str, str, Body, str] = at) -> None:
            stock(f"{at[0]}_{name}", at[1], at[2], *changes, weight=weight, nested=at[3])

        one("stop_token_ids", *({"stop_token_ids": odd} for odd in lists))
        one("min_tokens_and_stops", *({"stop_token_ids": odd, **floor} for odd in lists), weight=3)
        one("allowed_token_ids", *({"allowed_token_ids": odd} for odd in lists), weight=3)
        bias = [{str(odd): 1.0} for odd in (VOCAB, -1, 2**31, 2**63, 2**70, "x", "", 1.5)]
        bias += [{"1": odd} for odd in (1e38, -1e38, 1e300, math.nan, math.inf, "x", None)] + [
            [],
            1,
            {str(i): 1 for i in range(2000)},
        ]
        one("logit_bias", *({"logit_bias": odd} for odd in bias), weight=3)
        counts = (0, -1, -2, 1.5, 2**31, 2**63, 2**70, "x", None, True, math.nan)
        one("counts", *({key: odd} for key in ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs",
        "prompt_logprobs")
                        for odd in counts if (key, odd) not in (("max_tokens", None), ("max_tokens", 2**31))),
                        weight=6)  # fmt: skip
        numbers = (-1, 0, 1e-300, 1e38, 1e300, math.nan, math.inf, "x", None, True)
        keys = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        one("numbers", *({key: odd} for key in keys for odd in numbers), weight=4)
        one("truncate", *({"truncate_prompt_tokens": odd} for odd in (0, -1, -2, 1, 2**31, 2**63, 2**70, 1.5, "x")))
        one("prompt_logprobs", *({"prompt_logprobs": odd} for odd in (0, 1, 20, -1, 21, 2**31)))
        one("stop", *({"stop": odd} for odd in ("x", ["x"], "", [""], [1], ["x"] * 500)))
        one("bad_words", *({"bad_words": odd} for odd in (["x"], [""], [1], "x", ["x"] * 500)))
        one(
            "structured",
            *(
                {"structured_outputs": odd}
                for odd in ({"regex": "a"}, {"regex": "("}, {"json": {}}, {"choice": []}, {"grammar": "x"}, {})
            ),
        )
        one(
            "extra_args",
            *({"extra_args": odd, "vllm_xargs": odd} for odd in ({"a": 1}, {"kv_transfer_params": {}}, [], 1)),
        )
        one(
            "thinking_and_repetition",
            *(
                {key: odd}
                for key in ("thinking_token_budget", "repetition_detection")
                for odd in (-1, 0, 5, {}, {"max_pattern_size": 2**40, "min_count": 2}, {"max_pattern_size": -1})
            ),
        )
        one(
            "ids_of_logprobs",
            *({"logprob_token_ids": odd, "prompt_logprob_token_ids": odd, "logprobs": 1} for odd in lists),
        )
        one(
            "priority_and_more",
            *(
                {key: odd}
                for key in (
                    "priority",
                    "cache_salt",
                    "echo",
                    "stream",
                    "best_of",
                    "suffix",
                    "user",
                    "request_id",
                    "data_parallel_rank",
                    "kv_transfer_params",
                    "return_token_ids",
                    "include_stop_str_in_output",
                    "flat_logprobs",
                )
                for odd in (-1, 2**63, "", "x", True, {}, [1])
            ),
            weight=4,
        )
        one("fine", {})
    stock(
        "beam_search",
        completions,
        {**completion, "use_beam_search": True},
        {"n": 2},
        {"n": 0},
        {"n": 40},
        {"prompt": [2**31]},
        {"length_penalty": math.nan},
        {"n": 2, "prompt": [VOCAB]},
    )
    stock(
        "prompt_embeds",
        completions,
        completion,
        *(
            {"prompt": None, "prompt_embeds": odd}
            for odd in ("AAAA", "", [1], base64.b64encode(pickle.dumps(ITEM)).decode())
        ),
    )
    features = (
        {}, {"mm_hashes": {"actions": ["x"]}, "mm_placeholders": {"actions": [{"offset": 0, "length": 6}]}},
        {"mm_hashes": {"actions": ["x"]}, "mm_placeholders": {"actions": [{"offset": 0, "length": 6}]},
        "kwargs_data": {"actions": ["AAAA"]}},
        {"mm_hashes": {"actions": ["x"]}, "mm_placeholders": {"actions": [{"offset": 2**40, "length": -6}]},
        "kwargs_data": {"actions": [None]}},
        {"mm_hashes": {"image": ["x"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 6}]},
        "kwargs_data": None},
        [], 1, "x",
    )  # fmt: skip
    stock(
        "generate_features",
        generate,
        {**tokens, "token_ids": [PAD] * 6},
        *({"features": odd} for odd in features),
        weight=3,
    )
    stock("chat", "/v1/chat/completions", said, {}, {"messages": []}, {"messages": [{"role": "x"}]}, {"messages": "x"},
          {"messages": [{"role": "user", "content": [{"type": "actions", "actions": 1}]}]}, {"stream": True},
          {"n": 2**31},
          {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
          {"logprobs": True, "top_logprobs": 99}, {"tools": []}, {"prompt_logprobs": 1}, weight=3)  # fmt: skip
    stock("responses", "/v1/responses", responses, {}, {"input": []}, {"input": [{"type": "x"}]}, {"input": 1},
    {"stream": True},
          {"max_output_tokens": -1}, {"background": True}, {"previous_response_id": "x"}, {"temperature": math.nan},
          weight=3)  # fmt: skip
    stock("messages", "/v1/messages", said, {}, {"messages": []}, {"max_tokens": 0}, {"messages": 1}, {"system": 1})
    stock(
        "tokenize",
        "/tokenize",
        named,
        {"prompt": "x"},
        {"prompt": [1]},
        {},
        {"messages": []},
        {"prompt": "x" * 10_000},
        weight=2,
    )
    stock(
        "detokenize",
        "/detokenize",
        named,
        *({"tokens": [odd]} for odd in ids),
        {"tokens": []},
        {"tokens": 1},
        {},
        weight=3,
    )
    stock("scoring", "/generative_scoring", {**named, "query": [1], "items": [[2]], "label_token_ids": [1]}, {},
    {"label_token_ids": [99]},
          {"label_token_ids": [2**31]}, {"query": [2**31]}, {"items": [[-1]]}, {"items": []}, {"label_token_ids": []},
          weight=3)  # fmt: skip
    stock("invocations", "/invocations", completion, {}, {"prompt": [2**31]}, {"prompt": None}, {"messages": []})
    stock("another_model", completions, completion, {"model": "x"}, {"model": 1}, {"model": ""})
    for name, path in {"completions": completions, "generate": generate}.items():
        add(
            f"stock.{name}_no_json",
            STOCK,
            lambda rng, path=path: Post(rng.choice((b"", b"{", b"[]", b"\xff", b"[" * 100_000)), path=path),
        )


_prompts()
_shapes()
_values()
_forms()
_fields()
CHANGES = [name for name, kind in KINDS.items() if kind.change and kind.weight >= 1]
_bodies()
_sessions()
_stock()


@dataclass(frozen=True)
class Case:
    """One request."""

    number: int
    kind: Kind
    request: Post | Raw | Script


def case(seed: int, number: int) -> Case:
    """Request `number` of a seed. The first ones have one of each kind."""
    names = list(KINDS)
    random.Random(seed).shuffle(names)
    rng = random.Random(f"{seed}-{number}")
    weights = [KINDS[name].weight for name in names]
    name = names[number] if number < len(names) else rng.choices(names, weights)[0]
    return Case(number, KINDS[name], KINDS[name].make(rng))


# -- the run -----------------------------------------------------------------------------------------------------------


@dataclass
class Told:
    """What came back: a status, or a word; and the body."""

    status: str
    body: bytes = b""


class Soak:
    """One run against one server."""

    def __init__(self, url: str, pid: int | None, seed: int, concurrency: int) -> None:
        self.url, self.seed, self.concurrency = url, seed, concurrency
        self.ws = f"ws://{urlsplit(url).netloc}{SESSION}"
        self.process = psutil.Process(pid) if pid else None
        self.http, self.others = self._client(), self._client()  # the good clients', and those of broken connections
        self.sockets = asyncio.Semaphore(MOST_SOCKETS)
        self.answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.violations: list[Body] = []
        self.stock_errors: dict[str, Body] = {}
        self.in_flight: dict[int, Case] = {}
        self.seconds: list[float] = []
        self.good: Counter[str] = Counter()
        self.reconnects = 0
        self.memory: list[tuple[float, float, float]] = []
        self.dead = self.done = False

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=64, keepalive_expiry=1)
        return httpx.AsyncClient(base_url=self.url, timeout=BOUND_SECONDS, trust_env=False, limits=limits)

    def violate(self, kind: str, what: str, number: int | None = None, request: str = "") -> None:
        self.violations.append({"kind": kind, "what": what[:SHOWN], "number": number, "request": request[:SHOWN]})

    # -- malformed requests

    async def one(self, number: int) -> None:
        this = case(self.seed, number)
        self.in_flight[number] = this
        begun = time.monotonic()
        told = Told("hang")
        try:
            async with asyncio.timeout(BOUND_SECONDS):
                told = await self._ask(this)
        except TimeoutError:
            self.violate(this.kind.name, f"no answer within {BOUND_SECONDS:g} s", number, shown(this))
        except Wrong as error:
            told = Told("wrong")
            self.violate(this.kind.name, str(error), number, shown(this))
        except (httpx.HTTPError, WebSocketException, OSError, EOFError, ValueError) as error:
            told = Told("cut")
            if not (isinstance(this.request, Post) and len(this.request.content) > LIMITS["BODY_BYTES"]):
                self.violate(this.kind.name, f"{type(error).__name__}: {error}", number, shown(this))
        if self.dead:
            return  # those in flight are suspects
        del self.in_flight[number]
        self.seconds.append(time.monotonic() - begun)
        self.answers[this.kind.name][told.status] += 1
        self._judge(this, told)

    async def _ask(self, this: Case) -> Told:
        request = this.request
        if isinstance(request, Script):
            return await self._talk(this, request)
        if isinstance(request, Raw):
            return await self._raw(request)
        asking = partial(self.others.request, request.method, request.path, content=request.content)
        if request.leave is None:
            try:
                response = await asking(headers=request.headers)
            except (httpx.ReadError, httpx.RemoteProtocolError):  # a kept connection may end just then
                self.reconnects += 1
                async with self._client() as fresh:
                    response = await fresh.request(
                        request.method, request.path, content=request.content, headers=request.headers
                    )
            return Told(str(response.status_code), response.content)
        with suppress(TimeoutError):
            async with asyncio.timeout(request.leave):
                response = await asking(headers=request.headers)
                return Told(str(response.status_code), response.content)
        return Told("left")

    async def _raw(self, request: Raw) -> Told:
        parts = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(request.content)
            await writer.drain()
            if not request.wait:
                await asyncio.sleep(request.seconds)
                return Told("left")
            with suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(request.seconds):
                    head = await reader.readuntil(b"\r\n")
                    return Told(head.split()[1].decode())
            return Told("left")
        finally:
            writer.transport.abort()

    async def _talk(self, this: Case, script: Script) -> Told:
        async with self.sockets:
            while True:
                rng = random.Random(f"{self.seed}-{this.number}-talk")
                socket = await connect(
                    self.ws, max_size=None, proxy=None, ping_interval=None, open_timeout=BOUND_SECONDS
                )
                talk = Talk(socket, rng, self.ws)
                try:
                    await talk.hear("ready")
                    await script.play(talk)
                    return Told("200")
                except Busy:
                    self.answers[this.kind.name]["busy"] += 1
                    await asyncio.sleep(0.2)
                finally:
                    for code, count in talk.codes.items():
                        self.answers[this.kind.name][f"error {code}"] += count
                    socket.transport.abort() if self.dead else await socket.close()

    def _judge(self, this: Case, told: Told) -> None:
        if not told.status.isdigit():
            return
        status, name = int(told.status), this.kind.name
        if this.kind.expects is STOCK:
            if status >= 500:
                self._stock_error(this, told)
            return
        if isinstance(this.request, (Script, Raw)):
            if status >= 500:
                self.violate(name, f"status {status}", this.number, shown(this))
            elif this.kind.expects is REFUSED and status < 400:
                self.violate(name, f"answered {status}", this.number, shown(this))
            return
        wanted = {REFUSED: (4,), TAKEN: (2,), EITHER: (2, 4)}[this.kind.expects]
        if status // 100 not in wanted:
            self.violate(
                name, f"answered {status}: {told.body[:300].decode(errors='replace')}", this.number, shown(this)
            )
        elif status >= 400 and not name.startswith(("method.", "path.")):  # these are the framework's
            try:
                problem = wrong_error(json.loads(told.body))
            except ValueError:
                problem = f"no JSON: {told.body[:200]!r}"
            if problem:
                self.violate(name, f"{status}, {problem}", this.number, shown(this))
        elif status == 200 and b'"error":{' in told.body:  # an event of a stream
            self.violate(name, f"an error in a stream: {told.body[:300]!r}", this.number, shown(this))

    def _stock_error(self, this: Case, told: Told) -> None:
        assert isinstance(this.request, Post)
        known = self.stock_errors.setdefault(this.kind.name, {"count": 0, "body": None})
        known["count"] += 1
        text = this.request.content[:2000].decode(errors="replace")
        if known["body"] is None or len(text) < len(known["body"]):
            answer = told.body[:300].decode(errors="replace")
            known.update(status=int(told.status), path=this.request.path, body=text, answer=answer)

    # -- good clients

    async def rollout(self, drive: Drive, *, stream: bool, chunks: int = 4) -> list[list[int]]:
        """Generated frames of one closed loop."""
        while True:
            async with connect(self.ws, max_size=None, proxy=None, open_timeout=BOUND_SECONDS) as socket:
                talk = Talk(socket, random.Random(0), self.ws)
                try:
                    await talk.hear("ready")
                except Busy:
                    await asyncio.sleep(0.3)
                    continue
                items = {"actions": raw(drive.actions[:3])}
                await talk.say(
                    {
                        "type": "start",
                        "prompt": drive.prompt(3),
                        "items": items,
                        "max_tokens": 64,
                        "stream": stream,
                        **GREEDY,
                    }
                )
                frames = [(await talk.hear("chunk"))["token_ids"]]
                for step in range(3, 2 + chunks):
                    await talk.say({"type": "next", "items": {"actions": raw(drive.actions[step : step + 1])}})
                    frames.append((await talk.hear("chunk"))["token_ids"])
                await talk.close()
                return frames

    async def frame(self, drive: Drive, frames: int, *, stream: bool, salt: str | None = None) -> list[int]:
        """One generated frame."""
        items = {"actions": drive.actions[:frames].tolist() if stream else raw(drive.actions[:frames])}
        body = {
            "prompt": drive.prompt(frames),
            "items": items,
            "max_tokens": 64,
            "stream": stream,
            "cache_salt": salt,
            **GREEDY,
        }
        if not stream:
            response = await self.http.post(GENERATE, content=dumped(body))
            if response.status_code != 200:
                raise Wrong(f"answered {response.status_code}: {response.text[:300]}")
            return list(response.json()["choices"][0]["token_ids"])
        ids: list[int] = []
        async with self.http.stream("POST", GENERATE, content=dumped(body)) as response:
            if response.status_code != 200:
                raise Wrong(f"answered {response.status_code}: {(await response.aread())[:300]!r}")
            last = ""
            async for line in response.aiter_lines():
                last = line or last
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise Wrong(f"an error in a stream: {line[:300]}")
                    ids += event["choices"][0]["token_ids"] if event["choices"] else []
            if last != "data: [DONE]":
                raise Wrong(f"a stream that ends with {last[:100]!r}")
        return ids

    async def _good(self, name: str, wanted: Any, ask: Callable[[random.Random], Awaitable[tuple[Any, Any]]]) -> None:
        rng = random.Random(f"{self.seed}-{name}")
        while not (self.done or self.dead):
            try:
                async with asyncio.timeout(BOUND_SECONDS):
                    key, found = await ask(rng)
                self.good[name] += 1
                if found != wanted[key]:
                    self.violate(f"good.{name}", f"wrong answer for {key}: {found}, not {wanted[key]}")
            except TimeoutError:
                self.violate(f"good.{name}", f"no answer within {BOUND_SECONDS:g} s")
            except Exception as error:
                if not self.dead:
                    self.violate(f"good.{name}", f"{type(error).__name__}: {error}")
                    await asyncio.sleep(0.5)

    # -- the server

    async def _watch(self) -> None:
        failed = 0
        while not self.done:
            await asyncio.sleep(1)
            self._weigh()
            try:
                fine = (await self.http.get("/health", timeout=30)).status_code == 200
            except httpx.HTTPError as error:
                fine = False
                failed += not isinstance(error, httpx.TransportError) or isinstance(error, httpx.ConnectError)
            else:
                failed = 0 if fine else failed + 1
            gone = self.process is not None and not (self.process.is_running() and self.process.status() != "zombie")
            if not fine and (gone or failed >= 2):
                self.dead = True
                suspects = [f"{this.kind.name} #{n} {shown(this)[:300]}" for n, this in self.in_flight.items()]
                self.violations.append({"kind": "engine", "what": "died", "number": None, "request": suspects})
                return

    def _weigh(self) -> None:
        """Resident memory of the API server and of the engine."""
        with suppress(psutil.Error):
            if self.process is not None:
                children = [child.memory_info().rss for child in self.process.children(recursive=True)]
                self.memory.append(
                    (time.monotonic(), self.process.memory_info().rss / 2**20, max(children, default=0) / 2**20)
                )

    async def gauges(self) -> dict[str, float]:
        """What the server says is open or running."""
        wanted = ("mmkit:sessions_open", "vllm:num_requests_running", "vllm:num_requests_waiting")
        text = (await self.http.get("/metrics")).text
        found = [line.rsplit(" ", 1) for line in text.splitlines() if line.split("{")[0].split(" ")[0] in wanted]
        return {name.split("{")[0]: float(value) for name, value in found}

    # -- all together

    async def run(self, numbers: list[int], seconds: float) -> Body:
        """Ask, and report."""
        drives = dict(enumerate(DRIVES[:2]))
        loops = {key: await self.rollout(drive, stream=False) for key, drive in drives.items()}
        frames = {(d, n): await self.frame(DRIVES[d], n, stream=False) for d in range(len(DRIVES)) for n in (1, 3)}
        begun = time.monotonic()

        async def loop(rng: random.Random, key: int) -> tuple[Any, Any]:
            return key, await self.rollout(DRIVES[key], stream=rng.random() < 0.5)

        async def single(rng: random.Random, stream: bool) -> tuple[Any, Any]:
            key = rng.choice(list(frames))
            salt = f"{rng.random()}" if rng.random() < 0.5 else None  # else the prefix cache may answer
            return key, await self.frame(DRIVES[key[0]], key[1], stream=stream, salt=salt)

        beside = [asyncio.create_task(self._watch())]
        for key in drives:
            beside.append(asyncio.create_task(self._good(f"session_{key}", loops, partial(loop, key=key))))
        for name, stream in {"json": False, "stream": True}.items():
            beside.append(asyncio.create_task(self._good(name, frames, partial(single, stream=stream))))
        waiting = iter(tqdm(numbers, unit="request", smoothing=0, disable=None))

        async def work() -> None:
            for number in waiting:
                if self.dead or (seconds and time.monotonic() - begun > seconds):
                    return
                await self.one(number)

        workers = [asyncio.create_task(work()) for _ in range(self.concurrency)]
        while (pending := [task for task in workers if not task.done()]) and not self.dead:
            await asyncio.wait(pending, timeout=1)
        for task in workers:
            if self.dead:
                task.cancel()
        for outcome in await asyncio.gather(*workers, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
        took = time.monotonic() - begun
        self.done = True
        await asyncio.gather(*beside)
        open_now = {} if self.dead else await self._settled()
        await self.http.aclose()
        await self.others.aclose()
        return self._report(took, open_now)

    async def _settled(self) -> dict[str, float]:
        open_now: dict[str, float] = {}
        for _ in range(60):
            open_now = await self.gauges()
            if not any(open_now.values()):
                break
            await asyncio.sleep(0.5)
        if any(open_now.values()) or len(open_now) < 3:
            self.violate("metrics", f"after all requests: {open_now}")
        self._weigh()
        return open_now

    def _report(self, took: float, open_now: dict[str, float]) -> Body:
        count = len(self.seconds)
        times = sorted(self.seconds) or [0.0]
        memory = {}
        if len(self.memory) >= 10:
            for index, name in enumerate(("server", "engine"), start=1):
                sizes = [sample[index] for sample in self.memory]
                bounds = [len(sizes) * tenth // 10 for tenth in range(11)]
                memory[name] = tenths = [statistics.median(sizes[a:b]) for a, b in pairwise(bounds)]
                before, after = statistics.median(tenths[2:5]), statistics.median(tenths[8:])
                if after > before * 1.1 and after > before + 100:
                    self.violate("memory", f"{name} grew from {before:.0f} to {after:.0f} MiB")
        both = {
            name: dict(counts)
            for name, counts in sorted(self.answers.items())
            if KINDS[name].expects is EITHER and "200" in counts
        }
        return {
            "seed": self.seed,
            "requests": count,
            "seconds": round(took, 1),
            "per_second": round(count / took, 1),
            "kinds_drawn": len(self.answers),
            "kinds_known": len(KINDS),
            "good_answers": dict(self.good),
            "reconnects": self.reconnects,
            "statuses": dict(sum(self.answers.values(), Counter())),
            "violations": self.violations,
            "taken_although_odd": both,
            "stock_5xx": self.stock_errors,
            "memory_mib_in_each_tenth": {name: [round(size, 1) for size in sizes] for name, sizes in memory.items()},
            "answer_seconds": {
                q: round(times[int(p * (len(times) - 1))], 3) for q, p in (("p50", 0.5), ("p99", 0.99), ("most", 1))
            },
            "gauges": open_now,
            "kinds": {name: dict(counts) for name, counts in sorted(self.answers.items())},
        }


def shown(this: Case) -> str:
    """A request as the report shows it."""
    request = this.request
    if isinstance(request, Script):
        return request.shown
    text = request.content.decode(errors="replace")
    text = text if len(text) <= SHOWN else f"{text[:100]}...{text[-SHOWN + 110 :]}"
    return text if isinstance(request, Raw) else f"{request.method} {request.path} {text}"


@contextmanager
def served(url: str | None, log: Path | None = None) -> Iterator[tuple[str, int | None]]:
    """A server's address and process."""
    if url:
        port = urlsplit(url).port
        found = [
            c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port and c.pid
        ]
        yield url, found[0] if found else None
        return
    with Server(CHECKPOINT, *OPTIONS, environment=ENVIRONMENT, log=log) as server:
        assert server.process is not None
        yield server.url, server.process.pid


def soak(
    requests: int,
    *,
    seed: int = 0,
    seconds: float = 0,
    url: str | None = None,
    only: int | None = None,
    concurrency: int = CONCURRENCY,
    log: Path | None = None,
) -> Body:
    """The report on a number of requests."""
    numbers = [only] if only is not None else list(range(requests))
    with served(url, log) as (address, pid):
        return asyncio.run(Soak(address, pid, seed, concurrency).run(numbers, seconds))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--url", help="a server of the road world with the limits of LIMITS; default: start one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0, help="stop asking after that long")
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one request of the seed")
    parser.add_argument("--store", type=Path, metavar="FILE.json")
    parser.add_argument("--log", type=Path, help="file for what the server writes")
    args = parser.parse_args()
    report = soak(
        args.requests, seed=args.seed, seconds=args.seconds, url=args.url, only=args.only, concurrency=args.concurrency,
        log=args.log,
    )  # fmt: skip
    if args.store:
        args.store.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: value for key, value in report.items() if key != "kinds"}, indent=1))
    for name, counts in report["kinds"].items():
        print(f"{name:44} {KINDS[name].expects:8} {' '.join(f'{status}: {count}' for status, count in counts.items())}")
    return 1 if report["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
