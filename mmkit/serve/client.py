"""A client of the server, sync and async: one request, a stream, or a session that goes on chunk by
chunk.

>>> with Client("http://127.0.0.1:8000") as client:
...     answer = client.generate([3, 1, 31, 31], {"actions": [np.zeros((2, 3), np.float32)]})
...     answer.choices[0].token_ids

Neither vLLM nor the server's web framework is imported. What a request should hold is for the
server to check; its sentence becomes a `RequestError`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import isawaitable
from typing import Annotated, Any, ClassVar, Protocol, Required, Self, TypedDict, TypeVar, Unpack
from urllib.parse import urlsplit

import httpx
import websockets.asyncio.client
import websockets.sync.client
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from ..errors import InputError, MmkitError
from . import wire
from .protocol import (
    ChunkMessage,
    ClosedMessage,
    ErrorBody,
    ErrorInfo,
    ErrorMessage,
    Generation,
    Modalities,
    ReadyMessage,
    TokensMessage,
)

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

_SHOWN = 200
"""Characters of a body or message of unknown form that an error shows."""
_GOODBYE_SECONDS = 5.0
"""How long the end of a session may take."""


class _Array(Protocol):
    """Ids in an array or a tensor, (tokens,)."""

    def tolist(self) -> Any: ...


Prompt = str | Sequence[int] | _Array | None
"""A text, or token ids; None where a session needs neither."""
Items = Mapping[str, Any] | None
"""Per modality a list of items or a batch, as in vLLM's ``multi_modal_data``."""
Uuids = Mapping[str, Sequence[str | None]] | None
"""Per modality and item a name, under which the server caches the processed item."""
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
    uuids: Uuids
    mm_processor_kwargs: Mapping[str, Any] | None
    cache_salt: str | None


class GenerateOptions(SamplingOptions, _Processing, total=False):
    """What a request can say besides its prompt and items.

    Attributes:
        uuids: per modality and item a name, under which the server caches the processed item.
        mm_processor_kwargs: options of the processor, for this request.
        cache_salt: requests share the prefix cache and the names of items with those of the same
            salt only.
        n: how many answers.
        stop: texts that end an answer.
    """

    n: int
    stop: Sequence[str] | None


class SessionOptions(_Choosing, _Processing, total=False):
    """What the start of a session can say besides its prompt and its items; it holds for all
    chunks.

    Attributes:
        max_tokens: the most tokens of each chunk.
        uuids, mm_processor_kwargs, cache_salt: as in `GenerateOptions`; the uuids are of the
            start's items.
        stream: whether the server sends tokens as they come.
        on_tokens: a plain function, called with the new tokens of a chunk before it is whole;
            implies ``stream=True``.
    """

    max_tokens: Required[int]
    stream: bool
    on_tokens: OnTokens | None


class NextOptions(TypedDict, total=False):
    """What one step of a session can say besides its prompt and its items.

    Attributes:
        uuids: as in `GenerateOptions`.
        max_tokens: instead of the session's.
    """

    uuids: Uuids
    max_tokens: int | None


class RequestError(MmkitError):
    """What a server refused; the message is its sentence.

    Attributes:
        code: HTTP status.
        param: path of what is wrong in the request, as ``items.actions[3]``.
        type: the kind of error, as ``BadRequestError``.
    """

    def __init__(
        self, message: str, *, code: int = 400, param: str | None = None, type: str = ""
    ) -> None:
        super().__init__(message)
        self.where = param or ""
        self.code, self.param, self.type = code, param, type


class ServerGone(MmkitError):
    """No server, one that went away or fell silent before the answer was whole, or another one."""


