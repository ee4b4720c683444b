"""Clients of a Terra server that see every message and can leave at any byte, and what the server tells of itself."""

import json
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import httpx
import psutil
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from examples.server import Server
from tests.night.malformed import ACTIONS, GENERATE, GREEDY, HEADERS, MAX_LEN, SESSION, asking, prompt_of, raw
from tests.night.soak import WAIT, empties, scraped, until

__all__ = ["empties", "scraped", "until"]

LONG = MAX_LEN - 100
"""Tokens that take the engine seconds."""


def good(**more: Any) -> dict[str, Any]:
    plain = {"prompt": prompt_of(0, 1), "items": {"actions": raw(ACTIONS[0, :1])}, "max_tokens": 4}
    return asking(**{**plain, **GREEDY, **more})


def ask(
    server: Server, body: Any, path: str = GENERATE, method: str = "POST", headers: Any = HEADERS
) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.request(method, server.url + path, content=content, headers=headers, timeout=WAIT)


def long_stream(server: Server, **more: Any) -> AbstractContextManager[httpx.Response]:
    body = good(stream=True, max_tokens=LONG, **more)
    return httpx.stream("POST", server.url + GENERATE, json=body, headers=HEADERS, timeout=WAIT)


def opened(server: Server, headers: dict[str, str] = HEADERS) -> ClientConnection:
    """A session, from its client's side."""
    # without a bound: a client whose queue is full does not see the end either
    options = {"open_timeout": WAIT, "close_timeout": 10, "proxy": None, "max_queue": None}
    return connect(f"ws://127.0.0.1:{server.port}{SESSION}", additional_headers=headers, **options)


def say(session: ClientConnection, message: Any) -> None:
    session.send(json.dumps(message) if isinstance(message, dict) else message)


def start(session: ClientConnection, *types: str, **more: Any) -> None:
    """Begin to generate, and hear messages of these types."""
    say(session, {"type": "start", **good(**more)})
    assert [hear(session)["type"] for _ in types] == [*types]


def hear(session: ClientConnection) -> dict[str, Any]:
    return json.loads(session.recv(WAIT))


def rest(session: ClientConnection) -> list[dict[str, Any]]:
    """What a session says until it is closed."""
    messages = []
    with suppress(ConnectionClosed):
        while True:
            messages.append(hear(session))
    return messages


def head(method: str, path: str, *lines: str) -> bytes:
    """Of a request."""
    fixed = (f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: {HEADERS['authorization']}")
    return "\r\n".join([*fixed, *lines, "", ""]).encode()


UPGRADE = (
    "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)  # fmt: skip
"""The lines of a head that asks for a websocket."""


@contextmanager
def plain(server: Server, method: str, path: str, *lines: str) -> Iterator[socket.socket]:
    """A socket on which the head of a request was sent, and which reads no more than it is asked to."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(WAIT)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head(method, path, *lines))
        yield connection


@contextmanager
def busy(server: Server) -> Iterator[tuple[list[psutil.Process], ClientConnection, ClientConnection, Iterator[str]]]:
    """The processes of a server, a session that waits, one that is generating, and a stream."""
    with ExitStack() as stack:
        processes = psutil.Process(server.process.pid).children(recursive=True)
        waiting, generating = (stack.enter_context(opened(server)) for _ in range(2))
        start(waiting, "ready", "chunk")
        start(generating, "ready", "tokens", stream=True, max_tokens=LONG)
        lines = stack.enter_context(long_stream(server, n=8, temperature=1.0)).iter_lines()
        next(lines)
        yield processes, waiting, generating, lines


def rest_of(lines: Iterator[str]) -> list[str]:
    """The events of a stream until it ends or is cut."""
    events = []
    with suppress(httpx.RemoteProtocolError, httpx.ReadError):
        for line in filter(None, lines):
            events.append(line)
    return events


def ends(server: Server, processes: list[psutil.Process]) -> None:
    """Nothing of a server stays."""
    server.process.wait(WAIT)
    assert psutil.wait_procs(processes, timeout=WAIT)[1] == []
