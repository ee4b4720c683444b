"""A client of the server, sync and async: single requests, streams, and sessions in chunks.

>>> with Client("http://127.0.0.1:8000") as client:
...     answer = client.generate([3, 1, 31, 31], {"actions": [np.zeros((2, 3), np.float32)]})
...     answer.choices[0].token_ids

This module imports neither vLLM nor the server's web framework. The server checks requests; its
sentence becomes a `RequestError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import suppress
from inspect import isawaitable
from typing import Annotated, Any, ClassVar, Self, TypeVar, Unpack

import httpx
import websockets.asyncio.client
import websockets.sync.client
from pydantic import Field, TypeAdapter, ValidationError
from websockets.exceptions import ConnectionClosed

from ..errors import InputError, MmkitError
from .options import (
    GenerateOptions,
    Items,
    NextOptions,
    PoolingOptions,
    Prompt,
    SamplingOptions,
    SessionOptions,
)
from .protocol import (
    ChunkMessage,
    ClosedMessage,
    ErrorMessage,
    Generation,
    Modalities,
    Pooling,
    ReadyMessage,
    TokensMessage,
)
from .transport import (
    GOODBYE_SECONDS,
    SHOWN,
    Endpoint,
    Events,
    M,
    RequestError,
    ServerGone,
    not_ours,
    parsed,
    refused,
    request_error,
    session_message,
)

__all__ = [
    "AsyncClient",
    "AsyncSession",
    "Client",
    "GenerateOptions",
    "NextOptions",
    "PoolingOptions",
    "RequestError",
    "SamplingOptions",
    "ServerGone",
    "Session",
    "SessionOptions",
]

T = TypeVar("T")

_Message = ReadyMessage | TokensMessage | ChunkMessage | ErrorMessage | ClosedMessage
_MESSAGE: TypeAdapter[_Message] = TypeAdapter(Annotated[_Message, Field(discriminator="type")])
_CLOSE = '{"type": "close"}'
# A connection for each request: vLLM's server closes idle ones after 5 s, and on a busy machine a
# request on a kept one meets that moment and is lost.
_CONNECTIONS = httpx.Limits(max_connections=100, max_keepalive_connections=0)


class _Client:
    """The common part of both clients: coroutines that suspend where the I/O does, which is nowhere
    in `Client`."""

    _http_class: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float | None = 60.0,
        model: str | None = None,
    ) -> None:
        self._endpoint = Endpoint.at(base_url, api_key, timeout, model)
        self._http = self._http_class(
            headers=self._endpoint.headers, timeout=timeout, limits=_CONNECTIONS
        )

    async def _call(self, model: type[M], name: str, body: bytes | None = None) -> M:
        url = self._endpoint.url(name)
        method = "GET" if body is None else "POST"
        with self._endpoint.failures(url):
            response = await _settled(self._http.request(method, url, content=body))
        if not response.is_success:
            raise refused(response.status_code, response.content, url)
        return parsed(model, response.content, url)

    def _streaming(self, *request: Any) -> tuple[Events, Any]:
        """The reader of a stream, and the response to open."""
        url = self._endpoint.url("generate")
        body = self._endpoint.request(*request, stream=True)
        return Events(url), self._http.stream("POST", url, content=body)


class Client(_Client):
    """A connection to one server.

    Args:
        base_url: http or https address, for example ``http://127.0.0.1:8000``.
        api_key: the server's ``--api-key``.
        timeout: the most seconds without data from the server; None for no limit. An answer that
            does not stream comes at once, so the timeout also limits the time of a generation.
        model: model name in requests, for servers that check it.

    Raises:
        InputError: no http address.

    Every method raises `RequestError` if the server refuses the request, `ServerGone` if the server
    is not there or stops answering, and `InputError` for an item without a form on the wire.
    """

    _http_class = httpx.Client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; sessions have their own, which stay open."""
        self._http.close()

    def modalities(self) -> Modalities:
        """The modalities and outputs of the served model, and the limits of the server."""
        return _run(self._call(Modalities, "modalities"))

    def generate(
        self, prompt: Prompt = None, items: Items = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """One request, answered as a whole.

        Args:
            prompt: a text, or token ids (tokens,); None beside `messages`.
            items: as in vLLM's ``multi_modal_data``: per modality a list of items or a batch, of
                arrays, tensors, PIL images or nested lists. `modalities` has their shapes and
                dtypes.
            options: see `GenerateOptions` and `protocol.Sampling`.
        """
        body = self._endpoint.request(prompt, items, options, stream=False)
        return _run(self._call(Generation, "generate", body))

    def pool(
        self, prompt: Prompt = None, items: Items = None, **options: Unpack[PoolingOptions]
    ) -> Pooling:
        """The tensor of a pooling model for a prompt with items. Without a prompt the server writes
        the placeholders of the items."""
        body = self._endpoint.request(prompt, items, options)
        return _run(self._call(Pooling, "pooling", body))

    def stream(
        self, prompt: Prompt = None, items: Items = None, **options: Unpack[GenerateOptions]
    ) -> Generator[Generation, None, None]:
        """`generate` as a stream: yields an event per step; the last one has the usage. The first
        `next` sends the request and raises its error; closing the generator ends the request."""
        events, opening = self._streaming(prompt, items, options)
        with self._endpoint.failures(events.url), opening as response:
            if not response.is_success:
                raise refused(response.status_code, response.read(), events.url)
            for part in response.iter_bytes():
                yield from events.feed(part)
                if events.done:
                    return
        raise events.cut()

    def session(
        self, prompt: Prompt = None, items: Items = None, **options: Unpack[SessionOptions]
    ) -> Session:
        """A generation that continues with more items, chunk by chunk: ``with client.session(...)
        as session``.

        Args:
            prompt: the prompt of the first chunk, as in `generate`.
            items: the items of that prompt.
            options: `max_tokens`, and more: see `SessionOptions` and `protocol.Sampling`.
        """
        return Session(self._endpoint, prompt, items, options)


class AsyncClient(_Client):
    """`Client`, with coroutines."""

    _http_class = httpx.AsyncClient

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """See `Client.close`."""
        await self._http.aclose()

    async def modalities(self) -> Modalities:
        """See `Client.modalities`."""
        return await self._call(Modalities, "modalities")

    async def generate(
        self, prompt: Prompt = None, items: Items = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """See `Client.generate`."""
        body = self._endpoint.request(prompt, items, options, stream=False)
        return await self._call(Generation, "generate", body)

    async def pool(
        self, prompt: Prompt = None, items: Items = None, **options: Unpack[PoolingOptions]
    ) -> Pooling:
        """See `Client.pool`."""
        body = self._endpoint.request(prompt, items, options)
        return await self._call(Pooling, "pooling", body)

    async def stream(
        self, prompt: Prompt = None, items: Items = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Generation, None]:
        """See `Client.stream`: ``async for event in client.stream(...)``."""
        events, opening = self._streaming(prompt, items, options)
        with self._endpoint.failures(events.url):
            async with opening as response:
                if not response.is_success:
                    raise refused(response.status_code, await response.aread(), events.url)
                async for part in response.aiter_bytes():
                    for event in events.feed(part):
                        yield event
                    if events.done:
                        return
        raise events.cut()

    def session(
        self, prompt: Prompt = None, items: Items = None, **options: Unpack[SessionOptions]
    ) -> AsyncSession:
        """See `Client.session`: ``async with client.session(...) as session``."""
        return AsyncSession(self._endpoint, prompt, items, options)


class _Session:
    """The common part of both kinds of session, like `_Client` for the clients."""

    first: ChunkMessage
    id: str
    model: str
    remaining: int = 0

    @staticmethod
    def _connect(url: str, **options: Any) -> Any:
        """A websocket, or an awaitable of one."""

    @staticmethod
    def _receive(socket: Any, seconds: float | None) -> Any:
        """The next message, or an awaitable of it."""

    def __init__(
        self, server: Endpoint, prompt: Prompt, items: Items, options: SessionOptions
    ) -> None:
        self._endpoint, self._url = server, server.session_url
        self._on_tokens = options.pop("on_tokens", None)
        if self._on_tokens:
            options["stream"] = True
        self._start = session_message("start", prompt, items, {"model": server.model, **options})
        self._socket: Any = None
        self._open = self._waiting = False

    async def _enter(self) -> None:
        try:
            with self._endpoint.failures(self._url):
                options = self._endpoint.connecting()
                self._socket = await _settled(self._connect(self._url, **options))
            self._open = self._waiting = True
            ready = await self._answer(ReadyMessage)
            self.id, self.model = ready.session, ready.model
            self.first = await self._ask(self._start, ChunkMessage)
        except BaseException:
            await self._leave()
            raise

    async def _leave(self) -> None:
        try:
            if self._open and not self._waiting:
                with suppress(MmkitError):  # the session ends in any case
                    await self._ask(_CLOSE, ClosedMessage)
        finally:
            self._open = False
            if self._socket:
                await _settled(self._socket.close())

    async def _ask(self, text: str, expected: type[M]) -> M:
        if not self._open:
            raise ServerGone(self._url, "an open session", "a closed one", "Open a new one.")
        if self._waiting:
            remedy = "Await one call before the next; open a new session if one was interrupted."
            raise InputError(self._url, "the last chunk to be whole", "another message", remedy)
        self._waiting = True  # stays True if the wait for the answer is interrupted
        with suppress(ConnectionClosed):  # the server's last messages are still to be read
            await _settled(self._socket.send(text))
        return await self._answer(expected)

    async def _answer(self, expected: type[M]) -> M:
        seconds = self._endpoint.timeout
        if expected is ClosedMessage:
            seconds = min(seconds or GOODBYE_SECONDS, GOODBYE_SECONDS)
        while True:
            try:
                with self._endpoint.failures(self._url):
                    raw = await _settled(self._receive(self._socket, seconds))
            except ServerGone:
                self._open = False
                raise
            answer = self._take(raw, expected)
            if answer is not None:
                return answer

    def _take(self, raw: str | bytes, expected: type[M]) -> M | None:
        """The answer, or None if this message is not it yet."""
        try:
            message = _MESSAGE.validate_json(raw)
        except ValidationError:
            self._open = False
            raise not_ours(self._url, "a message of a session", raw[:SHOWN]) from None
        self.remaining = message.remaining
        if isinstance(message, expected):
            self._waiting = False
            return message
        if isinstance(message, TokensMessage) and self._on_tokens:
            self._on_tokens(message)
        elif isinstance(message, ErrorMessage):
            self._waiting, self._open = False, not message.fatal
            raise request_error(message.error)
        elif isinstance(message, ClosedMessage):
            self._open = False
            got = f"the end of the session ({message.reason})"
            raise ServerGone(self._url, "an answer", got, "Open a new one.")
        return None


class Session(_Session):
    """A session of `Client.session`, after it is entered.

    Attributes:
        first: the chunk after the start.
        id: the server's name of the session.
        model: the served model.
        remaining: number of tokens that still fit into the session, tokens of prompts and items
            included.
    """

    @staticmethod
    def _connect(url: str, **options: Any) -> Any:
        return websockets.sync.client.connect(url, **options).__enter__()

    @staticmethod
    def _receive(socket: Any, seconds: float | None) -> Any:
        return socket.recv(seconds)

    def __enter__(self) -> Self:
        _run(self._enter())
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def next(
        self, items: Items = None, prompt: Prompt = None, **options: Unpack[NextOptions]
    ) -> ChunkMessage:
        """Send more items, more prompt, or both, and return the next chunk.

        Args:
            items: as in `Client.generate`; without a prompt, the server writes their placeholders.
            prompt: a text, or token ids (tokens,), with the placeholders of the items.
            options: see `NextOptions`.

        Raises:
            RequestError: the server refused the message. The session is as it was before, unless
                the next call raises `ServerGone`.
            ServerGone: the session is over.
            InputError: an item without a form on the wire, or the last call was interrupted.
        """
        return _run(self._ask(session_message("next", prompt, items, options), ChunkMessage))

    def close(self) -> None:
        """End the session, and wait until the server has released it. Can be called again."""
        _run(self._leave())


class AsyncSession(_Session):
    """A session of `AsyncClient.session`, after it is entered; see `Session`."""

    @staticmethod
    def _connect(url: str, **options: Any) -> Any:
        return websockets.asyncio.client.connect(url, **options)

    @staticmethod
    def _receive(socket: Any, seconds: float | None) -> Any:
        return asyncio.wait_for(socket.recv(), seconds)

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def next(
        self, items: Items = None, prompt: Prompt = None, **options: Unpack[NextOptions]
    ) -> ChunkMessage:
        """See `Session.next`."""
        return await self._ask(session_message("next", prompt, items, options), ChunkMessage)

    async def close(self) -> None:
        """See `Session.close`."""
        await self._leave()


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine whose I/O blocks, so that it never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("a blocking call that suspends")


async def _settled(value: Any) -> Any:
    """The result of a call, awaited where the library is asynchronous."""
    return await value if isawaitable(value) else value
