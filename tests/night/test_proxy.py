"""Attacks that a proxy has to stop, through the real nginx with deploy/nginx.conf: good clients do not notice them.

The attackers have another address than the good clients, since limits count by address.
"""

import asyncio
import json
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode

from examples.server import Server
from tests.engine.terra_server import clients
from tests.engine.terra_server.clients import make_head
from tests.night.malformed import GENERATE, HEADERS, KEY, SESSION
from tests.night.proxy import NGINX, Proxy, make_deployed_proxy
from tests.night.soak import MIB, GoodClients, terra_server, watch_peak

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(NGINX is None, reason="needs nginx: apt-get install nginx-light"),
]

ATTACKER = ("127.0.0.2", 0)
SECONDS = 8
"""Seconds of an attack that does not end by itself."""
MOST_SESSIONS = 8
"""Sessions of one address, in deploy/nginx.conf."""
MAX_GROWTH = 150 * MIB
"""Bytes by which the server may grow during an attack."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = {"SESSIONS": 16, "BODY_BYTES": 2**26, "IDLE_SECONDS": 300}
    with terra_server(tmp_path_factory.mktemp("server") / "log", **limits) as server:
        yield server


@pytest.fixture(scope="module")
def proxy(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with make_deployed_proxy(server, tmp_path_factory.mktemp("proxy")) as proxy:
        yield proxy


def open_socket(proxy: Proxy) -> socket.socket:
    """Open a connection of the attacker, with a small buffer for what it receives."""
    connection = socket.create_connection(("127.0.0.1", proxy.port), timeout=60, source_address=ATTACKER)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return connection


UPGRADE = make_head("GET", SESSION, *clients.UPGRADE)


def open_session(proxy: Proxy, **options: Any) -> Any:
    """Open a session of the attacker."""
    return connect(
        f"ws://127.0.0.1:{proxy.port}{SESSION}",
        additional_headers={"authorization": HEADERS["authorization"]},
        local_addr=ATTACKER,
        proxy=None,
        max_size=None,
        ping_interval=None,
        open_timeout=60,
        **options,
    )


# -- attacks -----------------------------------------------------------------------------------------------------------


async def hold_silent_sessions(proxy: Proxy) -> Counter[int]:
    """Open three times as many sessions as one address may have: the proxy rejects two thirds of them."""

    async def hold_session() -> int:
        try:
            async with open_session(proxy) as ws:
                await ws.recv()
                await asyncio.sleep(SECONDS)
                return 101
        except InvalidStatus as refusal:
            return refusal.response.status_code

    sessions = [hold_session() for _ in range(3 * MOST_SESSIONS)]
    statuses = Counter(await asyncio.gather(*sessions))
    assert statuses == {101: MOST_SESSIONS, 429: 2 * MOST_SESSIONS}
    return statuses


async def flood_with_messages(proxy: Proxy, message: str | bytes, count: int) -> str:
    """Send messages, and do not read their refusals."""
    num_sent = 0
    async with open_session(proxy) as ws:
        with suppress(TimeoutError, ConnectionClosed):
            async with asyncio.timeout(SECONDS):
                for _ in range(count):
                    await ws.send(message)
                    num_sent += 1
        ws.transport.abort()
    return f"{num_sent} messages"


async def flood_with_small_messages(proxy: Proxy) -> str:
    return await flood_with_messages(proxy, '{"x":1}', 200_000)


async def flood_with_big_messages(proxy: Proxy) -> str:
    message = json.dumps({"type": "next", "x": "a" * 1_000_000})
    return await flood_with_messages(proxy, message, 300)


async def flood_with_binary_messages(proxy: Proxy) -> str:
    return await flood_with_messages(proxy, b"x" * 1000, 50_000)


async def flood_with_deep_messages(proxy: Proxy) -> str:
    return await flood_with_messages(proxy, "[" * 500_000, 100)


async def offer_compression(proxy: Proxy) -> None:
    """Offer to compress messages, which no server behind the proxy accepts."""
    async with open_session(proxy, compression="deflate") as ws:
        assert ws.protocol.extensions == []


async def abort_sessions_and_requests(proxy: Proxy) -> Counter[str]:
    """Begin many sessions and requests, and abort each of them."""

    async def abort_session(number: int) -> str:
        try:
            async with open_session(proxy) as ws:
                await ws.recv()
                await ws.send(json.dumps({"type": "start", **clients.make_body(max_tokens=300)}))
                await asyncio.sleep(0.02 * (number % 5))
                ws.transport.abort()
                return "begun"
        except (InvalidStatus, ConnectionClosed, OSError):
            return "refused"

    async def abort_request(number: int) -> str:
        body = json.dumps(clients.make_body(max_tokens=300, stream=number % 2 == 0)).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", proxy.port, local_addr=ATTACKER)
        writer.write(make_head("POST", GENERATE, f"Content-Length: {len(body)}") + body)
        await asyncio.sleep(0.01 * (number % 7))
        writer.transport.abort()
        return "posted"

    outcomes: Counter[str] = Counter()
    for first in range(0, 500, 25):
        attempts = []
        for number in range(first, first + 25):
            attempts.append(abort_session(number))
            attempts.append(abort_request(number))
        outcomes.update(await asyncio.gather(*attempts))
    return outcomes


BODY = json.dumps(clients.make_body()).encode()
LENGTH = f"Content-Length: {len(BODY)}"
TEN_THOUSAND_HEADERS = [f"X{number}: 1" for number in range(10_000)]
WRONG_REQUESTS = {
    "two lengths": make_head("POST", GENERATE, "Content-Length: 4", "Transfer-Encoding: chunked")
    + b"0\r\n\r\nGET /health",
    "an unknown coding": make_head("POST", GENERATE, "Transfer-Encoding: xchunked") + BODY,
    "a sign": make_head("POST", GENERATE, f"Content-Length: +{len(BODY)}") + BODY,
    "a long header": make_head("POST", GENERATE, "X: " + "a" * 1_000_000),
    "10,000 headers": make_head("POST", GENERATE, *TEN_THOUSAND_HEADERS, LENGTH) + BODY,
    "a long path": make_head("GET", "/v1/mm/" + "a" * 60_000),
    "TRACE": make_head("TRACE", GENERATE),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an upgrade of another route": UPGRADE.replace(SESSION.encode(), GENERATE.encode()),
    "another origin": UPGRADE[:-2] + b"Origin: http://evil.example\r\n\r\n",
    "too large": make_head("POST", GENERATE, f"Content-Length: {2**27}"),
    "another path": make_head("POST", "/invocations", LENGTH) + BODY,
    "no key": UPGRADE.replace(KEY.encode(), b"none"),
}


def send_wrong_requests(proxy: Proxy) -> dict[str, str]:
    """Send requests that are wrong: each is refused, or its connection ends."""
    beginnings = {}
    for name, data in WRONG_REQUESTS.items():
        beginning = ""
        with open_socket(proxy) as connection, suppress(ConnectionError):
            connection.sendall(data)
            beginning = connection.recv(12).decode()
        first_digit_of_status = beginning[9:10]
        assert first_digit_of_status in ("4", "5", ""), name
        beginnings[name] = beginning
    return beginnings


def is_open(connection: socket.socket) -> bool:
    """Return whether a connection is still open, after all that it has received."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def send_slowly(proxy: Proxy) -> int:
    """Open 2,000 connections that send nothing, half a head or half a body: few of them stay open."""
    head = make_head("POST", GENERATE, "Content-Length: 1000")
    contents = (b"", head[:-2], head + b"{")
    with ExitStack() as stack:
        connections = []
        for number in range(2000):
            with suppress(OSError):
                connection = stack.enter_context(open_socket(proxy))
                connection.sendall(contents[number % len(contents)])
                connections.append(connection)
        time.sleep(15)
        num_open = sum(is_open(connection) for connection in connections)
        assert num_open < 100
        return num_open