class _Client:
    """What both clients are: coroutines that suspend where the I/O does, which is nowhere in
    `Client`."""

    _http_class: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float | None = 60.0,
        model: str | None = None,
    ) -> None:
        self._server = _Server.at(base_url, api_key, timeout, model)
        self._http = self._http_class(headers=self._server.headers, timeout=timeout)

    async def _call(self, model: type[M], name: str, body: bytes | None = None) -> M:
        url = self._server.url(name)
        method = "GET" if body is None else "POST"
        with self._server.failures(url):
            response = await _settled(self._http.request(method, url, content=body))
        if not response.is_success:
            raise _refused(response.status_code, response.content, url)
        return _parsed(model, response.content, url)

    def _streaming(self, *request: Any) -> tuple[_Events, Any]:
        """The reader of a stream, and the response to open."""
        url = self._server.url("generate")
        body = self._server.request(*request, stream=True)
        return _Events(url), self._http.stream("POST", url, content=body)


class Client(_Client):
    """A connection to one server.

    Args:
        base_url: http or https address, as ``http://127.0.0.1:8000``.
        api_key: the server's ``--api-key``.
        timeout: seconds without a word from the server, None for any; an answer that does not
            stream comes at once, so it is also the longest that a generation may take.
        model: name that requests carry, for servers that check it.

    Raises:
        InputError: no http address.

    Every method raises `RequestError` for what the server refuses, `ServerGone` if it is not there
    or stops answering, and `InputError` for an item that has no form on the wire.
    """

    _http_class = httpx.Client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connections; sessions have their own and stay."""
        self._http.close()

    def modalities(self) -> Modalities:
        """What the served model accepts, and the limits of the server."""
        return _run(self._call(Modalities, "modalities"))

    def generate(
        self, prompt: Prompt, items: Items = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """One request, answered as a whole.

        Args:
            prompt: a text, or token ids (tokens,).
            items: as in vLLM's ``multi_modal_data``: per modality a list of items or a batch, of
                arrays, tensors, PIL images or nested lists. Shapes and dtypes are those that
                `modalities` tells.
            options: see `GenerateOptions` and `protocol.Sampling`.
        """
        body = self._server.request(prompt, items, options, stream=False)
        return _run(self._call(Generation, "generate", body))

    def stream(
        self, prompt: Prompt, items: Items = None, **options: Unpack[GenerateOptions]
    ) -> Generator[Generation, None, None]:
        """As `generate`, but yields an event for each step; the last one has the usage. The request
        is sent, and an error raised, when the first event is asked for; closing the generator ends
        the request."""
        events, opening = self._streaming(prompt, items, options)
        with self._server.failures(events.url), opening as response:
            if not response.is_success:
                raise _refused(response.status_code, response.read(), events.url)
            for part in response.iter_bytes():
                yield from events.feed(part)
                if events.done:
                    return
        raise events.cut()

    def session(
        self, prompt: Prompt = None, items: Items = None, **options: Unpack[SessionOptions]
    ) -> Session:
        """A generation that goes on with more items, chunk by chunk: ``with client.session(...) as
        session``.

        Args:
            prompt: what comes before the first chunk, as in `generate`.
            items: those of that prompt.
            options: `max_tokens`, and more: see `SessionOptions` and `protocol.Sampling`.
        """
        return Session(self._server, prompt, items, options)


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
        self, prompt: Prompt, items: Items = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """See `Client.generate`."""
        body = self._server.request(prompt, items, options, stream=False)
        return await self._call(Generation, "generate", body)

    async def stream(
        self, prompt: Prompt, items: Items = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Generation, None]:
        """See `Client.stream`: ``async for event in client.stream(...)``."""
        events, opening = self._streaming(prompt, items, options)
        with self._server.failures(events.url):
            async with opening as response:
                if not response.is_success:
                    raise _refused(response.status_code, await response.aread(), events.url)
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
        return AsyncSession(self._server, prompt, items, options)


class _Session:
    """What both kinds of session are, as `_Client` is for the clients."""

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
        self, server: _Server, prompt: Prompt, items: Items, options: SessionOptions
    ) -> None:
        self._server, self._url = server, server.session_url
        self._on_tokens = options.pop("on_tokens", None)
        if self._on_tokens:
            options["stream"] = True
        self._start = _message("start", prompt, items, {"model": server.model, **options})
        self._socket: Any = None
        self._open = self._waiting = False

    async def _enter(self) -> None:
        try:
            with self._server.failures(self._url):
                self._socket = await _settled(self._connect(self._url, **self._server.connecting()))
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
                with suppress(MmkitError):  # over it is in any case
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
        self._waiting = True  # it stays so if the wait for the answer is interrupted
        with suppress(ConnectionClosed):  # what the server said before is still to be read
            await _settled(self._socket.send(text))
        return await self._answer(expected)

    async def _answer(self, expected: type[M]) -> M:
        seconds = self._server.timeout
        if expected is ClosedMessage:
            seconds = min(seconds or _GOODBYE_SECONDS, _GOODBYE_SECONDS)
        while True:
            try:
                with self._server.failures(self._url):
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
            remedy = "Check that it is a server of mmkit."
            raise ServerGone(
                self._url, "a message of a session", repr(raw[:_SHOWN]), remedy
            ) from None
        self.remaining = message.remaining
        if isinstance(message, expected):
            self._waiting = False
            return message
        if isinstance(message, TokensMessage) and self._on_tokens:
            self._on_tokens(message)
        elif isinstance(message, ErrorMessage):
            self._waiting, self._open = False, not message.fatal
            raise _request_error(message.error)
        elif isinstance(message, ClosedMessage):
            self._open = False
            got = f"the end of the session ({message.reason})"
            raise ServerGone(self._url, "an answer", got, "Open a new one.")
        return None


class Session(_Session):
    """A session of `Client.session`, once entered.

    Attributes:
        first: the chunk that follows the start.
        id: the server's name of the session.
        model: the served model.
        remaining: tokens that still fit into the session, those of the prompt and of items among
            them.
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
        """The chunk that follows more items, more prompt, or both.

        Args:
            items: as in `Client.generate`; without a prompt, the server writes their placeholders.
            prompt: a text, or token ids (tokens,), with the placeholders of the items.
            options: see `NextOptions`.

        Raises:
            RequestError: the server refused this. The session is as it was before, unless the next
                call raises `ServerGone`.
            ServerGone: the session is over.
            InputError: an item that has no form on the wire, or the last call was interrupted.
        """
        return _run(self._ask(_message("next", prompt, items, options), ChunkMessage))

    def close(self) -> None:
        """Say goodbye, and wait until the server has let go of the session. Does nothing the second
        time."""
        _run(self._leave())


