"""A client of the server, async and sync: single requests, streams, and sessions in chunks.

>>> with Client("http://127.0.0.1:8000") as client:
...     answer = client.generate([3, 1, 31, 31], {"actions": [np.zeros((2, 3), np.float32)]})
...     answer.choices[0].token_ids

This module imports neither vLLM nor the server's web framework. The server checks requests; its
sentence becomes a `RequestError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec
from anyio.from_thread import BlockingPortalProvider
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from ..errors import InputError, MmkitError
from .protocol import (
    ChunkMessage,
    ClosedMessage,
    ErrorBody,
    ErrorInfo,
    ErrorMessage,
    GenerateRequest,
    Generation,
    Modalities,
    NextMessage,
    Pooling,
    PoolingRequest,
    ReadyMessage,
    StartMessage,
    TokensMessage,
)
from .wire import encode, encoded

__all__ = ["AsyncClient", "AsyncSession", "Client", "RequestError", "ServerGone", "Session"]

T = TypeVar("T")
_Message = ReadyMessage | TokensMessage | ChunkMessage | ErrorMessage | ClosedMessage
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
    def of(cls, info: ErrorInfo) -> RequestError:
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
        self.base, self.timeout, self.model = base_url.rstrip("/"), timeout, model
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(headers=self.headers, timeout=timeout, limits=_CONNECTIONS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; sessions have their own, which stay open."""
        await self._http.aclose()

    async def modalities(self) -> Modalities:
        """The modalities and outputs of the served model, and the limits of the server."""
        return await self._call(Modalities, "modalities")

    async def generate(self, prompt: Any = None, items: Any = None, **options: Any) -> Generation:
        """One request, answered as a whole.

        Args:
            prompt: a text, or token ids (tokens,); None beside `messages`.
            items: as in vLLM's ``multi_modal_data``: per modality a list of items or a batch, of
                arrays, tensors, PIL images or nested lists. `modalities` has their shapes and
                dtypes.
            options: fields of `protocol.GenerateRequest`, and of vLLM's `SamplingParams`.
        """
        body = self._body(GenerateRequest, prompt, items, options)
        return await self._call(Generation, "generate", body)

    async def pool(self, prompt: Any = None, items: Any = None, **options: Any) -> Pooling:
        """The tensor of a pooling model for a prompt with items. Without a prompt the server writes
        the placeholders of the items. `options` are fields of `protocol.PoolingRequest`."""
        return await self._call(
            Pooling, "pooling", self._body(PoolingRequest, prompt, items, options)
        )

    async def stream(
        self, prompt: Any = None, items: Any = None, **options: Any
    ) -> AsyncGenerator[Generation, None]:
        """`generate` as a stream: yields an event per step; the last one has the usage. The first
        one sends the request and raises its error; closing the generator ends the request."""
        url, count = self._url("generate"), 0
        body = self._body(GenerateRequest, prompt, items, {**options, "stream": True})
        with self.failures(url):
            async with self._http.stream("POST", url, content=body) as response:
                if not response.is_success:
                    raise _refused(response.status_code, await response.aread(), url)
                rest = b""
                async for part in response.aiter_bytes():
                    # httpx splits lines at U+2028 and others, too, which JSON texts may hold
                    *lines, rest = (rest + part).split(b"\n")
                    for data in (line[5:].strip() for line in lines if line[:5] == b"data:"):
                        if data == b"[DONE]":
                            return
                        with suppress(msgspec.MsgspecError):
                            raise RequestError.of(msgspec.json.decode(data, type=ErrorBody).error)
                        count += 1
                        yield _parsed(Generation, data, url)
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
        start = self._body(StartMessage, prompt, items, options).decode()
        return AsyncSession(self, f"ws{self._url('session')[4:]}", start, on_tokens)

    def _url(self, name: str) -> str:
        return f"{self.base}/v1/mm/{name}"

    def _body(self, kind: Any, prompt: Any, items: Any, options: Mapping[str, Any]) -> bytes:
        return request(kind, prompt, items, {"model": self.model, **options})

    async def _call(self, kind: type[T], name: str, body: bytes | None = None) -> T:
        url, method = self._url(name), "GET" if body is None else "POST"
        with self.failures(url):
            response = await self._http.request(method, url, content=body)
        if not response.is_success:
            raise _refused(response.status_code, response.content, url)
        answer: T = _parsed(kind, response.content, url)
        return answer

    @contextmanager
    def failures(self, url: str) -> Iterator[None]:
        """A context that turns failures of the connection into errors of this module."""
        try:
            yield
        except (httpx.TimeoutException, TimeoutError):
            got = "none" if self.timeout is None else f"none for {self.timeout:g} s"
            remedy = "Give the client a longer timeout, or see to the server."
            raise ServerGone(url, "an answer", got, remedy) from None
        except InvalidStatus as error:
            response = error.response
            raise _refused(response.status_code, bytes(response.body or b""), url) from None
        except ConnectionClosed as error:
            got = f"a closed connection ({error})"
            raise ServerGone(url, "an answer", got, "Open a new session.") from None
        except (httpx.ConnectError, OSError) as error:
            remedy = "Start one with `python -m mmkit.serve`, or check the address."
            raise ServerGone(url, "a server", f"no connection ({_cause(error)})", remedy) from None
        except (httpx.HTTPError, httpx.InvalidURL, WebSocketException) as error:
            raise ServerGone(url, "an answer", _cause(error), "See the server's log.") from None