def flood_with_frames(proxy: Proxy, first: bytes, frame: bytes) -> str:
    """Send frames that do not complete a message, as fast as possible, and do not read the answers."""
    num_frames = 0
    num_connections = 0
    end = time.monotonic() + SECONDS
    # a client that is cut off connects again
    while time.monotonic() < end:
        num_connections += 1
        with open_socket(proxy) as connection, suppress(OSError):
            connection.sendall(UPGRADE)
            assert connection.recv(12) == b"HTTP/1.1 101"
            connection.settimeout(2)
            connection.sendall(first)
            while time.monotonic() < end:
                connection.sendall(frame * 2000)
                num_frames += 2000
    return f"{num_frames} frames in {num_connections} connections"


FIRST_FRAGMENT = Frame(Opcode.TEXT, b"", fin=False).serialize(mask=True)


def flood_with_pings(proxy: Proxy) -> str:
    return flood_with_frames(proxy, b"", Frame(Opcode.PING, b"p" * 125).serialize(mask=True))


def flood_with_empty_fragments(proxy: Proxy) -> str:
    return flood_with_frames(proxy, FIRST_FRAGMENT, Frame(Opcode.CONT, b"", fin=False).serialize(mask=True))


def flood_with_fragments(proxy: Proxy) -> str:
    return flood_with_frames(proxy, FIRST_FRAGMENT, Frame(Opcode.CONT, b"a", fin=False).serialize(mask=True))