class AsyncSession(_Session):
    """A session of `AsyncClient.session`, once entered; see `Session`."""

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
        return await self._ask(_message("next", prompt, items, options), ChunkMessage)

    async def close(self) -> None:
        """See `Session.close`."""
        await self._leave()


# -- what both share -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Server:
    """Where a server is, and how requests to it look."""

    base: str
    headers: Mapping[str, str]
    timeout: float | None
    model: str | None

    @classmethod
    def at(
        cls, base_url: str, api_key: str | None, timeout: float | None, model: str | None
    ) -> _Server:
        try:
            parts = urlsplit(base_url)
            is_address = (
                parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            )
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

    def connecting(self) -> dict[str, Any]:
        """Options of a websocket."""
        return {
            "additional_headers": self.headers,
            "open_timeout": self.timeout,
            "ping_timeout": self.timeout,
            "close_timeout": _GOODBYE_SECONDS,
            "compression": None,  # base64 of floats hardly shrinks
            "max_size": None,
            "max_queue": None,  # a full one would hold up the end of a session
        }

    def request(
        self, prompt: Prompt, items: Items, options: GenerateOptions, *, stream: bool
    ) -> bytes:
        """Body of a generation."""
        fields = {"prompt": prompt, "items": wire.encode(items or {}), "model": self.model}
        return _json({**fields, **options, "stream": stream}).encode()

    @contextmanager
    def failures(self, url: str) -> Iterator[None]:
        """What goes wrong on the way, as errors of this module."""
        try:
            yield
        except (httpx.TimeoutException, TimeoutError):
            got = "none" if self.timeout is None else f"none for {self.timeout:g} s"
            raise ServerGone(
                url, "an answer", got, "Give the client a longer timeout, or see to the server."
            ) from None
        except InvalidStatus as error:
            raise _refused(
                error.response.status_code, bytes(error.response.body or b""), url
            ) from None
        except ConnectionClosed as error:
            raise ServerGone(
                url, "an answer", f"a closed connection ({error})", "Open a new session."
            ) from None
        except (httpx.ConnectError, OSError) as error:
            remedy = "Start one with `python -m mmkit.serve`, or check the address."
            raise ServerGone(url, "a server", f"no connection ({_cause(error)})", remedy) from None
        except (httpx.HTTPError, httpx.InvalidURL, WebSocketException) as error:
            raise ServerGone(url, "an answer", _cause(error), "See the server's log.") from None


