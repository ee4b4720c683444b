"""Clients of a server that vanish, fall silent or wait, by hand."""

import base64
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import httpx
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from mmkit.serve.process import Server
from tests.night.malformed import ACTIONS, GENERATE, GREEDY, HEADERS, MAX_LEN, SESSION, prompt_of, raw
from tests.night.soak import GAUGES, metrics

WAIT = 240
"""Seconds after which an answer does not come any more."""
LONG = MAX_LEN - 100
"""Tokens that take the engine seconds."""


def good(**more: Any) -> dict[str, Any]:
    return {"prompt": prompt_of(0, 1), "items": {"actions": raw(ACTIONS[0, :1])}, "max_tokens": 4, **GREEDY, **more}


def start(**more: Any) -> str:
    return json.dumps({"type": "start", **good(**more)})


def post(server: Server) -> httpx.Response:
    return httpx.post(server.url + GENERATE, json=good(), headers=HEADERS, timeout=WAIT)


def opened(server: Server, headers: dict[str, str] = HEADERS) -> ClientConnection:
    """A session, from its client's side."""
    # without a bound: a client whose queue is full does not see the end either
    options = {"open_timeout": WAIT, "close_timeout": 10, "proxy": None, "max_queue": None}
    return connect(f"ws://127.0.0.1:{server.port}{SESSION}", additional_headers=headers, **options)


def hear(session: ClientConnection) -> dict[str, Any]:
    return json.loads(session.recv(WAIT))


def rest(session: ClientConnection) -> list[dict[str, Any]]:
    """What a session says until it is closed."""
    messages = []
    with suppress(ConnectionClosed):
        while True:
            messages.append(hear(session))
    return messages


def long_stream(server: Server, **more: Any) -> AbstractContextManager[httpx.Response]:
    body = good(stream=True, max_tokens=LONG, **more)
    return httpx.stream("POST", server.url + GENERATE, json=body, headers=HEADERS, timeout=WAIT)


def first_event(lines: Iterator[str]) -> dict[str, Any]:
    return json.loads(next(line for line in lines if line)[6:])


def rest_of(lines: Iterator[str]) -> list[str]:
    """The events of a stream until it ends or is cut."""
    events = []
    with suppress(httpx.RemoteProtocolError, httpx.ReadError):
        events += [line for line in lines if line]
    return events


@contextmanager
def plain(server: Server, method: str, path: str, *lines: str) -> Iterator[socket.socket]:
    """A socket on which the head of a request was sent, and which reads no more than it is asked to."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(WAIT)
        connection.connect(("127.0.0.1", server.port))
        fixed = (f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: {HEADERS['authorization']}")
        connection.sendall("\r\n".join([*fixed, *lines, "", ""]).encode())
        yield connection


@contextmanager
def shaken(server: Server) -> Iterator[socket.socket]:
    """A websocket that never answers."""
    key = f"Sec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}"
    lines = ("Connection: Upgrade", "Upgrade: websocket", key, "Sec-WebSocket-Version: 13")
    with plain(server, "GET", SESSION, *lines) as connection:
        assert connection.recv(12) == b"HTTP/1.1 101"
        yield connection


def framed(text: str) -> bytes:
    """A masked frame of a websocket; the mask is zeros."""
    return b"\x81\xfe" + len(text).to_bytes(2, "big") + bytes(4) + text.encode()


def until(condition: Callable[[], Any]) -> bool:
    """Whether something comes true in time."""
    end = time.monotonic() + WAIT
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def scraped(server: Server) -> dict[str, float]:
    return metrics(httpx.get(f"{server.url}/metrics", timeout=WAIT).text)


def empties(server: Server) -> bool:
    """Whether no session stays open, and the engine has nothing to do."""
    return until(lambda: not any(scraped(server)[name] for name in GAUGES))
