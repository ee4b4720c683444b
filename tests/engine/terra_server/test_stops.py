"""A server that loses its patience, one that is stopped, and one that loses its engine: the last file of the folder."""

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx
import psutil
import pytest
from websockets.sync.client import ClientConnection

from mmkit.serve.process import Server
from tests.engine.terra_server.client import (
    LONG,
    WAIT,
    empties,
    first_event,
    framed,
    hear,
    long_stream,
    opened,
    plain,
    post,
    rest,
    rest_of,
    scraped,
    shaken,
    start,
    until,
)
from tests.night.malformed import GENERATE, wrong_error
from tests.night.soak import terra_server

pytestmark = pytest.mark.timeout(600)

IDLE_SECONDS = 6


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that waits for no client longer than some seconds."""
    with terra_server(tmp_path_factory.mktemp("impatient") / "log", IDLE_SECONDS=IDLE_SECONDS) as server:
        yield server


def test_silence(impatient: Server) -> None:
    """Sessions without a message end after their time, with a word; so do clients that neither read nor say goodbye,
    and bodies that do not go on. All of them wait at once."""
    with ExitStack() as stack:
        silent, begun = (stack.enter_context(opened(impatient)) for _ in range(2))
        begun.send(start())
        deaf, flooded = (stack.enter_context(shaken(impatient)) for _ in range(2))
        flooded.sendall(framed(start(stream=True, max_tokens=1000)))
        assert until(lambda: scraped(impatient)["vllm:generation_tokens_total"] > 4)  # those of the other session
        slow = stack.enter_context(plain(impatient, "POST", GENERATE, "Content-Length: 100"))
        for session, types in ((silent, ["ready", "closed"]), (begun, ["ready", "chunk", "closed"])):
            messages = rest(session)
            assert [message["type"] for message in messages] == types
            assert f"{IDLE_SECONDS} s" in messages[-1]["reason"]
            assert session.close_code == 1001
        assert slow.recv(12) == b"HTTP/1.1 408"
        assert empties(impatient)
        for connection in (deaf, flooded):
            while connection.recv(4096):  # raises if the server keeps the connection
                pass
    assert post(impatient).status_code == 200


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


def test_stopped(impatient: Server) -> None:
    """SIGTERM: whoever waits is told or cut, and no process stays."""
    with busy(impatient) as (processes, waiting, generating, lines):
        assert processes
        assert impatient.process is not None
        impatient.process.send_signal(signal.SIGTERM)
        rest_of(lines)
        messages = rest(generating) + rest(waiting)
        assert {message["type"] for message in messages} <= {"tokens", "chunk", "error", "closed"}
        ends(impatient, processes)


def test_engine_killed(server: Server) -> None:
    """Its clients learn of it, and nobody is told that the server is well."""
    with busy(server) as (processes, waiting, generating, lines):
        (engine,) = (process for process in processes if "EngineCore" in " ".join([process.name(), *process.cmdline()]))
        engine.kill()
        events = rest_of(lines)
        assert "data: [DONE]" not in events
        errors = [event for event in map(as_json, events) if "error" in event]
        messages = rest(generating)
        assert "chunk" not in [message["type"] for message in messages]
        errors += [message for message in messages if message["type"] == "error"]
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
