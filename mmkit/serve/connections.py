"""Limits of one connection: a body that does not come, frames without end, an answer that nobody
reads.

uvicorn waits for a body and for the reader of an answer as long as it takes, also when it is to
stop, and reads the frames of a websocket as fast as they come. The middleware and the protocols
here bound that, on every route of the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from . import errors
from .door import Door, of_scope
from .engine import EngineDeadError
from .limits import Limits
from .weigh import Slow

logger = logging.getLogger(__name__)

SLOWEST = 2**14
"""Bytes per second: a body has a second for as many, beside the idle seconds."""

LINGER = 1.0
"""Seconds that the routes have, after the engine's end, for answers of their own."""

UNREAD = 3
"""Seconds that clients have, after the engine's end, for reading them."""

MOST_FRAMES = 4096
"""Frames of one websocket between two whole messages: fragments, pings and pongs."""

TURN = 64
"""Frames of one websocket that are read before it is the turn of others."""

_MARGIN = 2**20
"""Bytes by which a message may be too large and be refused in a sentence; a larger one ends the
connection."""

_POLICY = b"\x88\x11\x03\xf0too many frames"
"""A frame that closes a websocket: code 1008."""


def settle(app: Any, limits: Limits) -> None:
    """Set what vLLM leaves at uvicorn's defaults, before the server listens.

    Args:
        app: vLLM's, which knows its server.
        limits: of which `body_bytes` holds for messages, and `idle_seconds` for clients that do not
            read.
    """
    # under Ray Serve, something else stands in the place of the server
    config = getattr(getattr(app.state, "server", None), "config", None)
    if config is None:
        unbounded = "what clients send and leave unread is not bounded"
        logger.warning("mmkit: this vLLM does not tell of its HTTP server, so %s.", unbounded)
        return
    config.timeout_graceful_shutdown = UNREAD
    config.ws_max_size = limits.body_bytes + _MARGIN
    config.ws_per_message_deflate = False  # a few KB would become `ws_max_size`
    if config.ws_protocol_class is not None:
        config.ws_protocol_class = paced(config.ws_protocol_class)
    config.http_protocol_class = reading(config.http_protocol_class, limits.idle_seconds)


# -- bodies ----------------------------------------------------------------------------------------


class Bounded:
    """ASGI middleware: a request ends when its body takes too long, or when the engine is over.

    Args:
        app: the routes, those of vLLM among them.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, if need be by 408 or 503."""
        door = of_scope(scope)
        if door is not None and scope["type"] == "lifespan":
            settle(scope["app"], door.limits)
        if door is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        answering = asyncio.ensure_future(self._app(scope, exchange.receive, exchange.send))
        try:
            refusal = await _outcome(answering, exchange, door)
        finally:
            if not answering.done():
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)
        if refusal is None:
            answering.result()
        elif not exchange.answered:
            route = scope["path"].rpartition("/v1/mm/")[2] or "vllm"
            await errors.response(refusal, door.plan, route)(scope, receive, send)


class _Exchange:
    """The state of a request: what has arrived, and whether its answer has begun."""

    def __init__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        self._receive, self._send = receive, send
        self._loop = asyncio.get_running_loop()
        self._begun, self._size = self._loop.time(), 0
        names = {name for name, _ in scope["headers"]}
        self.whole = names.isdisjoint((b"content-length", b"transfer-encoding"))
        self.answered = False

    async def receive(self) -> Any:
        message = await self._receive()
        self._size += len(message.get("body", b""))
        self.whole = self.whole or not message.get("more_body", False)
        return message

    async def send(self, message: Any) -> None:
        self.answered = True
        await self._send(message)

    def left(self, idle_seconds: float) -> float:
        """Seconds that its body still has."""
        return self._begun + idle_seconds + self._size / SLOWEST - self._loop.time()


