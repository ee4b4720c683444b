"""A server whose clients vanish, fall silent or come without the key, and one that is stopped or loses its engine."""

import base64
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from mmkit.serve.process import Server
from tests.night.soak import (
    CHECKPOINT,
    DRIVES,
    ENVIRONMENT,
    GENERATE,
    GREEDY,
    MAX_LEN,
    OPTIONS,
    SESSION,
    raw,
    wrong_error,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

KEY = "a key"
SESSIONS, IDLE_SECONDS = 2, 4
GENERATED = "vllm:generation_tokens_total"
EMPTY = {"mmkit:sessions_open": 0.0, "vllm:num_requests_running": 0.0, "vllm:num_requests_waiting": 0.0}


def started(tmp_path: Path, *options: str) -> Server:
    limits = {"MMKIT_SERVE_SESSIONS": str(SESSIONS), "MMKIT_SERVE_IDLE_SECONDS": str(IDLE_SECONDS)}
    return Server(CHECKPOINT, *OPTIONS, *options, environment={**ENVIRONMENT, **limits}, log=tmp_path / "log")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a key, for the tests that leave it alive."""
    with started(tmp_path_factory.mktemp("server"), "--api-key", KEY) as server:
        yield server


def head(key: str | None = KEY) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def good(**more: Any) -> dict[str, Any]:
    items = {"actions": raw(DRIVES[0].actions[:1])}
    return {"prompt": DRIVES[0].prompt(1), "items": items, "max_tokens": 4, **GREEDY, **more}


def post(server: Server, key: str | None = KEY, **more: Any) -> httpx.Response:
    return httpx.post(server.url + GENERATE, json=good(**more), headers=head(key), timeout=60)


def opened(server: Server, key: str | None = KEY) -> ClientConnection:
    address = f"ws://{urlsplit(server.url).netloc}{SESSION}"
    # without a bound: a client whose queue is full does not see the end either
    options = {"open_timeout": 30, "close_timeout": 10, "proxy": None, "max_queue": None}
    return connect(address, additional_headers=head(key), **options)


def start(**more: Any) -> str:
    return json.dumps({"type": "start", **good(**more)})


def told(session: ClientConnection) -> dict[str, Any]:
    return json.loads(session.recv(timeout=60))


def rest(session: ClientConnection) -> list[dict[str, Any]]:
    """What a session tells until it is closed."""
    messages = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            messages.append(told(session))
    return messages


def until(true: Callable[[], Any], seconds: float) -> bool:
    """Whether something comes true in time."""
    end = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < end:
        time.sleep(0.1)
    return bool(found)


def gauges(server: Server) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    found = [line.rsplit(" ", 1) for line in text.splitlines() if line.split("{")[0].split(" ")[0] in EMPTY]
    return {name.split("{")[0]: float(value) for name, value in found}


def empties(server: Server, seconds: float = 20) -> bool:
    return until(lambda: gauges(server) == EMPTY, seconds)


def long_stream(
    server: Server, key: str | None = KEY, **more: Any
) -> contextlib.AbstractContextManager[httpx.Response]:
    body = good(stream=True, max_tokens=MAX_LEN - 100, **more)
    return httpx.stream("POST", server.url + GENERATE, json=body, headers=head(key), timeout=60)


def first_event(lines: Iterator[str]) -> dict[str, Any]:
    return json.loads(next(line for line in lines if line)[6:])


def rest_of(lines: Iterator[str]) -> list[str]:
    """The events of a stream until it ends or is cut."""
    found = []
    with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
        found += [line for line in lines if line]
    return found


# -- clients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "another key"])
def test_without_the_key(server: Server, key: str | None) -> None:
    assert post(server, key).status_code == 401
    assert httpx.get(f"{server.url}/v1/mm/modalities", headers=head(key)).status_code == 401
    with pytest.raises(InvalidStatus) as refused:
        opened(server, key)
    assert refused.value.response.status_code in (401, 403)
    assert empties(server)


def test_with_the_key(server: Server) -> None:
    assert post(server).status_code == 200
    assert httpx.get(f"{server.url}/v1/mm/modalities", headers=head()).json()["spec"] == "terra"
    with opened(server) as session:
        assert told(session)["type"] == "ready"
        session.send(start())
        assert told(session)["token_ids"] == post(server).json()["choices"][0]["token_ids"]


def cut_short(server: Server, leave: Callable[[], None], most: int) -> bool:
    """Whether the engine stops when the client leaves, rather than making all the tokens that were asked for. It makes
    them in seconds, and a machine that is busy with them may keep the client waiting as long: so there are several
    tries.
    """
    for _ in range(10):
        before = generated(server)
        leave()
        assert empties(server)
        if generated(server) - before < most:
            return True
    return False


def generated(server: Server) -> float:
    """Tokens that the engine has made so far."""
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{GENERATED}{{"))


def test_gone_in_a_stream(server: Server) -> None:
    def leave() -> None:
        with long_stream(server) as response:
            lines = response.iter_lines()  # its end closes the response
            assert first_event(lines)["choices"][0]["token_ids"]

    assert cut_short(server, leave, MAX_LEN - 200)


def test_gone_before_the_answer(server: Server) -> None:
    def leave() -> None:
        body = json.dumps(good(max_tokens=MAX_LEN - 100)).encode()
        lines = [f"POST {GENERATE} HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}", f"Content-Length: {len(body)}"]
        with socket.create_connection(("127.0.0.1", server.port)) as plain:
            plain.sendall("\r\n".join([*lines, "", ""]).encode() + body)

    assert cut_short(server, leave, MAX_LEN - 200)


@pytest.mark.parametrize("goodbye", [True, False])
def test_gone_in_a_session(server: Server, goodbye: bool) -> None:
    def leave() -> None:
        with contextlib.suppress(ConnectionClosed), opened(server) as session:
            told(session)
            session.send(start(stream=True, max_tokens=MAX_LEN - 100))
            assert told(session)["type"] == "tokens"
            if not goodbye:
                session.socket.shutdown(socket.SHUT_RDWR)

    assert cut_short(server, leave, MAX_LEN - 200)


def test_gone_between_chunks(server: Server) -> None:
    with contextlib.suppress(ConnectionClosed), opened(server) as session:
        told(session)
        session.send(start())
        assert told(session)["type"] == "chunk"
        session.socket.shutdown(socket.SHUT_RDWR)
    assert empties(server, 5)


def test_silent(server: Server) -> None:
    """A session without a message ends after its time, with a word."""
    with opened(server) as session:
        told(session)
        session.send(start())
        assert told(session)["type"] == "chunk"
        begun = time.monotonic()
        (closed,) = rest(session)
        assert closed["type"] == "closed"
        assert f"{IDLE_SECONDS} s" in closed["reason"]
        assert IDLE_SECONDS - 1 < time.monotonic() - begun < IDLE_SECONDS + 10
        assert session.close_code == 1001
    assert empties(server)


def shaken(server: Server) -> socket.socket:
    """A websocket by hand, which never answers."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.settimeout(30)
    plain.connect(("127.0.0.1", server.port))
    nonce = base64.b64encode(os.urandom(16)).decode()
    lines = [
        f"GET {SESSION} HTTP/1.1",
        "Host: x",
        "Connection: Upgrade",
        "Upgrade: websocket",
        f"Sec-WebSocket-Key: {nonce}",
    ]
    lines += ["Sec-WebSocket-Version: 13", f"Authorization: Bearer {KEY}", "", ""]
    plain.sendall("\r\n".join(lines).encode())
    assert plain.recv(12) == b"HTTP/1.1 101"
    return plain


def framed(text: str) -> bytes:
    """A masked frame; the mask is zeros."""
    return b"\x81\xfe" + len(text).to_bytes(2, "big") + bytes(4) + text.encode()


@pytest.mark.parametrize("asked", [False, True])
def test_half_open(server: Server, asked: bool) -> None:
    """A client that neither reads nor says goodbye: before the start, and while the server streams to it."""
    with shaken(server) as plain:
        assert until(lambda: gauges(server)["mmkit:sessions_open"] == 1, 5)
        if asked:
            before = generated(server)
            plain.sendall(framed(start(stream=True, max_tokens=1000)))
            assert until(lambda: generated(server) > before, 20)
        assert empties(server, IDLE_SECONDS + 30)
        while plain.recv(4096):  # raises if the server keeps the connection
            pass
    assert post(server).status_code == 200


def test_too_many_sessions(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(opened(server)) for _ in range(SESSIONS)]
        assert [told(session)["type"] for session in held] == ["ready"] * SESSIONS
        with opened(server) as more:
            error, closed = rest(more)
            assert (error["type"], error["error"]["code"], error["fatal"]) == ("error", 429, True)
            assert not wrong_error(error)
            assert closed["type"] == "closed"
            assert more.close_code == 1013
        held[0].send(start())
        assert told(held[0])["type"] == "chunk"
        held[0].send(json.dumps({"type": "close"}))
        assert [message["type"] for message in rest(held[0])] == ["closed"]
        assert until(lambda: gauges(server)["mmkit:sessions_open"] == SESSIONS - 1, 5)
        with opened(server) as another:
            assert told(another)["type"] == "ready"
    assert empties(server)


# -- the server --------------------------------------------------------------------------------------------------------


def descendants(server: Server) -> list[psutil.Process]:
    assert server.process is not None
    return psutil.Process(server.process.pid).children(recursive=True)


def test_stopped(tmp_path: Path) -> None:
    """SIGTERM: whoever waits is told or cut, and no process stays."""
    with started(tmp_path) as server, contextlib.ExitStack() as stack:
        assert server.process is not None
        quiet, busy = (stack.enter_context(opened(server, None)) for _ in range(2))
        for session, more in ((quiet, {}), (busy, {"stream": True, "max_tokens": MAX_LEN - 100})):
            told(session)
            session.send(start(**more))
        assert told(quiet)["type"] == "chunk"
        assert told(busy)["type"] == "tokens"
        lines = stack.enter_context(long_stream(server, None)).iter_lines()
        first_event(lines)
        processes = descendants(server)
        assert processes
        server.process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        rest_of(lines)
        for session in (busy, quiet):
            for message in rest(session):
                assert message["type"] in ("tokens", "chunk", "error", "closed")
        server.process.wait(max(1.0, 30 - (time.monotonic() - begun)))
        _, alive = psutil.wait_procs(processes, timeout=10)
        assert not alive


def test_engine_killed(tmp_path: Path) -> None:
    """Its clients learn of it, and nobody is told that the server is well."""
    with started(tmp_path) as server, contextlib.ExitStack() as stack:
        assert server.process is not None
        processes = descendants(server)
        engine = next(
            process for process in processes if "EngineCore" in " ".join([process.name(), *process.cmdline()])
        )
        quiet, busy = (stack.enter_context(opened(server, None)) for _ in range(2))
        told(quiet)
        quiet.send(start())
        assert told(quiet)["type"] == "chunk"
        lines = stack.enter_context(long_stream(server, None, n=8, temperature=1.0)).iter_lines()
        first_event(lines)
        told(busy)
        busy.send(start(stream=True, max_tokens=MAX_LEN - 100))
        assert told(busy)["type"] == "tokens"
        engine.kill()
        events = rest_of(lines)
        assert "data: [DONE]" not in events
        if events and "error" in (last := json.loads(events[-1][6:])):
            assert last["error"]["code"] in (500, 503)
            assert not wrong_error(last)
        messages = rest(busy)
        assert "chunk" not in [message["type"] for message in messages]
        for message in messages:
            if message["type"] == "error":
                assert message["error"]["code"] in (500, 503)
                assert not wrong_error(message)
        rest(quiet)
        assert until(lambda: not healthy(server), 30)
        with contextlib.suppress(httpx.TransportError):
            assert post(server, None).status_code >= 500
        assert until(lambda: server.process is not None and server.process.poll() is not None, 60)
        _, alive = psutil.wait_procs(processes, timeout=10)
        assert not alive


def healthy(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=30).status_code == 200
    except httpx.TransportError:
        return False
