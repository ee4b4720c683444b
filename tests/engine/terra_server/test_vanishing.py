"""Clients that come without the key, vanish or are too many, and an engine that ends: the last file of the folder,
since it kills what the others share. tests/night/test_silence.py has the clients that fall silent."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import httpx
import psutil
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from mmkit.serve.process import Server
from tests.night.malformed import (
    ACTIONS,
    GENERATE,
    GREEDY,
    HEADERS,
    LIMITS,
    MAX_LEN,
    SESSION,
    prompt_of,
    raw,
    wrong_error,
)
from tests.night.soak import GAUGES, metrics

pytestmark = pytest.mark.timeout(600)

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
        for line in lines:
            events += [line] if line else []
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


# -- clients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer another key"}])
def test_without_the_key(server: Server, headers: dict[str, str]) -> None:
    assert httpx.post(server.url + GENERATE, json=good(), headers=headers, timeout=240).status_code == 401
    assert httpx.get(f"{server.url}/v1/mm/modalities", headers=headers, timeout=240).status_code == 401
    with pytest.raises(InvalidStatus) as refused:
        opened(server, headers)
    assert refused.value.response.status_code in (401, 403)
    assert empties(server)


def leave_a_stream(server: Server) -> None:
    with long_stream(server) as response:
        lines = response.iter_lines()  # its end closes the response
        assert first_event(lines)["choices"][0]["token_ids"]


def leave_before_the_answer(server: Server) -> None:
    body = json.dumps(good(max_tokens=LONG)).encode()
    with plain(server, "POST", GENERATE, f"Content-Length: {len(body)}") as connection:
        connection.sendall(body)


def leave_a_session(server: Server) -> None:
    with opened(server) as session:
        session.send(start(stream=True, max_tokens=LONG))
        assert [hear(session)["type"] for _ in range(2)] == ["ready", "tokens"]


def leave_a_session_without_goodbye(server: Server) -> None:
    with suppress(ConnectionClosed), opened(server) as session:
        session.send(start(stream=True, max_tokens=LONG))
        assert [hear(session)["type"] for _ in range(2)] == ["ready", "tokens"]
        session.socket.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "leave", [leave_a_stream, leave_before_the_answer, leave_a_session, leave_a_session_without_goodbye]
)
def test_gone(server: Server, leave: Callable[[Server], None]) -> None:
    """The engine stops when the client leaves, rather than making all the tokens that were asked for. It makes them in
    seconds, and a machine that is busy with them may keep the client waiting as long: so there are several tries.
    """
    for _ in range(10):
        before = scraped(server)["vllm:generation_tokens_total"]
        leave(server)
        assert empties(server)
        if scraped(server)["vllm:generation_tokens_total"] - before < LONG - 100:
            return
    pytest.fail("the engine made all tokens, ten times")


def test_gone_within_a_body(server: Server) -> None:
    with plain(server, "POST", GENERATE, "Content-Length: 1000") as connection:
        connection.sendall(b'{"prompt": [1')
    assert post(server).status_code == 200
    assert empties(server)


def test_gone_between_chunks(server: Server) -> None:
    with suppress(ConnectionClosed), opened(server) as session:
        session.send(start())
        assert [hear(session)["type"] for _ in range(2)] == ["ready", "chunk"]
        session.socket.shutdown(socket.SHUT_RDWR)
    assert empties(server)


def test_too_many_sessions(server: Server) -> None:
    most = LIMITS["SESSIONS"]
    with ExitStack() as stack:
        sessions = [stack.enter_context(opened(server)) for _ in range(most)]
        assert [hear(session)["type"] for session in sessions] == ["ready"] * most
        with opened(server) as more:
            error, closed = rest(more)
            assert (error["type"], error["error"]["code"], error["fatal"]) == ("error", 429, True)
            assert not wrong_error(error)
            assert closed["type"] == "closed"
            assert more.close_code == 1013
        sessions[0].send(start())
        assert hear(sessions[0])["type"] == "chunk"
        sessions[0].send(json.dumps({"type": "close"}))
        assert [message["type"] for message in rest(sessions[0])] == ["closed"]
        assert until(lambda: scraped(server)["mmkit:sessions_open"] == most - 1)
        with opened(server) as another:
            assert hear(another)["type"] == "ready"
    assert empties(server)


# -- servers -----------------------------------------------------------------------------------------------------------


@contextmanager
def busy(server: Server) -> Iterator[tuple[list[psutil.Process], ClientConnection, ClientConnection, Iterator[str]]]:
    """The processes of a server, a session that waits, one that is generating, and a stream."""
    assert server.process is not None
    with ExitStack() as stack:
        processes = psutil.Process(server.process.pid).children(recursive=True)
        waiting, generating = (stack.enter_context(opened(server)) for _ in range(2))
        waiting.send(start())
        assert [hear(waiting)["type"] for _ in range(2)] == ["ready", "chunk"]
        generating.send(start(stream=True, max_tokens=LONG))
        assert [hear(generating)["type"] for _ in range(2)] == ["ready", "tokens"]
        lines = stack.enter_context(long_stream(server, n=8, temperature=1.0)).iter_lines()
        first_event(lines)
        yield processes, waiting, generating, lines


def ends(server: Server, processes: list[psutil.Process]) -> None:
    """Nothing of a server stays."""
    assert server.process is not None
    server.process.wait(WAIT)
    _, alive = psutil.wait_procs(processes, timeout=WAIT)
    assert not alive


def test_engine_killed(server: Server) -> None:
    """Its clients learn of it, and nobody is told that the server is well."""
    with busy(server) as (processes, waiting, generating, lines):
        (engine,) = (process for process in processes if "EngineCore" in " ".join([process.name(), *process.cmdline()]))
        engine.kill()
        events = rest_of(lines)
        streamed = [as_json(event) for event in events if event != "data: [DONE]"]
        finished = [choice for event in streamed for choice in event.get("choices", ()) if choice.get("finish_reason")]
        # an answer that is told to be whole was so before: on a busy machine, that may be
        assert "data: [DONE]" not in events or len(finished) == 8
        messages = rest(generating)
        chunks = [message for message in messages if message["type"] == "chunk"]
        assert all(len(chunk["token_ids"]) == LONG for chunk in chunks)
        errors = [message for message in (*streamed, *messages) if "error" in message]
        for error in errors:
            assert error["error"]["code"] in (500, 503)
            assert not wrong_error(error)
        rest(waiting)
        assert until(lambda: not healthy(server))
        with suppress(httpx.TransportError):
            assert post(server).status_code >= 500
        ends(server, processes)


def as_json(event: str) -> dict[str, Any]:
    return json.loads(event.removeprefix("data: "))


def healthy(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=WAIT).status_code == 200
    except httpx.TransportError:
        return False
