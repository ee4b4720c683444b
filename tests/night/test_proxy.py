"""The attacks that a proxy is for, through the real nginx with deploy/nginx.conf: good clients do not notice them.

The attackers have another address than the good clients, since limits count by address.
"""

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode

from examples.server import Server
from tests.engine.terra_server import clients
from tests.engine.terra_server.clients import make_head
from tests.night.malformed import GENERATE, HEADERS, KEY, SESSION
from tests.night.proxy import NGINX, Proxy, deployed
from tests.night.soak import MIB, Beside, peak, terra_server

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(NGINX is None, reason="needs nginx: apt-get install nginx-light"),
]

ATTACKER = ("127.0.0.2", 0)
SECONDS = 8
"""How long an attack goes on that has no end of its own."""
MOST_SESSIONS = 8
"""Of one address, in deploy/nginx.conf."""
ROOM = 150 * MIB


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = {"SESSIONS": 16, "BODY_BYTES": 2**26, "IDLE_SECONDS": 300}
    with terra_server(tmp_path_factory.mktemp("server") / "log", **limits) as server:
        yield server


@pytest.fixture(scope="module")
def proxy(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with deployed(server, tmp_path_factory.mktemp("proxy")) as proxy:
        yield proxy


def raw(proxy: Proxy) -> socket.socket:
    """A connection of the attacker."""
    connection = socket.create_connection(("127.0.0.1", proxy.port), timeout=60, source_address=ATTACKER)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return connection


UPGRADE = make_head("GET", SESSION, *clients.UPGRADE)


def session(proxy: Proxy, **options: Any) -> Any:
    options = {"proxy": None, "max_size": None, "ping_interval": None, "open_timeout": 60, **options}
    headers = {"authorization": HEADERS["authorization"]}
    url = f"ws://127.0.0.1:{proxy.port}{SESSION}"
    return connect(url, additional_headers=headers, local_addr=ATTACKER, **options)


# -- attacks -----------------------------------------------------------------------------------------------------------


async def silent_sessions(proxy: Proxy) -> Any:
    """Some are let in, the others are not."""

    async def one() -> int:
        try:
            async with session(proxy) as ws:
                await ws.recv()
                await asyncio.sleep(SECONDS)
                return 101
        except InvalidStatus as refused:
            return refused.response.status_code

    told = Counter(await asyncio.gather(*(one() for _ in range(3 * MOST_SESSIONS))))
    assert told == {101: MOST_SESSIONS, 429: 2 * MOST_SESSIONS}
    return told


MESSAGES = {
    "small": ('{"x":1}', 200_000),
    "big": (json.dumps({"type": "next", "x": "a" * 1_000_000}), 300),
    "binary": (b"x" * 1000, 50_000),
    "deep": ("[" * 500_000, 100),
}


async def flooded(kind: str, proxy: Proxy) -> int:
    """Messages whose refusals nobody reads."""
    (message, count), sent = MESSAGES[kind], 0
    async with session(proxy) as ws:
        with suppress(TimeoutError, ConnectionClosed):
            async with asyncio.timeout(SECONDS):
                for _ in range(count):
                    await ws.send(message)
                    sent += 1
        ws.transport.abort()
    return sent


async def compressed(proxy: Proxy) -> Any:
    """No server behind the proxy agrees to it."""
    async with session(proxy, compression="deflate") as ws:
        assert ws.protocol.extensions == []


async def storm(proxy: Proxy) -> Any:
    """Sessions and requests that are begun and aborted."""

    async def begin(number: int) -> str:
        try:
            async with session(proxy) as ws:
                await ws.recv()
                await ws.send(json.dumps({"type": "start", **clients.make_body(max_tokens=300)}))
                await asyncio.sleep(0.02 * (number % 5))
                ws.transport.abort()
                return "begun"
        except (InvalidStatus, ConnectionClosed, OSError):
            return "refused"

    async def post(number: int) -> str:
        body = json.dumps(clients.make_body(max_tokens=300, stream=number % 2 == 0)).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", proxy.port, local_addr=ATTACKER)
        writer.write(make_head("POST", GENERATE, f"Content-Length: {len(body)}") + body)
        await asyncio.sleep(0.01 * (number % 7))
        writer.transport.abort()
        return "posted"

    outcomes: Counter[str] = Counter()
    for first in range(0, 500, 25):
        outcomes.update(await asyncio.gather(*(ask(first + i) for i in range(25) for ask in (begin, post))))
    return outcomes


BODY = json.dumps(clients.make_body()).encode()
LENGTH = f"Content-Length: {len(BODY)}"
ODD = {
    "two lengths": make_head("POST", GENERATE, "Content-Length: 4", "Transfer-Encoding: chunked")
    + b"0\r\n\r\nGET /health",
    "an unknown coding": make_head("POST", GENERATE, "Transfer-Encoding: xchunked") + BODY,
    "a sign": make_head("POST", GENERATE, f"Content-Length: +{len(BODY)}") + BODY,
    "a long header": make_head("POST", GENERATE, "X: " + "a" * 1_000_000),
    "10,000 headers": make_head("POST", GENERATE, *(f"X{i}: 1" for i in range(10_000)), LENGTH) + BODY,
    "a long path": make_head("GET", "/v1/mm/" + "a" * 60_000),
    "TRACE": make_head("TRACE", GENERATE),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an upgrade of another route": UPGRADE.replace(SESSION.encode(), GENERATE.encode()),
    "another origin": UPGRADE[:-2] + b"Origin: http://evil.example\r\n\r\n",
    "too large": make_head("POST", GENERATE, f"Content-Length: {2**27}"),
    "another path": make_head("POST", "/invocations", LENGTH) + BODY,
    "no key": UPGRADE.replace(KEY.encode(), b"none"),
}


def odd_requests(proxy: Proxy) -> Any:
    """Nothing of them is answered as if it were right."""
    told = {}
    for name, data in ODD.items():
        with raw(proxy) as connection, suppress(ConnectionError):
            connection.sendall(data)
            told[name] = connection.recv(12).decode()
        assert told.get(name, "")[9:10] in ("4", "5", ""), name
    return told


def slow(proxy: Proxy) -> Any:
    """2,000 connections that send nothing, half a head or half a body: few are kept, and those not for long."""
    with ExitStack() as stack:
        waiting = []
        for number in range(2000):
            with suppress(OSError):
                connection = stack.enter_context(raw(proxy))
                begun = make_head("POST", GENERATE, "Content-Length: 1000")
                connection.sendall((b"", begun[:-2], begun + b"{")[number % 3])
                waiting.append(connection)
        time.sleep(15)
        alive = 0
        for connection in waiting:
            connection.setblocking(False)
            try:
                while connection.recv(4096):
                    pass
            except BlockingIOError:
                alive += 1
            except OSError:
                pass
        assert alive < 100
        return alive


def framed(first: bytes, one: bytes, proxy: Proxy) -> Any:
    """Frames that make no message, as fast as they are taken; the answers are not read."""
    count, times, end = 0, 0, time.monotonic() + SECONDS
    while time.monotonic() < end:  # who is cut off comes again
        times += 1
        with raw(proxy) as connection, suppress(OSError):
            connection.sendall(UPGRADE)
            assert connection.recv(12) == b"HTTP/1.1 101"
            connection.settimeout(2)
            connection.sendall(first)
            while time.monotonic() < end:
                connection.sendall(one * 2000)
                count += 2000
    return f"{count} frames in {times} connections"


BEGINNING = Frame(Opcode.TEXT, b"", fin=False).serialize(mask=True)
ATTACKS: dict[str, Callable[[Proxy], Any]] = {
    "silent sessions": silent_sessions,
    **{f"{kind} messages": partial(flooded, kind) for kind in MESSAGES},
    "compressed messages": compressed,
    "a storm": storm,
    "odd requests": odd_requests,
    "slow clients": slow,
    "pings": partial(framed, b"", Frame(Opcode.PING, b"p" * 125).serialize(mask=True)),
    "empty fragments": partial(framed, BEGINNING, Frame(Opcode.CONT, b"", fin=False).serialize(mask=True)),
    "fragments": partial(framed, BEGINNING, Frame(Opcode.CONT, b"a", fin=False).serialize(mask=True)),
}


ELSEWHERE = (
    "/metrics/../v1/models", "/metrics/%2e%2e/v1/models", "/metrics//../v1/models", "/metrics/x/../../v1/models",
    "/metrics/..;/v1/models", "/metrics", "/v1/models/../../metrics", "/v1/models%2f..%2f..%2fmetrics", "/v1/models%0a",
    "/v1/models%00/metrics", "/v1/models#/metrics", "//metrics", "/health/../metrics",
)  # fmt: skip
"""Paths with which something else than a route of deploy/nginx.conf might be meant."""


def answered(proxy: Proxy, path: str, authorization: str) -> tuple[int, bytes]:
    """Status and body of an answer."""
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: {authorization}\r\n\r\n"
    with raw(proxy) as connection:
        connection.sendall(request.encode())
        told = b"".join(iter(lambda: connection.recv(2**16), b""))
    head, _, body = told.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), body


