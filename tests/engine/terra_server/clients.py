"""Clients of a Terra server that see every message and can leave at any byte, and what the server tells of itself."""

import json
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import httpx
import psutil
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from examples.server import Server
from tests.night.malformed import (
    ACTIONS,
    GENERATE,
    GREEDY,
    HEADERS,
    MAX_LEN,
    SESSION,
    build_body,
    encode_array,
    make_prompt,
)
from tests.night.soak import WAIT, scrape_metrics, wait_until, wait_until_idle

__all__ = ["scrape_metrics", "wait_until", "wait_until_idle"]

LONG = MAX_LEN - 100
"""Tokens that take the engine seconds."""


# -- requests ----------------------------------------------------------------------------------------------------------


def make_body(**fields: Any) -> dict[str, Any]:
    """Return the body of a request for four tokens after a frame with its action; or with other fields."""
    body = {"prompt": make_prompt(0, 1), "items": {"actions": encode_array(ACTIONS[0, :1])}, "max_tokens": 4}
    return build_body(**(body | GREEDY | fields))


def ask(
    server: Server, body: Any, path: str = GENERATE, method: str = "POST", headers: Any = HEADERS
) -> httpx.Response:
    """Send a request with a body of bytes, or of JSON."""
    content = body
    if not isinstance(body, bytes):
        content = json.dumps(body).encode()
    return httpx.request(method, server.url + path, content=content, headers=headers, timeout=WAIT)


def open_long_stream(server: Server, **fields: Any) -> AbstractContextManager[httpx.Response]:
    body = make_body(stream=True, max_tokens=LONG, **fields)
    return httpx.stream("POST", server.url + GENERATE, json=body, headers=HEADERS, timeout=WAIT)


def receive_rest_of_stream(lines: Iterator[str]) -> list[str]:
    """Return the events of a stream until it ends or is cut."""
    events = []
    with suppress(httpx.RemoteProtocolError, httpx.ReadError):
        for line in lines:
            if line:
                events.append(line)
    return events


# -- sessions ----------------------------------------------------------------------------------------------------------


def open_session(server: Server, headers: dict[str, str] = HEADERS) -> ClientConnection:
    """Open a session from its client's side."""
    return connect(
        f"ws://127.0.0.1:{server.port}{SESSION}",
        additional_headers=headers,
        open_timeout=WAIT,
        close_timeout=10,
        proxy=None,
        max_queue=None,  # a client whose queue is full does not see the end either
    )


def send(session: ClientConnection, message: Any) -> None:
    """Send a message, or a text or bytes that are none."""
    if isinstance(message, dict):
        message = json.dumps(message)
    session.send(message)


def receive(session: ClientConnection) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(session.recv(WAIT))
    return message


def receive_rest(session: ClientConnection) -> list[dict[str, Any]]:
    """Return what a session says until it is closed."""
    messages = []
    with suppress(ConnectionClosed):
        while True:
            messages.append(receive(session))
    return messages


def start(session: ClientConnection, *types: str, **fields: Any) -> None:
    """Begin to generate, and receive messages of these types."""
    send(session, {"type": "start", **make_body(**fields)})
    for message_type in types:
        assert receive(session)["type"] == message_type


# -- connections -------------------------------------------------------------------------------------------------------

UPGRADE = (
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)
"""The lines of a head that asks for a websocket."""


def make_head(method: str, path: str, *lines: str) -> bytes:
    """Return the head of a request."""
    head = [f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: {HEADERS['authorization']}"]
    head.extend(lines)
    return ("\r\n".join(head) + "\r\n\r\n").encode()


@contextmanager
def open_socket(server: Server, method: str, path: str, *lines: str) -> Iterator[socket.socket]:
    """Send the head of a request on a socket, which reads no more than it is asked to."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(WAIT)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(make_head(method, path, *lines))
        yield connection


# -- a server ----------------------------------------------------------------------------------------------------------


class BusyServer(NamedTuple):
    """What a busy server has.

    Attributes:
        processes: below its own.
        waiting: a session that waits for its client.
        generating: a session that is generating.
        lines: those of a stream that is generating.
    """

    processes: list[psutil.Process]
    waiting: ClientConnection
    generating: ClientConnection
    lines: Iterator[str]


@contextmanager
def keep_busy(server: Server) -> Iterator[BusyServer]:
    """Keep two sessions and a stream open within the block."""
    with ExitStack() as stack:
        processes = psutil.Process(server.process.pid).children(recursive=True)
        waiting = stack.enter_context(open_session(server))
        generating = stack.enter_context(open_session(server))
        start(waiting, "ready", "chunk")
        start(generating, "ready", "tokens", stream=True, max_tokens=LONG)
        lines = stack.enter_context(open_long_stream(server, n=8, temperature=1.0)).iter_lines()
        next(lines)
        yield BusyServer(processes, waiting, generating, lines)


def assert_ends(server: Server, processes: list[psutil.Process]) -> None:
    """Wait for the end of a server, and check that no process of it remains."""
    server.process.wait(WAIT)
    _, alive = psutil.wait_procs(processes, timeout=WAIT)
    assert alive == []