async def _outcome(
    answering: asyncio.Future[None], exchange: _Exchange, door: Door
) -> Exception | None:
    """Why a request is refused before it is answered; None once it is answered."""
    idle = door.limits.idle_seconds
    while True:
        left = None if exchange.whole or exchange.answered else exchange.left(idle)
        if left is not None and left <= 0:
            expected = f"all of it within {idle:g} s and 1 s for each {SLOWEST} bytes"
            return Slow("body", expected, "less")
        ends = {answering, door.over}
        await asyncio.wait(ends, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if door.over.done():
            await asyncio.wait({answering}, timeout=LINGER)
        if answering.done():
            return None
        if door.over.done():
            return EngineDeadError()  # type: ignore[no-any-return]


# -- answers ---------------------------------------------------------------------------------------


class _Reading(asyncio.Protocol):
    """Comes before uvicorn's protocol of HTTP, and ends a connection whose client does not read.

    While the client does not, vLLM goes on and collects what it generates: the end of the
    connection aborts the request.
    """

    idle_seconds: float
    transport: asyncio.Transport
    _limit: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit = asyncio.get_running_loop().call_later(self.idle_seconds, self._cut)

    def resume_writing(self) -> None:
        self._cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def _cancel(self) -> None:
        if self._limit is not None:
            self._limit.cancel()

    def _cut(self) -> None:
        logger.info(
            "mmkit: a client did not read its answer for %g s, and was cut off", self.idle_seconds
        )
        self.transport.abort()


def reading(protocol: type[asyncio.Protocol], idle_seconds: float) -> type[asyncio.Protocol]:
    """A protocol of HTTP that waits so long for clients to read."""
    return type(f"Reading{protocol.__name__}", (_Reading, protocol), {"idle_seconds": idle_seconds})


# -- websockets ------------------------------------------------------------------------------------


class Flood(Exception):
    """A client sends frames that make no message."""


class Frames:
    """Tells the frames of a client's bytes apart (RFC 6455), and counts those that make no
    message."""

    def __init__(self) -> None:
        self._connected = False
        self._head = bytearray()
        self._rest = 0
        self._since = 0

    def take(self, data: bytes | bytearray) -> int:
        """The number of the next bytes that hold at most `TURN` frames.

        Raises:
            Flood: there were more than `MOST_FRAMES` since the last message.
        """
        if not self._connected:  # the request that asks for a websocket
            end = data.find(b"\r\n\r\n")
            self._connected = end >= 0
            return end + 4 if self._connected else len(data)
        at, frames = 0, 0
        while at < len(data) and frames < TURN:
            if self._rest:
                step = min(self._rest, len(data) - at)
                self._rest -= step
                at += step
                continue
            self._head.append(data[at])
            at += 1
            frames += self._headed()
        return at

    def _headed(self) -> bool:
        """Whether the head of a frame is whole."""
        head = self._head
        if len(head) < 2:
            return False
        size = head[1] & 0x7F
        end = 2 + {126: 2, 127: 8}.get(size, 0)
        if len(head) < end:
            return False
        # a client masks its frames by four bytes
        self._rest = (int.from_bytes(head[2:end]) if end > 2 else size) + 4
        is_control, is_last = head[0] & 0x08, head[0] & 0x80
        self._since = self._since + 1 if is_control or not is_last else 0
        head.clear()
        if self._since > MOST_FRAMES:
            raise Flood
        return True


class _Paced(asyncio.Protocol):
    """Comes before uvicorn's protocol of websockets, and hands it a few frames at a time."""

    def connection_made(self, transport: Any) -> None:
        self._frames, self._left = Frames(), bytearray()
        self._turn: asyncio.Handle | None = None
        self._valve = _Valve(transport, self)
        self._loop = asyncio.get_running_loop()
        super().connection_made(self._valve)  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        self._left.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._left += data
        if self._turn is None:
            self.feed()

    def soon(self) -> None:
        """Feed when others had their turn."""
        if self._turn is None:
            self._turn = self._loop.call_soon(self.feed)

    def feed(self) -> None:
        """Hand on what has come, if it is wanted."""
        self._turn = None
        transport = self._valve.transport
        if not self._left or not self._valve.is_open or transport.is_closing():
            return
        try:
            size = self._frames.take(self._left)
        except Flood:
            self._left.clear()
            self._cut()
            return
        part = bytes(self._left[:size])
        del self._left[:size]
        super().data_received(part)
        if self._left:
            transport.pause_reading()
            self.soon()
        elif self._valve.is_open and not transport.is_closing():
            transport.resume_reading()

    def _cut(self) -> None:
        logger.info(
            "mmkit: a websocket sent %d frames that make no message, and was closed", MOST_FRAMES
        )
        transport = self._valve.transport
        if transport.get_write_buffer_size():  # nobody reads it
            transport.abort()
            return
        transport.write(_POLICY)
        transport.close()


class _Valve:
    """A transport as uvicorn's protocol sees it: whether it wants to read is not yet whether there
    is nothing left."""

    def __init__(self, transport: Any, paced: _Paced) -> None:
        self.transport, self._paced = transport, paced
        self.is_open = True

    def pause_reading(self) -> None:
        self.is_open = False
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        self.is_open = True
        if self._paced._left:
            self._paced.soon()
        else:
            self.transport.resume_reading()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


def paced(protocol: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
    """A protocol of websockets that leaves others their turn."""
    return type(f"Paced{protocol.__name__}", (_Paced, protocol), {})
