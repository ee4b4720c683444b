"""A client of the server: single requests, streams, and sessions in chunks.

>>> with Client("http://127.0.0.1:8000") as client:
...     answer = client.generate([3, 1, 31, 31], {"actions": [np.zeros((2, 3), np.float32)]})
...     answer.choices[0].token_ids

Its calls block; asynchronous callers ask the routes by any HTTP client, with `mmkit.serve.encode`
for the items. This module imports neither vLLM nor the server's web framework. The server checks
requests; its sentence becomes a `RequestError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

import httpx
import msgspec
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import connect

from ..errors import InputError, MmkitError
from . import protocol
from .protocol import Generation, ServerMessage
from .wire import encode

__all__ = ["Client", "RequestError", "ServerGone", "Session"]

T = TypeVar("T")
_CLOSE = '{"type": "close"}'
_GOODBYE_SECONDS = 5.0
_SHOWN = 200
_REMEDY = "Check the api_key, and that it is a server of mmkit for a model with a spec."
# A connection for each request: vLLM's server closes idle ones after 5 s, and on a busy machine a
# request on a kept one meets that moment and is lost.
_CONNECTIONS = httpx.Limits(max_connections=100, max_keepalive_connections=0)


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


class ServerGone(MmkitError):
    """No server of mmkit at the address, or one that went away or fell silent before the answer was
    complete."""


class Client(AbstractContextManager["Client"]):
    """A connection to one server.

    Args:
        base_url: http or https address, for example ``http://127.0.0.1:8000``.
        api_key: the server's ``--api-key``.
        timeout: the most seconds without data from the server; None for no limit. An answer that
            does not stream comes at once, so the timeout also limits the time of a generation.

    Every method raises `RequestError` if the server refuses the request, `ServerGone` if the server
    is not there or stops answering, and `InputError` for an item without a form on the wire.
    """

    def __init__(
        self, base_url: str, *, api_key: str | None = None, timeout: float | None = 60.0
    ) -> None:
        self._base, self.timeout = base_url.rstrip("/"), timeout
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(headers=self.headers, timeout=timeout, limits=_CONNECTIONS)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; sessions have their own, which stay open."""
        self._http.close()

    def modalities(self) -> protocol.Modalities:
        """The modalities and outputs of the served model, and the limits of the server."""
        return self._ask(protocol.Modalities, "GET", "modalities")

    def generate(self, prompt: Any = None, items: Any = None, **options: Any) -> Generation:
        """One request, answered as a whole.

        Args:
            prompt: a text, or token ids (tokens,).
            items: as in vLLM's ``multi_modal_data``: per modality a list of items or a batch, of
                arrays, tensors, PIL images or nested lists. `modalities` has their shapes and
                dtypes.
            options: fields of `protocol.GenerateRequest`, and of vLLM's `SamplingParams`.
        """
        body = build_request(protocol.GenerateRequest, prompt, items, options)
        return self._ask(Generation, "POST", "generate", body)

    def stream(self, prompt: Any = None, items: Any = None, **options: Any) -> Iterator[Generation]:
        """`generate` as a stream: yields an event per step; the last one has the usage. The first
        one sends the request and raises its error; closing the generator ends the request."""
        body = build_request(protocol.GenerateRequest, prompt, items, {**options, "stream": True})
        with self._answer("POST", "generate", body) as response:
            url, rest = str(response.url), b""
            for part in response.iter_bytes():
                # httpx splits lines at U+2028 and others, too, which JSON texts may hold
                *lines, rest = (rest + part).split(b"\n")
                for data in (line[5:].strip() for line in lines if line[:5] == b"data:"):
                    if data == b"[DONE]":
                        return
                    if error := _told(data):
                        raise error
                    yield _parsed(Generation, data, url)
        raise ServerGone(url, "[DONE] at the end of a stream", "none", "See the server's log.")

    def session(self, prompt: Any = None, items: Any = None, **options: Any) -> Session:
        """A generation that continues with more items, chunk by chunk: ``with client.session(...)
        as session``.

        Args:
            prompt: the prompt of the first chunk, as in `generate`.
            items: the items of that prompt.
            options: fields of `protocol.StartMessage`, and of vLLM's `SamplingParams`, of which
                `max_tokens` is required without an `output`; and `on_tokens`, a function, called
                with the new tokens of a chunk before the chunk is complete.
        """
        if on_tokens := options.pop("on_tokens", None):
            options["stream"] = True
        start = build_request(protocol.StartMessage, prompt, items, options).decode()
        return Session(self, f"ws{self._url('session')[4:]}", start, on_tokens)

    def _url(self, name: str) -> str:
        return f"{self._base}/v1/mm/{name}"

    def _ask(self, kind: type[T], method: str, name: str, body: bytes = b"") -> T:
        with self._answer(method, name, body) as response:
            answer: T = _parsed(kind, response.read(), self._url(name))
        return answer

    @contextmanager
    def _answer(self, method: str, name: str, body: bytes) -> Iterator[httpx.Response]:
        """The answer to a request, which is to be read while the block runs."""
        url = self._url(name)
        with self.failures(url), self._http.stream(method, url, content=body) as response:
            if not response.is_success:
                raise _refused(response.status_code, response.read(), url)
            yield response

    @contextmanager
    def failures(self, url: str) -> Iterator[None]:
        """A context that turns failures of the connection into errors of this module."""
        try:
            yield
        except InvalidStatus as error:
            response = error.response
            raise _refused(response.status_code, bytes(response.body or b""), url) from None
        except (httpx.HTTPError, httpx.InvalidURL, WebSocketException, OSError) as error:
            got = f"{type(error).__name__} ({str(error).rstrip('.')})"
            remedy = "See if the server runs, and its log."
            raise ServerGone(url, "an answer", got, remedy) from None


