"""A client of the server, async and sync: single requests, streams, and sessions in chunks.

>>> with Client("http://127.0.0.1:8000") as client:
...     answer = client.generate([3, 1, 31, 31], {"actions": [np.zeros((2, 3), np.float32)]})
...     answer.choices[0].token_ids

This module imports neither vLLM nor the server's web framework. The server checks requests; its
sentence becomes a `RequestError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial, wraps
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec
from anyio.from_thread import BlockingPortalProvider
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from ..errors import InputError, MmkitError
from . import protocol
from .wire import encode

__all__ = ["AsyncClient", "AsyncSession", "Client", "RequestError", "ServerGone", "Session"]

T = TypeVar("T")
_Message = (
    protocol.ReadyMessage
    | protocol.TokensMessage
    | protocol.ChunkMessage
    | protocol.ErrorMessage
    | protocol.ClosedMessage
)
_CLOSE = '{"type": "close"}'
_GOODBYE_SECONDS = 5.0
_SHOWN = 200
# A connection for each request: vLLM's server closes idle ones after 5 s, and on a busy machine a
# request on a kept one meets that moment and is lost.
_CONNECTIONS = httpx.Limits(max_connections=100, max_keepalive_connections=0)
_REMEDIES = {
    401: "Give the client the server's api_key.",
    # what a refused websocket gets
    403: "Check that it is a server of mmkit, for a model with a spec.",
    404: "Check that it is a server of mmkit.",
}


class RequestError(MmkitError):
    """A refusal by the server; the message is the server's sentence.

    Attributes:
        code: HTTP status.
        param: path of the error in the request, for example ``items.actions[3]``.
        type: the kind of error, for example ``BadRequestError``.
    """

    def __init__(
        self, message: str, *, code: int = 400, param: str | None = None, type: str = ""
    ) -> None:
        super().__init__(message)
        self.where = param or ""
        self.code, self.param, self.type = code, param, type

    @classmethod
    def of(cls, info: protocol.ErrorInfo) -> RequestError:
        """The error that a server tells."""
        return cls(info.message, code=info.code, param=info.param, type=info.type)


class ServerGone(MmkitError):
    """No server of mmkit at the address, or one that went away or fell silent before the answer was
    complete."""


class AsyncClient:
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

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float | None = 60.0,
        model: str | None = None,
    ) -> None:
        if not _is_address(base_url):
            raise InputError("base_url", "an address such as http://127.0.0.1:8000", repr(base_url))
        self._base, self.timeout, self._model = base_url.rstrip("/"), timeout, model
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(headers=self.headers, timeout=timeout, limits=_CONNECTIONS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; sessions have their own, which stay open."""
        await self._http.aclose()

    async def modalities(self) -> protocol.Modalities:
        """The modalities and outputs of the served model, and the limits of the server."""
        return await self._ask(protocol.Modalities, "GET", "modalities")

    async def generate(
        self, prompt: Any = None, items: Any = None, **options: Any
    ) -> protocol.Generation:
        """One request, answered as a whole.

        Args:
            prompt: a text, or token ids (tokens,).
            items: as in vLLM's ``multi_modal_data``: per modality a list of items or a batch, of
                arrays, tensors, PIL images or nested lists. `modalities` has their shapes and
                dtypes.
            options: fields of `protocol.GenerateRequest`, and of vLLM's `SamplingParams`.
        """
        body = self._body(protocol.GenerateRequest, prompt, items, options)
        return await self._ask(protocol.Generation, "POST", "generate", body)

    async def pool(self, prompt: Any = None, items: Any = None, **options: Any) -> protocol.Pooling:
        """The tensor of a pooling model for a prompt with items. Without a prompt the server writes
        the placeholders of the items. `options` are fields of `protocol.PoolingRequest`."""
        body = self._body(protocol.PoolingRequest, prompt, items, options)
        return await self._ask(protocol.Pooling, "POST", "pooling", body)

    async def stream(
        self, prompt: Any = None, items: Any = None, **options: Any
    ) -> AsyncGenerator[protocol.Generation, None]:
        """`generate` as a stream: yields an event per step; the last one has the usage. The first
        one sends the request and raises its error; closing the generator ends the request."""
        body = self._body(protocol.GenerateRequest, prompt, items, {**options, "stream": True})
        async with self._answer("POST", "generate", body) as response:
            url, count, rest = str(response.url), 0, b""
            async for part in response.aiter_bytes():
                # httpx splits lines at U+2028 and others, too, which JSON texts may hold
                *lines, rest = (rest + part).split(b"\n")
                for data in (line[5:].strip() for line in lines if line[:5] == b"data:"):
                    if data == b"[DONE]":
                        return
                    with suppress(msgspec.MsgspecError):
                        raise RequestError.of(_ERROR.decode(data).error)
                    count += 1
                    yield _parsed(protocol.Generation, data, url)
        got = f"its end after {count} events"
        raise ServerGone(url, "[DONE] at the end of a stream", got, "See the server's log.")

    def session(self, prompt: Any = None, items: Any = None, **options: Any) -> AsyncSession:
        """A generation that continues with more items, chunk by chunk: ``async with
        client.session(...) as session``.

        Args:
            prompt: the prompt of the first chunk, as in `generate`.
            items: the items of that prompt.
            options: fields of `protocol.StartMessage`, and of vLLM's `SamplingParams`, of which
                `max_tokens` is required without an `output`; and `on_tokens`, a plain function,
                called with the new tokens of a chunk before the chunk is complete.
        """
        on_tokens = options.pop("on_tokens", None)
        if on_tokens:
            options["stream"] = True
        start = self._body(protocol.StartMessage, prompt, items, options).decode()
        return AsyncSession(self, f"ws{self._url('session')[4:]}", start, on_tokens)

    def _url(self, name: str) -> str:
        return f"{self._base}/v1/mm/{name}"

    def _body(self, kind: Any, prompt: Any, items: Any, options: Mapping[str, Any]) -> bytes:
        return request(kind, prompt, items, {"model": self._model, **options})

    async def _ask(self, kind: type[T], method: str, name: str, body: bytes = b"") -> T:
        async with self._answer(method, name, body) as response:
            answer: T = _parsed(kind, await response.aread(), self._url(name))
        return answer

    @asynccontextmanager
    async def _answer(self, method: str, name: str, body: bytes) -> AsyncIterator[httpx.Response]:
        """The answer to a request, which is to be read while the block runs."""
        with self.failures(url := self._url(name)):
            async with self._http.stream(method, url, content=body) as response:
                if not response.is_success:
                    raise _refused(response.status_code, await response.aread(), url)
                yield response

    @contextmanager
    def failures(self, url: str) -> Iterator[None]:
        """A context that turns failures of the connection into errors of this module."""
        expected, remedy = "an answer", "See the server's log."
        try:
            yield
            return
        except InvalidStatus as error:
            response = error.response
            raise _refused(response.status_code, bytes(response.body or b""), url) from None
        except (httpx.TimeoutException, TimeoutError):
            got = "none" if self.timeout is None else f"none for {self.timeout:g} s"
            remedy = "Give the client a longer timeout, or see to the server."
        except ConnectionClosed as error:
            got, remedy = f"a closed connection ({error})", "Open a new session."
        except (httpx.ConnectError, OSError) as error:
            expected, got = "a server", f"no connection ({_cause(error)})"
            remedy = "Start one with `python -m mmkit.serve`, or check the address."
        except (httpx.HTTPError, httpx.InvalidURL, WebSocketException) as error:
            got = _cause(error)
        raise ServerGone(url, expected, got, remedy) from None


