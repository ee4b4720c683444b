"""Clients that come without the key, vanish or are too many, and an engine that ends: the last file of the folder,
since it kills what the others share. tests/night/test_silence.py has the clients that fall silent."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import httpx
import psutil
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from examples.server import Server
from tests.engine.terra_server import clients
from tests.night.malformed import GENERATE, LIMITS, find_fault_of_error

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer another key"}])
def test_without_the_key_nothing_is_answered(server: Server, headers: dict[str, str]) -> None:
    assert clients.ask(server, clients.make_body(), headers=headers).status_code == 401
    assert clients.ask(server, b"", "/v1/mm/modalities", "GET", headers).status_code == 401
    with pytest.raises(InvalidStatus) as refused:
        clients.open_session(server, headers)
    assert refused.value.response.status_code in (401, 403)


# -- clients that vanish -----------------------------------------------------------------------------------------------


@contextmanager
def open_breaking_session(server: Server) -> Iterator[ClientConnection]:
    """Open a session whose connection breaks at the end of the block."""
    with suppress(ConnectionClosed), clients.open_session(server) as session:
        yield session
        session.socket.shutdown(socket.SHUT_RDWR)


def assert_engine_stops(server: Server, leave: Callable[[Server], None]) -> None:
    """Check that the engine does not make all the tokens that a client asked for before it left.

    It makes them in seconds, and a machine that is busy with them may keep the client waiting as long: so there are
    several tries.
    """
    for _ in range(10):
        before = clients.scrape_metrics(server)["vllm:generation_tokens_total"]
        leave(server)
        assert clients.wait_until_idle(server)
        num_generated = clients.scrape_metrics(server)["vllm:generation_tokens_total"] - before
        if num_generated < clients.LONG - 100:
            return
    pytest.fail("the engine made all tokens, ten times")


def test_a_client_leaves_a_stream(server: Server) -> None:
    def leave(server: Server) -> None:
        with clients.open_long_stream(server) as response:
            next(response.iter_lines())

    assert_engine_stops(server, leave)


def test_a_client_leaves_before_the_answer(server: Server) -> None:
    def leave(server: Server) -> None:
        body = json.dumps(clients.make_body(max_tokens=clients.LONG)).encode()
        with clients.open_socket(server, "POST", GENERATE, f"Content-Length: {len(body)}") as connection:
            connection.sendall(body)

    assert_engine_stops(server, leave)


def test_a_client_leaves_within_its_body(server: Server) -> None:
    def leave(server: Server) -> None:
        with clients.open_socket(server, "POST", GENERATE, "Content-Length: 1000") as connection:
            connection.sendall(b'{"prompt": [1')

    assert_engine_stops(server, leave)


OpenSession = Callable[[Server], AbstractContextManager[ClientConnection]]


@pytest.mark.parametrize("open_session", [clients.open_session, open_breaking_session])
def test_a_client_leaves_a_session_within_a_chunk(server: Server, open_session: OpenSession) -> None:
    def leave(server: Server) -> None:
        with open_session(server) as session:
            clients.start(session, "ready", "tokens", stream=True, max_tokens=clients.LONG)

    assert_engine_stops(server, leave)


def test_a_client_leaves_a_session_between_chunks(server: Server) -> None:
    def leave(server: Server) -> None:
        with open_breaking_session(server) as session:
            clients.start(session, "ready", "chunk", stream=False, max_tokens=4)

    assert_engine_stops(server, leave)


# -- too many ----------------------------------------------------------------------------------------------------------


def test_one_session_too_many_is_refused_until_another_ends(server: Server) -> None:
    most = LIMITS["SESSIONS"]
    with ExitStack() as stack:
        sessions = [stack.enter_context(clients.open_session(server)) for _ in range(most)]
        for session in sessions:
            assert clients.receive(session)["type"] == "ready"
        refused = stack.enter_context(clients.open_session(server))
        error, closed = clients.receive_rest(refused)
        assert error["type"] == "error"
        assert error["error"]["code"] == 429
        assert error["fatal"]
        assert not find_fault_of_error(error)
        assert closed["type"] == "closed"
        assert refused.close_code == 1013
        clients.start(sessions[0], "chunk")
        clients.send(sessions[0], {"type": "close"})
        assert [message["type"] for message in clients.receive_rest(sessions[0])] == ["closed"]
        assert clients.wait_until(lambda: clients.scrape_metrics(server)["mmkit:sessions_open"] == most - 1)
        another = stack.enter_context(clients.open_session(server))
        assert clients.receive(another)["type"] == "ready"
    assert clients.wait_until_idle(server)


# -- an engine that ends -----------------------------------------------------------------------------------------------


def find_engine(processes: list[psutil.Process]) -> psutil.Process:
    engines = []
    for process in processes:
        if "EngineCore" in " ".join([process.name(), *process.cmdline()]):
            engines.append(process)
    (engine,) = engines
    return engine


def is_healthy(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=clients.WAIT).status_code == 200
    except httpx.TransportError:
        return False


def assert_engine_error(message: dict[str, Any]) -> None:
    assert message["error"]["code"] in (500, 503)
    assert not find_fault_of_error(message)


def assert_stream_is_whole_or_refused(lines: list[str]) -> None:
    """Check that a stream does not end as if it were whole; on a busy machine it may be whole."""
    num_finished = 0
    for line in lines:
        if line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            assert_engine_error(event)
        for choice in event.get("choices", ()):
            if choice.get("finish_reason"):
                num_finished += 1
    assert "data: [DONE]" not in lines or num_finished == 8


def assert_session_is_whole_or_refused(messages: list[dict[str, Any]]) -> None:
    """Check that a session has no chunk of fewer tokens than it asked for."""
    for message in messages:
        if message["type"] == "chunk":
            assert len(message["token_ids"]) == clients.LONG
        if "error" in message:
            assert_engine_error(message)


def test_clients_learn_of_an_engine_that_is_killed(server: Server) -> None:
    """Nobody is told that the server is well, and its exit status says that it failed."""
    with clients.keep_busy(server) as busy:
        find_engine(busy.processes).kill()
        assert_stream_is_whole_or_refused(clients.receive_rest_of_stream(busy.lines))
        assert_session_is_whole_or_refused(clients.receive_rest(busy.generating))
        clients.receive_rest(busy.waiting)
        assert clients.wait_until(lambda: not is_healthy(server))
        with suppress(httpx.TransportError):
            assert clients.ask(server, clients.make_body()).status_code >= 500
        clients.assert_ends(server, busy.processes)
    assert server.process.returncode == 1
