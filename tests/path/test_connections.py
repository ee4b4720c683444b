"""Floods of frames at uvicorn's websockets; tests/engine/terra_server has those at a whole server."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import hypothesis.strategies as st
import pytest
import uvicorn
from fastapi import FastAPI, WebSocket
from fastapi.responses import StreamingResponse
from hypothesis import given
from websockets.exceptions import ConnectionClosedError
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection, connect

from mmkit.serve.connections import MOST_FRAMES, TURN, Flood, Frames, settle
from mmkit.serve.limits import Limits
from mmkit.serve.process import free_port

REQUEST = b"GET / HTTP/1.1\r\nupgrade: websocket\r\n\r\n"
LIMITS = Limits(body_bytes=100_000, idle_seconds=1)
ENDED = threading.Event()


@given(st.lists(st.sampled_from([0, 125, 126, 2**16]), max_size=100), st.sampled_from([1000, 2**18]))
def test_a_turn_ends_with_a_frame(sizes: list[int], step: int) -> None:
    """Or with what has come, however that is cut."""
    data, ends = bytearray(), set()
    for size in sizes:
        data += Frame(Opcode.TEXT, bytes(size)).serialize(mask=True)
        ends.add(len(data))
    frames, at = Frames(), 0
    assert frames.take(REQUEST + b"x") == len(REQUEST)
    while at < len(data):
        part = data[at : at + step]
        size = frames.take(part)
        assert size == len(part) or at + size in ends
        assert len([end for end in ends if at < end <= at + size]) <= TURN
        at += size


@pytest.mark.parametrize("kind", [Opcode.PING, Opcode.CONT])
def test_frames_without_a_message_are_counted(kind: Opcode) -> None:
    frames, frame = Frames(), Frame(kind, b"", fin=kind is Opcode.PING).serialize(mask=True)
    frames.take(REQUEST)
    for _ in range(2):
        for _ in range(MOST_FRAMES):
            frames.take(frame)
        frames.take(Frame(Opcode.TEXT, b"x").serialize(mask=True))
    for _ in range(MOST_FRAMES):
        frames.take(frame)
    with pytest.raises(Flood):
        frames.take(frame)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that repeats what it hears, and has an answer without end."""
    app = FastAPI()

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(2**16)
                await asyncio.sleep(0)
        finally:
            ENDED.set()

    @app.get("/endless")
    async def stream() -> StreamingResponse:
        return StreamingResponse(endless())

    @app.websocket("/")
    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        async for text in socket.iter_text():
            await socket.send_text(text)

    port = free_port()
    config = uvicorn.Config(app, port=port, log_level="error", lifespan="off")
    config.load()
    app.state.server = server = uvicorn.Server(config)
    settle(app, LIMITS)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    yield f"ws://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def test_an_answer_that_nobody_reads_ends(url: str) -> None:
    host, port = url.removeprefix("ws://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        assert ENDED.wait(30)


def opened(url: str) -> ClientConnection:
    return connect(url, proxy=None, open_timeout=60, max_size=None)


def test_what_is_no_flood(url: str) -> None:
    """Small fragments and many messages arrive whole and in order; nothing is compressed."""
    with opened(url) as socket:
        assert not socket.protocol.extensions
        socket.send(iter("y" * (MOST_FRAMES - 1)))
        assert socket.recv(60) == "y" * (MOST_FRAMES - 1)
        texts = [str(i) * (i % 7) for i in range(3000)]
        for text in texts:
            socket.send(text)
        assert [socket.recv(60) for _ in texts] == texts
        for size in (LIMITS.body_bytes, LIMITS.body_bytes + 1000):
            socket.send("z" * size)
            assert len(socket.recv(60)) == size


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (Frame(Opcode.PING, b"p" * 125).serialize(mask=True) * (MOST_FRAMES + TURN), (1006, 1008)),
        (Frame(Opcode.TEXT, b"", fin=False).serialize(mask=True), (1008,)),
        (Frame(Opcode.TEXT, b"z" * 2**21).serialize(mask=True), (1009,)),
    ],
    ids=["pings", "fragments", "too large"],
)
def test_floods_are_cut(url: str, data: bytes, code: tuple[int, ...]) -> None:
    if code == (1008,):
        data += Frame(Opcode.CONT, b"x", fin=False).serialize(mask=True) * (MOST_FRAMES + TURN)
    with opened(url) as flooding, opened(url) as good:
        with suppress(OSError):  # the cut may come before the end, and close the socket
            flooding.socket.sendall(data)
        good.send("hello")
        assert good.recv(60) == "hello"
        with pytest.raises(ConnectionClosedError) as closed:
            flooding.recv(60)
        assert (closed.value.rcvd.code if closed.value.rcvd else 1006) in code


def test_a_server_that_is_not_of_uvicorn_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Under Ray Serve another object stands in its place."""
    app = FastAPI()
    app.state.server = object()
    settle(app, LIMITS)
    assert "is not bounded" in caplog.text