class AsyncSession:
    """A session of `AsyncClient.session`, after it is entered.

    Attributes:
        first: the chunk after the start.
        id: the server's name of the session.
        model: the served model.
        remaining: number of tokens that still fit into the session, tokens of prompts and items
            included.
    """

    first: protocol.ChunkMessage
    id: str
    model: str
    remaining: int = 0

    def __init__(self, client: AsyncClient, url: str, start: str, on_tokens: Any) -> None:
        self._client, self._url, self._start, self._on_tokens = client, url, start, on_tokens
        self._socket: Any = None
        self._open = self._waiting = False

    async def __aenter__(self) -> Self:
        timeout = self._client.timeout
        try:
            with self._client.failures(self._url):
                self._socket = await connect(
                    self._url,
                    additional_headers=self._client.headers,
                    open_timeout=timeout,
                    ping_timeout=timeout,
                    close_timeout=_GOODBYE_SECONDS,
                    compression=None,  # base64 of floats hardly shrinks
                    max_size=None,
                    max_queue=None,  # a full one would hold up the end of a session
                )
            self._open = self._waiting = True
            ready = await self._answer(protocol.ReadyMessage)
            self.id, self.model = ready.session, ready.model
            self.first = await self._ask(self._start, protocol.ChunkMessage)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def next(
        self, items: Any = None, prompt: Any = None, **options: Any
    ) -> protocol.ChunkMessage:
        """Send more items, more prompt, or both, and return the next chunk.

        Args:
            items: as in `AsyncClient.generate`; without a prompt, the server writes their
                placeholders.
            prompt: a text, or token ids (tokens,), with the placeholders of the items.
            options: fields of `protocol.NextMessage`, and `max_tokens`.

        Raises:
            RequestError: the server refused the message. The session is as it was before, unless
                the next call raises `ServerGone`.
            ServerGone: the session is over.
            InputError: an item without a form on the wire, or the last call was interrupted.
        """
        message = request(protocol.NextMessage, prompt, items, options).decode()
        return await self._ask(message, protocol.ChunkMessage)

    async def close(self) -> None:
        """End the session, and wait until the server has released it. Can be called again."""
        try:
            if self._open and not self._waiting:
                with suppress(MmkitError):  # the session ends in any case
                    await self._ask(_CLOSE, protocol.ClosedMessage)
        finally:
            self._open = False
            if self._socket:
                await self._socket.close()

    async def _ask(self, text: str, expected: type[T]) -> T:
        if not self._open:
            raise ServerGone(self._url, "an open session", "a closed one", "Open a new one.")
        if self._waiting:
            remedy = "Await one call before the next; open a new session if one was interrupted."
            raise InputError(self._url, "the last chunk to be whole", "another message", remedy)
        self._waiting = True  # stays True if the wait for the answer is interrupted
        with suppress(ConnectionClosed):  # the server's last messages are still to be read
            await self._socket.send(text)
        return await self._answer(expected)

    async def _answer(self, expected: type[T]) -> T:
        seconds = self._client.timeout
        if expected is protocol.ClosedMessage:
            seconds = min(seconds or _GOODBYE_SECONDS, _GOODBYE_SECONDS)
        while True:
            try:
                with self._client.failures(self._url):
                    raw = await asyncio.wait_for(self._socket.recv(), seconds)
                message: Any = _parsed(_Message, raw, self._url)
            except ServerGone:
                self._open = False
                raise
            self.remaining = message.remaining
            if isinstance(message, expected):
                self._waiting = False
                return message
            if isinstance(message, protocol.TokensMessage) and self._on_tokens:
                self._on_tokens(message)
            elif isinstance(message, protocol.ErrorMessage):
                self._waiting, self._open = False, not message.fatal
                raise RequestError.of(message.error)
            elif isinstance(message, protocol.ClosedMessage):
                self._open = False
                got = f"the end of the session ({message.reason})"
                raise ServerGone(self._url, "an answer", got, "Open a new one.")