@pytest.mark.parametrize(
    "attack",
    [
        hold_silent_sessions,
        flood_with_small_messages,
        flood_with_big_messages,
        flood_with_binary_messages,
        flood_with_deep_messages,
        offer_compression,
        abort_sessions_and_requests,
        send_wrong_requests,
        send_slowly,
        flood_with_pings,
        flood_with_empty_fragments,
        flood_with_fragments,
    ],
)
def test_good_clients_do_not_notice_an_attack(server: Server, proxy: Proxy, attack: Callable[[Proxy], Any]) -> None:
    with watch_peak(server) as measure_growth, GoodClients(server, proxy.url) as good_clients:
        outcome = attack(proxy)
        if asyncio.iscoroutine(outcome):
            outcome = asyncio.run(outcome)

    assert good_clients.violations == []
    assert clients.wait_until_idle(server)
    growth = measure_growth()
    print(f"{attack.__name__}: {outcome}; {good_clients.answers}; {growth / MIB:+.0f} MiB")
    assert growth < MAX_GROWTH


# -- paths and keys ----------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    status: int
    body: bytes


def get(proxy: Proxy, path: str, authorization: str) -> Answer:
    """Send a path as it is, which a client such as httpx would normalize."""
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: {authorization}\r\n\r\n"
    content = b""
    with open_socket(proxy) as connection:
        connection.sendall(request.encode())
        part = connection.recv(2**16)
        while part:
            content += part
            part = connection.recv(2**16)
    head, _, body = content.partition(b"\r\n\r\n")
    _, status, *_ = head.split(b" ")
    return Answer(int(status), body)


def test_the_list_of_models_is_answered(proxy: Proxy) -> None:
    assert get(proxy, "/v1/models", HEADERS["authorization"]).status == 200


def test_an_answer_has_the_id_that_the_proxy_gave_its_request(proxy: Proxy) -> None:
    headers = HEADERS | {"X-Request-Id": "the client's"}
    answers = [httpx.post(proxy.url + GENERATE, json=clients.make_body(), headers=headers) for _ in range(2)]
    ids = {answer.json()["id"] for answer in answers}
    assert len(ids) == 2
    assert all(re.fullmatch("mmgen-[0-9a-f]{32}", answer_id) for answer_id in ids)


@pytest.mark.parametrize(
    "path",
    [
        "/metrics/../v1/models",
        "/metrics/%2e%2e/v1/models",
        "/metrics//../v1/models",
        "/metrics/x/../../v1/models",
        "/metrics/..;/v1/models",
        "/metrics",
        "/v1/models/../../metrics",
        "/v1/models%2f..%2f..%2fmetrics",
        "/v1/models%0a",
        "/v1/models%00/metrics",
        "/v1/models#/metrics",
        "//metrics",
        "/health/../metrics",
    ],
)
def test_a_path_leads_to_no_route_that_the_proxy_does_not_have(proxy: Proxy, path: str) -> None:
    """The server reads the path that the proxy has compared: it is refused, or answered by the list of models."""
    answer = get(proxy, path, HEADERS["authorization"])
    assert answer.status >= 400 or answer.body.startswith(b'{"object":"list"')
    assert b"# HELP" not in answer.body


def test_the_right_key_is_accepted(proxy: Proxy) -> None:
    assert get(proxy, "/v1/models", f"Bearer {KEY}").status == 200


@pytest.mark.parametrize(
    "authorization",
    [
        pytest.param(f"Bearer {KEY}".upper(), id="upper case"),
        pytest.param(f"Bearer {KEY}".title(), id="title case"),
        pytest.param(f"Bearer {KEY}x", id="a character more at the end"),
        pytest.param(f"xBearer {KEY}", id="a character more at the start"),
        pytest.param(f"Bearer  {KEY}", id="two spaces"),
        pytest.param("", id="nothing"),
        pytest.param("Bearer ", id="no key"),
    ],
)
def test_a_wrong_key_is_refused(proxy: Proxy, authorization: str) -> None:
    assert get(proxy, "/v1/models", authorization).status == 401
