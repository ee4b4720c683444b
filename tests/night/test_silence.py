"""Sessions that fall silent, and a server that is stopped while clients wait; test_proxy.py has the other slow ones."""

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from websockets.frames import Frame, Opcode

from examples.server import Server
from tests.engine.terra_server import clients
from tests.night.malformed import GENERATE, SESSION
from tests.night.soak import terra_server

pytestmark = pytest.mark.timeout(600)

IDLE_SECONDS = 6


@contextmanager
def shaken(server: Server) -> Iterator[socket.socket]:
    """A websocket that never answers."""
    with clients.open_socket(server, "GET", SESSION, *clients.UPGRADE) as connection:
        assert connection.recv(12) == b"HTTP/1.1 101"
        yield connection


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that waits for no client longer than some seconds."""
    with terra_server(tmp_path_factory.mktemp("impatient") / "log", IDLE_SECONDS=IDLE_SECONDS) as server:
        yield server


def test_silence(impatient: Server) -> None:
    """Sessions without a message end after their time, with a word; so do those whose clients neither read nor say
    goodbye. All of them wait at once."""
    with ExitStack() as stack:
        silent, begun = (stack.enter_context(clients.open_session(impatient)) for _ in range(2))
        clients.start(begun)
        deaf, flooded = (stack.enter_context(shaken(impatient)) for _ in range(2))
        start = json.dumps({"type": "start", **clients.make_body(stream=True, max_tokens=1000)})
        flooded.sendall(Frame(Opcode.TEXT, start.encode()).serialize(mask=True))
        assert clients.until(lambda: clients.scraped(impatient)["vllm:generation_tokens_total"] > 4)
        for session, types in ((silent, ["ready", "closed"]), (begun, ["ready", "chunk", "closed"])):
            messages = clients.receive_rest(session)
            assert [message["type"] for message in messages] == types
            assert f"{IDLE_SECONDS} s" in messages[-1]["reason"]
            assert session.close_code == 1001
        assert clients.empties(impatient)
        for connection in (deaf, flooded):
            while connection.recv(4096):  # raises if the server keeps the connection
                pass
    assert clients.ask(impatient, clients.make_body()).status_code == 200


def test_stopped(impatient: Server) -> None:
    """SIGTERM: whoever waits is told or cut, and no process stays for a body that does not come."""
    with clients.keep_busy(impatient) as (processes, waiting, generating, lines), ExitStack() as stack:
        paths = (GENERATE, "/v1/completions", "/inference/v1/generate", "/tokenize")
        for path in paths:
            stack.enter_context(clients.open_socket(impatient, "POST", path, "Content-Length: 100"))
        impatient.process.send_signal(signal.SIGTERM)
        clients.receive_rest_of_stream(lines)
        messages = clients.receive_rest(generating) + clients.receive_rest(waiting)
        assert {message["type"] for message in messages} <= {"tokens", "chunk", "error", "closed"}
        clients.assert_ends(impatient, processes)
