"""A client of the server, sync and async: one request, a stream of tokens, or a session that goes on chunk by chunk.

>>> with Client("http://127.0.0.1:8000") as client:
...     client.generate([3, 1, 31, 31], {"actions": [np.zeros((2, 3), np.float32)]}, max_tokens=8).choices[0].token_ids

Neither vLLM nor the server's web framework is imported. What a request should hold is for the server to check; its
sentence becomes a `RequestError`.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any, Protocol, Self, TypedDict, TypeVar, Unpack
from urllib.parse import urlsplit

import httpx
import websockets.asyncio.client
import websockets.sync.client
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from ..errors import InputError, MmkitError
from . import protocol, wire
from .protocol import ChunkMessage, ClosedMessage, ErrorMessage, Generation, Modalities, ReadyMessage, TokensMessage

M = TypeVar("M", bound=BaseModel)

_SHOWN = 200
"""Characters of a body or message of unknown form that an error shows."""
_GOODBYE_SECONDS = 5.0
"""How long the end of a session may take."""


class _Array(Protocol):
    """Ids in an array or a tensor, (tokens,)."""

    def tolist(self) -> Any: ...


Prompt = str | Sequence[int] | _Array
"""A text, or token ids."""
OnTokens = Callable[[TokensMessage], object]


class _Choosing(TypedDict, total=False):
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logprobs: int | None
    stop_token_ids: list[int] | None
    allowed_token_ids: list[int] | None
    ignore_eos: bool | None
    skip_special_tokens: bool | None


class SamplingOptions(_Choosing, total=False):
    """The fields of `protocol.Sampling`; None, as leaving one out, takes the server's default."""

    max_tokens: int | None


class _Processing(TypedDict, total=False):
    uuids: Mapping[str, Sequence[str | None]] | None
    mm_processor_kwargs: Mapping[str, Any] | None
    cache_salt: str | None


class GenerateOptions(SamplingOptions, _Processing, total=False):
    """What a request can say besides its prompt and items.

    Attributes:
        uuids: per modality and item a name, under which the server caches the processed item.
        mm_processor_kwargs: options of the processor, for this request.
        cache_salt: requests share the prefix cache and the names of items with those of the same salt only.
        n: how many answers.
        stop: texts that end an answer.
    """

    n: int
    stop: Sequence[str] | None


class SessionOptions(_Choosing, _Processing, total=False):
    """What the start of a session can say besides its prompt, its items and `max_tokens`; it holds for all chunks.

    Attributes:
        uuids, mm_processor_kwargs, cache_salt: as in `GenerateOptions`; the uuids are of the start's items.
        stream: whether the server sends tokens as they come.
    """

    stream: bool


class RequestError(MmkitError):
    """What a server refused; the message is its sentence.

    Attributes:
        code: HTTP status.
        param: path of what is wrong in the request, as ``items.actions[3]``.
        type: the kind of error, as ``BadRequestError``.
    """

    def __init__(self, message: str, *, code: int = 400, param: str | None = None, type: str = "") -> None:
        super().__init__(message)
        self.where = param or ""
        self.code, self.param, self.type = code, param, type


class ServerGone(MmkitError):
    """No server is there, it went away or fell silent before the answer was whole, or it speaks something else."""


