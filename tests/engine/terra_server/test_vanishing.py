"""Clients that come without the key, vanish or are too many, and an engine that ends: the last file of the folder,
since it kills what the others share. tests/night/test_silence.py has the clients that fall silent."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from examples.server import Server
from tests.night.malformed import GENERATE, LIMITS, wrong_error

from . import clients

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer another key"}])
def test_without_the_key(server: Server, headers: dict[str, str]) -> None:
    assert clients.ask(server, clients.good(), headers=headers).status_code == 401
    assert clients.ask(server, b"", "/v1/mm/modalities", "GET", headers).status_code == 401
    with pytest.raises(InvalidStatus) as refused:
        clients.opened(server, headers)
    assert refused.value.response.status_code in (401, 403)


@contextmanager
def breaking(server: Server) -> Iterator[ClientConnection]:
    """A session whose connection breaks at the end of the block."""
    with suppress(ConnectionClosed), clients.opened(server) as session:
        yield session
        session.socket.shutdown(socket.SHUT_RDWR)


def leave_a_stream(server: Server) -> None:
    with clients.long_stream(server) as response:
        next(response.iter_lines())


def leave_before_the_answer(server: Server) -> None:
    body = json.dumps(clients.good(max_tokens=clients.LONG)).encode()
    with clients.plain(server, "POST", GENERATE, f"Content-Length: {len(body)}") as connection:
        connection.sendall(body)


def leave_within_a_body(server: Server) -> None:
    with clients.plain(server, "POST", GENERATE, "Content-Length: 1000") as connection:
        connection.sendall(b'{"prompt": [1')


def leave_a_session(opened: Any, heard: str, server: Server) -> None:
    with opened(server) as session:
        clients.start(
            session, "ready", heard, stream=heard == "tokens", max_tokens=4 if heard == "chunk" else clients.LONG
        )


WAYS = {
    "a stream": leave_a_stream,
    "before the answer": leave_before_the_answer,
    "within a body": leave_within_a_body,
    "a session": partial(leave_a_session, clients.opened, "tokens"),
    "without goodbye": partial(leave_a_session, breaking, "tokens"),
    "between chunks": partial(leave_a_session, breaking, "chunk"),
}


@pytest.mark.parametrize("way", WAYS)
def test_gone(server: Server, way: str) -> None:
    """The engine stops when the client leaves, rather than making all the tokens that were asked for. It makes them in
    seconds, and a machine that is busy with them may keep the client waiting as long: so there are several tries.
    """
    for _ in range(10):
        before = clients.scraped(server)["vllm:generation_tokens_total"]
        WAYS[way](server)
        assert clients.empties(server)
        if clients.scraped(server)["vllm:generation_tokens_total"] - before < clients.LONG - 100:
            return
    pytest.fail("the engine made all tokens, ten times")


def test_too_many_sessions(server: Server) -> None:
    """One more is refused, and another takes the place of one that ends."""
    most = LIMITS["SESSIONS"]
    with ExitStack() as stack:
        sessions = [stack.enter_context(clients.opened(server)) for _ in range(most)]
        assert [clients.hear(session)["type"] for session in sessions] == ["ready"] * most
        more = stack.enter_context(clients.opened(server))
        error, closed = clients.rest(more)
        assert (error["type"], error["error"]["code"], error["fatal"]) == ("error", 429, True)
        assert not wrong_error(error)
        assert (closed["type"], more.close_code) == ("closed", 1013)
        clients.start(sessions[0], "chunk")
        clients.say(sessions[0], {"type": "close"})
        assert [message["type"] for message in clients.rest(sessions[0])] == ["closed"]
        assert clients.until(lambda: clients.scraped(server)["mmkit:sessions_open"] == most - 1)
        assert clients.hear(stack.enter_context(clients.opened(server)))["type"] == "ready"
    assert clients.empties(server)


def test_engine_killed(server: Server) -> None:
    """Its clients learn of it, and nobody is told that the server is well."""
    with clients.busy(server) as (processes, waiting, generating, lines):
        (engine,) = (process for process in processes if "EngineCore" in " ".join([process.name(), *process.cmdline()]))
        engine.kill()
        events = clients.rest_of(lines)
        streamed = [json.loads(event.removeprefix("data: ")) for event in events if event != "data: [DONE]"]
        finished = [choice for event in streamed for choice in event.get("choices", ()) if choice.get("finish_reason")]
        # an answer that is told to be whole was so before: on a busy machine, that may be
        assert "data: [DONE]" not in events or len(finished) == 8
        messages = clients.rest(generating)
        assert all(len(message["token_ids"]) == clients.LONG for message in messages if message["type"] == "chunk")
        for error in (message for message in (*streamed, *messages) if "error" in message):
            assert error["error"]["code"] in (500, 503)
            assert not wrong_error(error)
        clients.rest(waiting)
        assert clients.until(lambda: not healthy(server))
        with suppress(httpx.TransportError):
            assert clients.ask(server, clients.good()).status_code >= 500
        clients.ends(server, processes)


def healthy(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=clients.WAIT).status_code == 200
    except httpx.TransportError:
        return False