class Session(AbstractContextManager["Session"]):
    """A session of `Client.session`.

    Attributes:
        first: the chunk after the start.
        id: the server's name of the session.
        model: the served model.
        remaining: number of tokens that still fit into the session, tokens of prompts and items
            included.
    """

    def __init__(
        self, client: Client, url: str, start: str, on_tokens: Callable[[Any], object] | None
    ) -> None:
        self._client, self._url, self._on_tokens = client, url, on_tokens
        self._is_idle, self.remaining, timeout = False, 0, client.timeout
        with client.failures(url):
            self._socket: Any = connect(
                url,
                additional_headers=client.headers,
                open_timeout=timeout,
                ping_timeout=timeout,
                close_timeout=_GOODBYE_SECONDS,
                compression=None,  # base64 of floats hardly shrinks
                max_size=None,
                max_queue=None,  # a full one would hold up the end of a session
            ).__enter__()
        try:
            ready = self._answer(protocol.ReadyMessage, timeout)
            self.id, self.model = ready.session, ready.model
            self.first = self._ask(start, protocol.ChunkMessage, timeout)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *error: object) -> None:
        self.close()

    def next(self, items: Any = None, prompt: Any = None, **options: Any) -> protocol.ChunkMessage:
        """Send more items, more prompt, or both, and return the next chunk.

        Args:
            items: as in `Client.generate`; without a prompt, the server writes their placeholders.
            prompt: a text, or token ids (tokens,), with the placeholders of the items.
            options: fields of `protocol.NextMessage`, and `max_tokens`.

        Raises:
            RequestError: the server refused the message. The session is as it was before, unless
                the next call raises `ServerGone`.
            ServerGone: the session is over.
            InputError: an item without a form on the wire.
        """
        message = build_request(protocol.NextMessage, prompt, items, options).decode()
        return self._ask(message, protocol.ChunkMessage, self._client.timeout)

    def close(self) -> None:
        """End the session, and wait until the server has released it. Can be called again."""
        with self._socket, suppress(MmkitError):  # the session ends in any case
            self._ask(_CLOSE, protocol.ClosedMessage, _GOODBYE_SECONDS)

    def _ask(self, text: str, expected: type[T], seconds: float | None) -> T:
        if not self._is_idle:
            at_rest = "a session whose last chunk is whole"
            raise ServerGone(self._url, at_rest, "another", "Open a new one.")
        self._is_idle = False  # also after a wait that was interrupted
        with suppress(ConnectionClosed):  # the server's last messages are still to be read
            self._socket.send(text)
        return self._answer(expected, seconds)

    def _answer(self, expected: type[T], seconds: float | None) -> T:
        while True:
            with self._client.failures(self._url):
                message: Any = _parsed(ServerMessage, self._socket.recv(seconds), self._url)
            self.remaining = message.remaining
            if isinstance(message, expected):
                self._is_idle = True
                return message
            if isinstance(message, protocol.TokensMessage) and self._on_tokens:
                self._on_tokens(message)
            elif isinstance(message, protocol.ErrorMessage):
                self._is_idle = not message.fatal
                raise RequestError(**msgspec.structs.asdict(message.error))
            elif isinstance(message, protocol.ClosedMessage):
                got = f"the end of the session ({message.reason})"
                raise ServerGone(self._url, "an answer", got, "Open a new one.")


# -- JSON ------------------------------------------------------------------------------------------


def build_request(kind: Any, prompt: Any, items: Any, options: Mapping[str, Any]) -> bytes:
    """A message of some kind in JSON. Options that are none of its fields are sampling parameters.

    Raises:
        InputError: a value without a form on the wire.
    """
    fields = {"prompt": prompt, "items": encode(items or {}) or None, **options}
    given = {name: value for name, value in fields.items() if value is not None}
    known = kind.__struct_fields__
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


def _parsed(kind: Any, raw: bytes | str, url: str) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        expected = f"a {getattr(kind, '__name__', 'message of a session')} in JSON"
        raise ServerGone(url, expected, repr(raw[:_SHOWN]), _REMEDY) from None


def _told(raw: bytes) -> RequestError | None:
    """The error that a server tells, if it does."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        told = msgspec.json.decode(raw, type=protocol.ErrorBody).error
        return RequestError(**msgspec.structs.asdict(told))
    return None


def _refused(status: int, raw: bytes, url: str) -> RequestError:
    """The server's error; one sentence about the status where the body is none of its own."""
    reason = httpx.codes.get_reason_phrase(status)
    body = raw.decode(errors="replace").strip()[:_SHOWN]
    got = f"HTTP {status} {reason} {f'({body})' if body else ''}".strip()
    message = MmkitError(url, "an answer", got, _REMEDY)
    return _told(raw) or RequestError(str(message), code=status, type=reason.replace(" ", ""))
