"""A server whose clients come without the key, vanish, or are too many."""

import json
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from mmkit.serve.process import Server
from tests.engine.terra_server.client import (
    LONG,
    empties,
    first_event,
    good,
    hear,
    long_stream,
    opened,
    plain,
    post,
    rest,
    scraped,
    start,
    until,
)
from tests.night.malformed import GENERATE, LIMITS, wrong_error

pytestmark = pytest.mark.timeout(600)


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