def test_a_path_is_that_of_its_route(proxy: Proxy) -> None:
    """The server reads the path that the proxy has compared."""
    models = answered(proxy, "/v1/models", HEADERS["authorization"])
    assert models[0] == 200
    for path in ELSEWHERE:
        status, body = answered(proxy, path, HEADERS["authorization"])
        assert status >= 400 or body.startswith(b'{"object":"list"'), path
        assert b"# HELP" not in body, path


def test_keys_keep_their_case(proxy: Proxy) -> None:
    right = f"Bearer {KEY}"
    assert answered(proxy, "/v1/models", right)[0] == 200
    others = (right.upper(), right.title(), f"{right}x", f"x{right}", f"Bearer  {KEY}", "", "Bearer ")
    assert {answered(proxy, "/v1/models", other)[0] for other in others} == {401}


@pytest.mark.parametrize("name", ATTACKS)
def test_good_clients_do_not_notice(server: Server, proxy: Proxy, name: str) -> None:
    with peak(server) as grown, Beside(server, proxy.url) as good:
        outcome = ATTACKS[name](proxy)
        outcome = asyncio.run(outcome) if asyncio.iscoroutine(outcome) else outcome
    assert good.violations == []
    assert clients.empties(server)
    print(f"{name}: {outcome}; {good.answers}; {grown() / MIB:+.0f} MiB")
    assert grown() < ROOM