class Client:
    """A connection to one server.

    Args:
        base_url: http or https address, as ``http://127.0.0.1:8000``.
        api_key: the server's ``--api-key``.
        timeout: seconds without a word from the server, None for any; an answer that does not stream comes at once, so
            it is also the longest that a generation may take.
        model: name that requests carry, for servers that check it.

    Raises:
        InputError: no http address.

    Every method raises `RequestError` for what the server refuses, `ServerGone` if it is not there or stops answering,
    and `InputError` for an item that has no form on the wire.
    """

    def __init__(
        self, base_url: str, *, api_key: str | None = None, timeout: float | None = 60.0, model: str | None = None
    ) -> None:
        self._server = _Server.at(base_url, api_key, timeout, model)
        self._http = httpx.Client(headers=self._server.headers, timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connections; sessions have their own and stay."""
        self._http.close()

    def modalities(self) -> Modalities:
        """What the served model accepts, and the limits of the server."""
        url = self._server.url("modalities")
        with self._server.failures(url):
            response = self._http.get(url)
        return _answer(Modalities, response, url)

    def generate(
        self, prompt: Prompt, items: Mapping[str, Any] | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """One request, answered as a whole.

        Args:
            prompt: a text, or token ids (tokens,).
            items: as in vLLM's ``multi_modal_data``: per modality a list of items or a batch, of arrays, tensors, PIL
                images or nested lists. Shapes and dtypes are those that `modalities` tells.
            options: see `GenerateOptions` and `protocol.Sampling`.
        """
        url = self._server.url("generate")
        body = self._server.request(prompt, items, options, stream=False)
        with self._server.failures(url):
            response = self._http.post(url, content=body)
        return _answer(Generation, response, url)

    def stream(
        self, prompt: Prompt, items: Mapping[str, Any] | None = None, **options: Unpack[GenerateOptions]
    ) -> Generator[Generation, None, None]:
        """As `generate`, but yields an event for each step; the last one has the usage. The request is sent, and an
        error raised, when the first event is asked for; closing the generator ends the request."""
        url = self._server.url("generate")
        body = self._server.request(prompt, items, options, stream=True)
        events = _Events(url)
        with self._server.failures(url), self._http.stream("POST", url, content=body) as response:
            if not response.is_success:
                response.read()
                raise _refused(response.status_code, response.content, url)
            for part in response.iter_bytes():
                yield from events.feed(part)
                if events.done:
                    return
        raise events.cut()

    def session(
        self,
        prompt: Prompt | None = None,
        items: Mapping[str, Any] | None = None,
        *,
        max_tokens: int,
        on_tokens: OnTokens | None = None,
        **options: Unpack[SessionOptions],
    ) -> Session:
        """A generation that goes on with more items, chunk by chunk: ``with client.session(...) as session``.

        Args:
            prompt: what comes before the first chunk, as in `generate`.
            items: those of that prompt.
            max_tokens: the most tokens of each chunk.
            on_tokens: called with the new tokens of a chunk before it is whole; implies ``stream=True``.
            options: see `SessionOptions` and `protocol.Sampling`.
        """
        start = self._server.start(prompt, items, max_tokens, on_tokens, options)
        return Session(self._server, start, on_tokens)


class AsyncClient:
    """`Client`, with coroutines."""

    def __init__(
        self, base_url: str, *, api_key: str | None = None, timeout: float | None = 60.0, model: str | None = None
    ) -> None:
        self._server = _Server.at(base_url, api_key, timeout, model)
        self._http = httpx.AsyncClient(headers=self._server.headers, timeout=timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """See `Client.close`."""
        await self._http.aclose()

    async def modalities(self) -> Modalities:
        """See `Client.modalities`."""
        url = self._server.url("modalities")
        with self._server.failures(url):
            response = await self._http.get(url)
        return _answer(Modalities, response, url)

    async def generate(
        self, prompt: Prompt, items: Mapping[str, Any] | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """See `Client.generate`."""
        url = self._server.url("generate")
        body = self._server.request(prompt, items, options, stream=False)
        with self._server.failures(url):
            response = await self._http.post(url, content=body)
        return _answer(Generation, response, url)

    async def stream(
        self, prompt: Prompt, items: Mapping[str, Any] | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Generation, None]:
        """See `Client.stream`: ``async for event in client.stream(...)``."""
        url = self._server.url("generate")
        body = self._server.request(prompt, items, options, stream=True)
        events = _Events(url)
        with self._server.failures(url):
            async with self._http.stream("POST", url, content=body) as response:
                if not response.is_success:
                    await response.aread()
                    raise _refused(response.status_code, response.content, url)
                async for part in response.aiter_bytes():
                    for event in events.feed(part):
                        yield event
                    if events.done:
                        return
        raise events.cut()

    def session(
        self,
        prompt: Prompt | None = None,
        items: Mapping[str, Any] | None = None,
        *,
        max_tokens: int,
        on_tokens: OnTokens | None = None,
        **options: Unpack[SessionOptions],
    ) -> AsyncSession:
        """See `Client.session`: ``async with client.session(...) as session``. `on_tokens` is a plain function."""
        start = self._server.start(prompt, items, max_tokens, on_tokens, options)
        return AsyncSession(self._server, start, on_tokens)


class _Session:
    """What both kinds of session are, without any I/O."""

    first: ChunkMessage
    """The chunk that follows the start."""
    id: str
    """The server's name of the session."""
    model: str

    def __init__(self, server: _Server, start: str, on_tokens: OnTokens | None) -> None:
        self._server, self._start, self._on_tokens = server, start, on_tokens
        self._url = server.session_url
        self._open = self._waiting = False
        self._remaining = 0

    @property
    def remaining(self) -> int:
        """Tokens that still fit into the session, those of the prompt and of items among them."""
        return self._remaining

    def _connecting(self) -> dict[str, Any]:
        timeout = self._server.timeout
        return {
            "additional_headers": self._server.headers,
            "open_timeout": timeout,
            "ping_timeout": timeout,
            "close_timeout": _GOODBYE_SECONDS,
            "compression": None,  # base64 of floats hardly shrinks
            "max_size": None,
            "max_queue": None,  # a full one would hold up the end of a session
        }

    def _patience(self, most: float) -> float | None:
        """Seconds to wait for a message."""
        seconds = min(most, math.inf if self._server.timeout is None else self._server.timeout)
        return None if seconds == math.inf else seconds

    def _begin(self) -> None:
        """An answer is awaited from here on; it stays so if the wait for it is interrupted."""
        if not self._open:
            raise ServerGone(self._url, "an open session", "a closed one", "Open a new one.")
        if self._waiting:
            remedy = "Await one call before the next; open a new session if one was interrupted."
            raise InputError(self._url, "the last chunk to be whole", "another message", remedy)
        self._waiting = True

    def _take(self, raw: str | bytes, wanted: type[M]) -> M | None:
        """The answer, or None if this message is not it yet."""
        try:
            message = _MESSAGE.validate_json(raw)
        except ValidationError:
            self._open = False
            remedy = "Check that it is a server of mmkit."
            raise ServerGone(self._url, "a message of a session", repr(raw[:_SHOWN]), remedy) from None
        self._remaining = message.remaining
        if isinstance(message, wanted):
            self._waiting = False
            return message
        if isinstance(message, TokensMessage) and self._on_tokens:
            self._on_tokens(message)
        elif isinstance(message, ErrorMessage):
            self._waiting, self._open = False, not message.fatal
            raise _request_error(message.error)
        elif isinstance(message, ClosedMessage):
            self._open = False
            raise ServerGone(self._url, "an answer", f"the end of the session ({message.reason})", "Open a new one.")
        return None

    def _entered(self, ready: ReadyMessage) -> None:
        self.id, self.model = ready.session, ready.model


class Session(_Session):
    """A session of `Client.session`, once entered.

    Attributes:
        first: the chunk that follows the start.
        id: the server's name of the session.
        model: the served model.
    """

    def __init__(self, server: _Server, start: str, on_tokens: OnTokens | None) -> None:
        super().__init__(server, start, on_tokens)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            with self._server.failures(self._url):
                connection = websockets.sync.client.connect(self._url, **self._connecting())
                self._socket = self._stack.enter_context(connection)
            self._open = self._waiting = True
            self._entered(self._receive(ReadyMessage))
            self.first = self._ask(self._start, ChunkMessage)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def next(
        self,
        items: Mapping[str, Any] | None = None,
        prompt: Prompt | None = None,
        *,
        uuids: Mapping[str, Sequence[str | None]] | None = None,
        max_tokens: int | None = None,
    ) -> ChunkMessage:
        """The chunk that follows more items, more prompt, or both.

        Args:
            items: as in `Client.generate`; without a prompt, the server writes their placeholders.
            prompt: a text, or token ids (tokens,), with the placeholders of the items.
            uuids: as in `GenerateOptions`.
            max_tokens: instead of the session's.

        Raises:
            RequestError: the server refused this. The session is as it was before, unless the next call raises
                `ServerGone`.
            ServerGone: the session is over.
            InputError: an item that has no form on the wire, or the last call was interrupted.
        """
        return self._ask(_next(items, prompt, uuids, max_tokens), ChunkMessage)

    def close(self) -> None:
        """Say goodbye, and wait until the server has let go of the session. Does nothing the second time."""
        try:
            if self._open and not self._waiting:
                with suppress(MmkitError):  # over it is in any case
                    self._ask(_CLOSE, ClosedMessage, _GOODBYE_SECONDS)
        finally:
            self._open = False
            self._stack.close()

    def _ask(self, text: str, wanted: type[M], most: float = math.inf) -> M:
        self._begin()
        with suppress(ConnectionClosed):  # what the server said before is still to be read
            self._socket.send(text)
        return self._receive(wanted, most)

    def _receive(self, wanted: type[M], most: float = math.inf) -> M:
        seconds = self._patience(most)
        while True:
            try:
                with self._server.failures(self._url):
                    raw = self._socket.recv(seconds)
            except ServerGone:
                self._open = False
                raise
            if (answer := self._take(raw, wanted)) is not None:
                return answer


class AsyncSession(_Session):
    """A session of `AsyncClient.session`, once entered; see `Session`."""

    def __init__(self, server: _Server, start: str, on_tokens: OnTokens | None) -> None:
        super().__init__(server, start, on_tokens)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            with self._server.failures(self._url):
                connection = websockets.asyncio.client.connect(self._url, **self._connecting())
                self._socket = await self._stack.enter_async_context(connection)
            self._open = self._waiting = True
            self._entered(await self._receive(ReadyMessage))
            self.first = await self._ask(self._start, ChunkMessage)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def next(
        self,
        items: Mapping[str, Any] | None = None,
        prompt: Prompt | None = None,
        *,
        uuids: Mapping[str, Sequence[str | None]] | None = None,
        max_tokens: int | None = None,
    ) -> ChunkMessage:
        """See `Session.next`."""
        return await self._ask(_next(items, prompt, uuids, max_tokens), ChunkMessage)

    async def close(self) -> None:
        """See `Session.close`."""
        try:
            if self._open and not self._waiting:
                with suppress(MmkitError):
                    await self._ask(_CLOSE, ClosedMessage, _GOODBYE_SECONDS)
        finally:
            self._open = False
            await self._stack.aclose()

    async def _ask(self, text: str, wanted: type[M], most: float = math.inf) -> M:
        self._begin()
        with suppress(ConnectionClosed):
            await self._socket.send(text)
        return await self._receive(wanted, most)

    async def _receive(self, wanted: type[M], most: float = math.inf) -> M:
        seconds = self._patience(most)
        while True:
            try:
                with self._server.failures(self._url):
                    async with asyncio.timeout(seconds):
                        raw = await self._socket.recv()
            except ServerGone:
                self._open = False
                raise
            if (answer := self._take(raw, wanted)) is not None:
                return answer


# -- what both share ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Server:
    """Where a server is, and how requests to it look."""

    base: str
    headers: Mapping[str, str]
    timeout: float | None
    model: str | None

    @classmethod
    def at(cls, base_url: str, api_key: str | None, timeout: float | None, model: str | None) -> _Server:
        try:
            parts = urlsplit(base_url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # of the port or an IPv6 address
            is_address = False
        if not is_address:
            raise InputError("base_url", "an address such as http://127.0.0.1:8000", repr(base_url))
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        return cls(base_url.rstrip("/"), headers, timeout, model)

    def url(self, name: str) -> str:
        return f"{self.base}/v1/mm/{name}"

    @property
    def session_url(self) -> str:
        return f"ws{self.url('session').removeprefix('http')}"

    def request(
        self, prompt: Prompt, items: Mapping[str, Any] | None, options: GenerateOptions, *, stream: bool
    ) -> bytes:
        """Body of a generation."""
        fields = {"prompt": prompt, "items": wire.encode(items or {}), "model": self.model, **options, "stream": stream}
        return _json(fields).encode()

    def start(
        self,
        prompt: Prompt | None,
        items: Mapping[str, Any] | None,
        max_tokens: int,
        on_tokens: OnTokens | None,
        options: SessionOptions,
    ) -> str:
        """First message of a session."""
        fields = {"prompt": prompt, "items": wire.encode(items or {}), "model": self.model, **options}
        fields |= {"type": "start", "max_tokens": max_tokens}
        if on_tokens:
            fields["stream"] = True
        return _json(fields)

    @contextmanager
    def failures(self, url: str) -> Iterator[None]:
        """What goes wrong on the way, as errors of this module."""
        try:
            yield
        except (httpx.TimeoutException, TimeoutError):
            got = "none" if self.timeout is None else f"none for {self.timeout:g} s"
            raise ServerGone(url, "an answer", got, "Give the client a longer timeout, or see to the server.") from None
        except InvalidStatus as error:
            raise _refused(error.response.status_code, bytes(error.response.body or b""), url) from None
        except ConnectionClosed as error:
            raise ServerGone(url, "an answer", f"a closed connection ({error})", "Open a new session.") from None
        except (httpx.ConnectError, OSError) as error:
            remedy = "Start one with `python -m mmkit.serve`, or check the address."
            raise ServerGone(url, "a server", f"no connection ({_cause(error)})", remedy) from None
        except (httpx.HTTPError, httpx.InvalidURL, WebSocketException) as error:
            raise ServerGone(url, "an answer", _cause(error), "See the server's log.") from None


def _cause(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__


_MESSAGE: TypeAdapter[ReadyMessage | TokensMessage | ChunkMessage | ErrorMessage | ClosedMessage] = TypeAdapter(
    Annotated[
        ReadyMessage | TokensMessage | ChunkMessage | ErrorMessage | ClosedMessage, Field(discriminator="type")
    ]
)  # fmt: skip

_CLOSE = '{"type": "close"}'


def _next(
    items: Mapping[str, Any] | None,
    prompt: Prompt | None,
    uuids: Mapping[str, Sequence[str | None]] | None,
    max_tokens: int | None,
) -> str:
    encoded = wire.encode(items or {})
    return _json({"type": "next", "prompt": prompt, "items": encoded, "uuids": uuids, "max_tokens": max_tokens})


def _json(fields: Mapping[str, Any]) -> str:
    given = {name: value for name, value in fields.items() if value is not None}
    return json.dumps(given, default=_plain, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """Arrays, tensors and their scalars as numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise InputError("request", "values that JSON has", f"a {type(value).__name__}")


def _answer(model: type[M], response: httpx.Response, url: str) -> M:
    if not response.is_success:
        raise _refused(response.status_code, response.content, url)
    return _parsed(model, response.content, url)


def _parsed(model: type[M], raw: bytes, url: str) -> M:
    try:
        return model.model_validate_json(raw)
    except ValidationError:
        got = repr(raw[:_SHOWN].decode(errors="replace"))
        raise ServerGone(url, f"a {model.__name__} in JSON", got, "Check that it is a server of mmkit.") from None


def _request_error(info: protocol.ErrorInfo) -> RequestError:
    return RequestError(info.message, code=info.code, param=info.param, type=info.type)


def _refused(status: int, raw: bytes, url: str) -> RequestError:
    """The server's error; one sentence about the status where the body is none of its own."""
    with suppress(ValidationError):
        return _request_error(protocol.ErrorBody.model_validate_json(raw).error)
    reason = httpx.codes.get_reason_phrase(status)
    said: Any = raw.decode(errors="replace").strip()
    with suppress(ValueError):
        body = json.loads(said)
        if isinstance(body, dict):
            said = body.get("error") or body.get("message") or body.get("detail") or body
    said = str(said)[:_SHOWN]
    remedy = {
        401: "Give the client the server's api_key.",
        403: "Check that it is a server of mmkit, for a model with a spec.",  # what a refused websocket gets
        404: "Check that it is a server of mmkit.",
    }.get(status, "")
    told = f" {reason}" + (f" ({said})" if said and said != reason else "")
    message = MmkitError(url, "an answer", f"HTTP {status}{told.rstrip()}", remedy)
    return RequestError(str(message), code=status, type=reason.replace(" ", "") or "HTTPError")


class _Events:
    """The events of a stream, from bytes in any portions.

    httpx splits lines at U+2028 and others, too, which JSON texts may hold.
    """

    def __init__(self, url: str) -> None:
        self.done = False
        self._url, self._rest, self._count = url, b"", 0

    def feed(self, part: bytes) -> Iterator[Generation]:
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:"):
                continue
            if data == b"[DONE]":
                self.done = True
                return
            with suppress(ValidationError):
                raise _request_error(protocol.ErrorBody.model_validate_json(data).error)
            self._count += 1
            yield _parsed(Generation, data, self._url)

    def cut(self) -> ServerGone:
        """The error of a stream that ends too early."""
        got = f"its end after {self._count} events"
        return ServerGone(self._url, "[DONE] at the end of a stream", got, "See the server's log.")
