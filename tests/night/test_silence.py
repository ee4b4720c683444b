"""Sessions that fall silent, and a server that is stopped while clients wait. test_proxy.py has other slow clients."""

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from websockets.frames import Frame, Opcode

from examples.server import Server
from tests.engine.terra_server import clients
from tests.night.malformed import GENERATE, SESSION
from tests.night.soak import terra_server

pytestmark = pytest.mark.timeout(600)

IDLE_SECONDS = 6


@contextmanager
def open_deaf_session(server: Server) -> Iterator[socket.socket]:
    """Open a session whose client never reads."""
    with clients.open_socket(server, "GET", SESSION, *clients.UPGRADE) as connection:
        assert connection.recv(12) == b"HTTP/1.1 101"
        yield connection


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that waits for a client only a few seconds."""
    with terra_server(tmp_path_factory.mktemp("impatient") / "log", IDLE_SECONDS=IDLE_SECONDS) as server:
        yield server


def send_message(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(Frame(Opcode.TEXT, json.dumps(message).encode()).serialize(mask=True))


def check_end_by_silence(session: Any, types: list[str]) -> None:
    """Check that a session has these types of messages, the last of which gives its idle time as the reason."""
    messages = clients.receive_rest(session)
    assert [message["type"] for message in messages] == types
    assert f"{IDLE_SECONDS} s" in messages[-1]["reason"]
    assert session.close_code == 1001


def read_to_the_end(connection: socket.socket) -> None:
    """Raise an error if the server keeps the connection."""
    while connection.recv(4096):
        pass


def test_sessions_that_fall_silent_end_after_their_time(impatient: Server) -> None:
    """Sessions whose clients neither read nor close them end, too. All of them wait at once."""

    def is_generating() -> bool:
        return clients.scrape_metrics(impatient)["vllm:generation_tokens_total"] > 4

    with ExitStack() as stack:
        silent = stack.enter_context(clients.open_session(impatient))
        silent_after_start = stack.enter_context(clients.open_session(impatient))
        clients.start(silent_after_start)
        deaf = stack.enter_context(open_deaf_session(impatient))
        deaf_to_stream = stack.enter_context(open_deaf_session(impatient))
        send_message(deaf_to_stream, {"type": "start", **clients.make_body(stream=True, max_tokens=1000)})
        assert clients.wait_until(is_generating)

        check_end_by_silence(silent, ["ready", "closed"])
        check_end_by_silence(silent_after_start, ["ready", "chunk", "closed"])
        assert clients.wait_until_idle(impatient)
        read_to_the_end(deaf)
        read_to_the_end(deaf_to_stream)
    assert clients.ask(impatient, clients.make_body()).status_code == 200


def test_a_server_that_is_stopped_ends_all_connections_and_processes(impatient: Server) -> None:
    """On SIGTERM, clients that wait get a last message or lose their connection. No process waits for the bodies of
    requests that do not come."""
    with clients.keep_busy(impatient) as (processes, waiting, generating, lines), ExitStack() as stack:
        for path in (GENERATE, "/v1/completions", "/inference/v1/generate", "/tokenize"):
            stack.enter_context(clients.open_socket(impatient, "POST", path, "Content-Length: 100"))
        impatient.process.send_signal(signal.SIGTERM)
        clients.receive_rest_of_stream(lines)
        messages = clients.receive_rest(generating) + clients.receive_rest(waiting)
        assert {message["type"] for message in messages} <= {"tokens", "chunk", "error", "closed"}
        clients.assert_ends(impatient, processes)