# -- blocking calls --------------------------------------------------------------------------------


def _run(portals: BlockingPortalProvider, function: Callable[[], Awaitable[T]]) -> T:
    """The outcome of a coroutine, which runs in the portal's thread."""
    with portals as portal:
        running = portal.start_task_soon(function)
        try:
            return running.result()
        except BaseException:  # a wait that is interrupted
            running.cancel()
            raise


def _blocking(method: Callable[..., Awaitable[T]]) -> Callable[..., T]:
    """A method that waits for one of `_core`."""

    @wraps(method)
    def waiting(self: Any, *args: Any, **options: Any) -> T:
        return _run(self._portals, partial(method, self._core, *args, **options))

    return waiting


class Client:
    """`AsyncClient` with blocking calls, which run in a thread of their own."""

    def __init__(self, base_url: str, **options: Any) -> None:
        self._core, self._portals = AsyncClient(base_url, **options), BlockingPortalProvider()

    def __enter__(self) -> Self:
        self._portals.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
        self._portals.__exit__(*error)

    close = _blocking(AsyncClient.close)
    modalities = _blocking(AsyncClient.modalities)
    generate = _blocking(AsyncClient.generate)
    pool = _blocking(AsyncClient.pool)

    def stream(self, *args: Any, **options: Any) -> Iterator[protocol.Generation]:
        """See `AsyncClient.stream`."""
        events = self._core.stream(*args, **options)
        with self._portals:
            try:
                while (event := _run(self._portals, partial(anext, events, None))) is not None:
                    yield event
            finally:
                _run(self._portals, events.aclose)

    def session(self, *args: Any, **options: Any) -> Session:
        """See `AsyncClient.session`: ``with client.session(...) as session``."""
        return Session(self._core.session(*args, **options), self._portals)