class AsyncSession:
    """A session of `AsyncClient.session`, after it is entered.

    Attributes:
        first: the chunk after the start.
        id: the server's name of the session.
        model: the served model.
        remaining: number of tokens that still fit into the session, tokens of prompts and items
            included.
    """

    first: ChunkMessage
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
            ready = await self._answer(ReadyMessage)
            self.id, self.model = ready.session, ready.model
            self.first = await self._ask(self._start, ChunkMessage)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def next(self, items: Any = None, prompt: Any = None, **options: Any) -> ChunkMessage:
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
        return await self._ask(request(NextMessage, prompt, items, options).decode(), ChunkMessage)

    async def close(self) -> None:
        """End the session, and wait until the server has released it. Can be called again."""
        try:
            if self._open and not self._waiting:
                with suppress(MmkitError):  # the session ends in any case
                    await self._ask(_CLOSE, ClosedMessage)
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
        if expected is ClosedMessage:
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
            match message:
                case _ if isinstance(message, expected):
                    self._waiting = False
                    return message
                case TokensMessage() if self._on_tokens:
                    self._on_tokens(message)
                case ErrorMessage():
                    self._waiting, self._open = False, not message.fatal
                    raise RequestError.of(message.error)
                case ClosedMessage():
                    self._open = False
                    got = f"the end of the session ({message.reason})"
                    raise ServerGone(self._url, "an answer", got, "Open a new one.")


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

    def close(self) -> None:
        """See `AsyncClient.close`."""
        self._run(self._core.close)

    def modalities(self) -> Modalities:
        """See `AsyncClient.modalities`."""
        return self._run(self._core.modalities)

    def generate(self, prompt: Any = None, items: Any = None, **options: Any) -> Generation:
        """See `AsyncClient.generate`."""
        return self._run(self._core.generate, prompt, items, **options)

    def pool(self, prompt: Any = None, items: Any = None, **options: Any) -> Pooling:
        """See `AsyncClient.pool`."""
        return self._run(self._core.pool, prompt, items, **options)

    def stream(self, prompt: Any = None, items: Any = None, **options: Any) -> Iterator[Generation]:
        """See `AsyncClient.stream`."""
        events = self._core.stream(prompt, items, **options)
        with self._portals:
            try:
                while (event := self._run(anext, events, None)) is not None:
                    yield event
            finally:
                self._run(events.aclose)

    def session(self, prompt: Any = None, items: Any = None, **options: Any) -> Session:
        """See `AsyncClient.session`: ``with client.session(...) as session``."""
        return Session(self, self._core.session(prompt, items, **options))

    def _run(self, function: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
        with self._portals as portal:
            running = portal.start_task_soon(partial(function, *args, **options))
            try:
                return running.result()
            except BaseException:  # a wait that is interrupted
                running.cancel()
                raise


class Session:
    """`AsyncSession` with blocking calls; see there."""

    def __init__(self, client: Client, core: AsyncSession) -> None:
        self._client, self._core = client, core

    def __enter__(self) -> Self:
        with self._client._portals:
            self._client._run(self._core.__aenter__)
            self._client._portals.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
        self._client._portals.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def next(self, items: Any = None, prompt: Any = None, **options: Any) -> ChunkMessage:
        """See `AsyncSession.next`."""
        return self._client._run(self._core.next, items, prompt, **options)

    def close(self) -> None:
        """See `AsyncSession.close`."""
        self._client._run(self._core.close)


def request(kind: Any, prompt: Any, items: Any, options: Mapping[str, Any]) -> bytes:
    """A message of some kind in JSON. Options that are none of its fields are sampling parameters.

    Raises:
        InputError: a value without a form on the wire.
    """
    fields = {"prompt": prompt, "items": encode(items or {}) or None, **options}
    given = {name: value for name, value in fields.items() if value is not None}
    sampling = given.pop("sampling_params", {})
    if "sampling_params" in kind.__struct_fields__:
        others = [name for name in given if name not in kind.__struct_fields__]
        sampling = {**sampling, **{name: given.pop(name) for name in others}}
    if "messages" in given:
        given["messages"] = encoded(given["messages"], "messages")
    if "logit_bias" in sampling:  # whose ids may be scalars of numpy
        sampling["logit_bias"] = {int(token): v for token, v in sampling["logit_bias"].items()}
    tag = kind.__struct_config__.tag
    whole = {**({"type": tag} if tag else {}), **given}
    if sampling:
        whole["sampling_params"] = sampling
    return msgspec.json.encode(whole, enc_hook=_plain)


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
        return RequestError.of(msgspec.json.decode(raw, type=ErrorBody).error)
    reason = httpx.codes.get_reason_phrase(status)
    body = raw.decode(errors="replace").strip()[:_SHOWN]
    got = f"HTTP {status} {reason} {f'({body})' if body else ''}".strip()
    message = MmkitError(url, "an answer", got, _REMEDIES.get(status, ""))
    return RequestError(str(message), code=status, type=reason.replace(" ", "") or "HTTPError")