def _cause(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__


_Message = ReadyMessage | TokensMessage | ChunkMessage | ErrorMessage | ClosedMessage
_MESSAGE: TypeAdapter[_Message] = TypeAdapter(Annotated[_Message, Field(discriminator="type")])
_CLOSE = '{"type": "close"}'


def _message(kind: str, prompt: Prompt, items: Items, options: Mapping[str, Any]) -> str:
    return _json({"type": kind, "prompt": prompt, "items": wire.encode(items or {}), **options})


def _json(fields: Mapping[str, Any]) -> str:
    given = {name: value for name, value in fields.items() if value is not None}
    return json.dumps(given, default=_plain, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """Arrays, tensors and their scalars as numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise InputError("request", "values that JSON has", f"a {type(value).__name__}")


def _parsed(model: type[M], raw: bytes, url: str) -> M:
    try:
        return model.model_validate_json(raw)
    except ValidationError:
        got = repr(raw[:_SHOWN].decode(errors="replace"))
        raise ServerGone(
            url, f"a {model.__name__} in JSON", got, "Check that it is a server of mmkit."
        ) from None


def _request_error(info: ErrorInfo) -> RequestError:
    return RequestError(info.message, code=info.code, param=info.param, type=info.type)


_REMEDIES = {
    401: "Give the client the server's api_key.",
    # what a refused websocket gets
    403: "Check that it is a server of mmkit, for a model with a spec.",
    404: "Check that it is a server of mmkit.",
}


def _refused(status: int, raw: bytes, url: str) -> RequestError:
    """The server's error; one sentence about the status where the body is none of its own."""
    with suppress(ValidationError):
        return _request_error(ErrorBody.model_validate_json(raw).error)
    reason = httpx.codes.get_reason_phrase(status)
    body = raw.decode(errors="replace").strip()[:_SHOWN]
    shown = f"({body})" if body else ""
    got = f"HTTP {status} {reason} {shown}".strip()
    message = MmkitError(url, "an answer", got, _REMEDIES.get(status, ""))
    return RequestError(str(message), code=status, type=reason.replace(" ", "") or "HTTPError")


class _Events:
    """The events of a stream, from bytes in any portions.

    httpx splits lines at U+2028 and others, too, which JSON texts may hold.
    """

    def __init__(self, url: str) -> None:
        self.url, self.done = url, False
        self._rest, self._count = b"", 0

    def feed(self, part: bytes) -> Iterator[Generation]:
        *lines, self._rest = (self._rest + part).split(b"\n")
        for data in (line[5:].strip() for line in lines if line.startswith(b"data:")):
            if data == b"[DONE]":
                self.done = True
                return
            with suppress(ValidationError):
                raise _request_error(ErrorBody.model_validate_json(data).error)
            self._count += 1
            yield _parsed(Generation, data, self.url)

    def cut(self) -> ServerGone:
        """The error of a stream that ends too early."""
        got = f"its end after {self._count} events"
        return ServerGone(self.url, "[DONE] at the end of a stream", got, "See the server's log.")


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine whose I/O blocks, so that it never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("a blocking call that suspends")


async def _settled(value: Any) -> Any:
    """What a call of either kind of library comes to."""
    return await value if isawaitable(value) else value