class Session:
    """`AsyncSession` with blocking calls; see there."""

    first: protocol.ChunkMessage
    id: str
    model: str

    def __init__(self, core: AsyncSession, portals: BlockingPortalProvider) -> None:
        self._core, self._portals = core, portals

    def __enter__(self) -> Self:
        with self._portals:
            _run(self._portals, self._core.__aenter__)
            self._portals.__enter__()
        self.first, self.id, self.model = self._core.first, self._core.id, self._core.model
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
        self._portals.__exit__(*error)

    @property
    def remaining(self) -> int:
        """See `AsyncSession`."""
        return self._core.remaining

    next = _blocking(AsyncSession.next)
    close = _blocking(AsyncSession.close)


# -- JSON ------------------------------------------------------------------------------------------

_ERROR = msgspec.json.Decoder(protocol.ErrorBody)


def request(kind: Any, prompt: Any, items: Any, options: Mapping[str, Any]) -> bytes:
    """A message of some kind in JSON. Options that are none of its fields are sampling parameters.

    Raises:
        InputError: a value without a form on the wire.
    """
    fields = {"prompt": prompt, "items": encode(items or {}) or None, **options}
    given = {name: value for name, value in fields.items() if value is not None}
    known = kind.__struct_fields__
    if "sampling_params" in known:
        others = {name: given.pop(name) for name in list(given) if name not in known}
        if sampling := {**given.pop("sampling_params", {}), **others}:
            given["sampling_params"] = sampling
    if tag := kind.__struct_config__.tag:
        given["type"] = tag
    return msgspec.json.encode(given, enc_hook=_plain)


def _plain(value: Any) -> Any:
    """Arrays, tensors and their scalars as numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise InputError("request", "values that JSON has", f"a {type(value).__name__}")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port or an IPv6 address
        return False


def _cause(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__


def _parsed(kind: Any, raw: bytes | str, url: str) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        expected = f"a {getattr(kind, '__name__', 'message of a session')} in JSON"
        got = repr(raw[:_SHOWN])
        raise ServerGone(url, expected, got, "Check that it is a server of mmkit.") from None


def _refused(status: int, raw: bytes, url: str) -> RequestError:
    """The server's error; one sentence about the status where the body is none of its own."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return RequestError.of(_ERROR.decode(raw).error)
    reason = httpx.codes.get_reason_phrase(status)
    body = raw.decode(errors="replace").strip()[:_SHOWN]
    got = f"HTTP {status} {reason} {f'({body})' if body else ''}".strip()
    message = MmkitError(url, "an answer", got, _REMEDIES.get(status, ""))
    return RequestError(str(message), code=status, type=reason.replace(" ", "") or "HTTPError")
