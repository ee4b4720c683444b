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
from ..language.items.values import check_unicode
from ..wire.decoding import SAMPLING_FIELD
from ..wire.items import encode
from . import protocol
from .protocol import Generation, ServerMessage

__all__ = ["Client", "RequestError", "ServerGone", "Session"]

T = TypeVar("T")

GOODBYE_SECONDS = 5.0
"""Seconds for which a client waits for the server's last message when it closes a session."""

MAX_BODY_CHARS = 200
"""Characters of an unexpected body that an error shows."""

_CLOSE = '{"type": "close"}'
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
        self.code = code
        self.param = param
        self.type = type


class ServerGone(MmkitError):
    """The server is not there, went away, or fell silent before its answer was complete."""


# -- requests --------------------------------------------------------------------------------------


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
        self._base_url = base_url.rstrip("/")
        self.timeout = timeout
        self.headers = {}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self._http = httpx.Client(headers=self.headers, timeout=timeout, limits=_CONNECTIONS)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; sessions have their own, which stay open."""
        self._http.close()

    def modalities(self) -> protocol.Modalities:
        """Return the modalities and outputs of the served model, and the limits of the server."""
        return self._request(protocol.Modalities, "GET", "modalities")

    def generate(self, prompt: Any = None, items: Any = None, **options: Any) -> Generation:
        """Send one request, and return its whole answer.

        Args:
            prompt: a text, or token ids (tokens,).
            items: as in vLLM's ``multi_modal_data``: per modality a list of items or a batch, of
                arrays, tensors, PIL images or nested lists. `modalities` has their shapes and
                dtypes.
            options: fields of `protocol.GenerateRequest`, and of vLLM's `SamplingParams`.
        """
        body = build_request(protocol.GenerateRequest, prompt, items, options)
        return self._request(Generation, "POST", "generate", body)

    def stream(self, prompt: Any = None, items: Any = None, **options: Any) -> Iterator[Generation]:
        """Send one request, and yield its answer as it grows; the last event has the usage.

        The first event sends the request and raises its error; closing the generator ends the
        request. For the arguments, see `generate`.
        """
        options["stream"] = True
        body = build_request(protocol.GenerateRequest, prompt, items, options)
        with self._open_response("POST", "generate", body) as response:
            url = str(response.url)
            for data in _iterate_events(response):
                if data == b"[DONE]":
                    return
                error = _parse_error(data)
                if error is not None:
                    raise error
                yield _parse_answer(Generation, data, url)
        raise ServerGone(url, "[DONE] at the end of a stream", "none", "See the server's log.")

    def session(self, prompt: Any = None, items: Any = None, **options: Any) -> Session:
        """Open a session: a generation that continues with more items, chunk by chunk.

        For example ``with client.session(...) as session``.

        Args:
            prompt: the prompt of the first chunk, as in `generate`.
            items: the items of that prompt.
            options: fields of `protocol.StartMessage`, and of vLLM's `SamplingParams`, of which
                `max_tokens` is required without an `output`; and `on_tokens`, a function, called
                with the new tokens of a chunk before the chunk is complete.
        """
        on_tokens = options.pop("on_tokens", None)
        if on_tokens:
            options["stream"] = True
        start = build_request(protocol.StartMessage, prompt, items, options).decode()
        url = self._make_url("session").removeprefix("http")
        return Session(self, f"ws{url}", start, on_tokens)

    def _make_url(self, route: str) -> str:
        return f"{self._base_url}/v1/mm/{route}"

    def _request(self, kind: type[T], method: str, route: str, body: bytes = b"") -> T:
        """Send a request, and return its answer as a value of some type."""
        with self._open_response(method, route, body) as response:
            answer: T = _parse_answer(kind, response.read(), self._make_url(route))
        return answer

    @contextmanager
    def _open_response(self, method: str, route: str, body: bytes) -> Iterator[httpx.Response]:
        """Send a request; the answer is to be read within the block."""
        url = self._make_url(route)
        with self.convert_errors(url), self._http.stream(method, url, content=body) as response:
            if not response.is_success:
                raise _make_refusal(response.status_code, response.read(), url)
            yield response

    @contextmanager
    def convert_errors(self, url: str) -> Iterator[None]:
        """Turn failures of the connection within the block into errors of this module."""
        try:
            yield
        except InvalidStatus as error:
            response = error.response
            raise _make_refusal(response.status_code, bytes(response.body or b""), url) from None
        except (httpx.HTTPError, httpx.InvalidURL, WebSocketException, OSError) as error:
            got = f"{type(error).__name__} ({str(error).rstrip('.')})"
            remedy = "See if the server runs, and its log."
            raise ServerGone(url, "an answer", got, remedy) from None


# -- sessions --------------------------------------------------------------------------------------


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
        self._client = client
        self._url = url
        self._on_tokens = on_tokens
        self._is_idle = False
        self.remaining = 0
        timeout = client.timeout
        with client.convert_errors(url):
            self._socket: Any = connect(
                url,
                additional_headers=client.headers,
                open_timeout=timeout,
                ping_timeout=timeout,
                close_timeout=GOODBYE_SECONDS,
                compression=None,  # base64 of floats hardly shrinks
                max_size=None,
                max_queue=None,  # a full one would hold up the end of a session
            ).__enter__()
        try:
            ready = self._receive(protocol.ReadyMessage, timeout)
            self.id = ready.session
            self.model = ready.model
            self.first = self._request(start, protocol.ChunkMessage, timeout)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *error: object) -> None:
        self.close()

    def next(self, items: Any = None, prompt: Any = None, **options: Any) -> protocol.ChunkMessage:
        """Send more items, more prompt, or both, and return the next chunk.

        Args:
            items: as in `Client.generate`; without a prompt, the server writes their targets.
            prompt: a text, or token ids (tokens,), with the targets of the items.
            options: fields of `protocol.NextMessage`, and `max_tokens`.

        Raises:
            RequestError: the server refused the message. The session is as it was before, unless
                the next call raises `ServerGone`.
            ServerGone: the session is over.
            InputError: an item has no form on the wire.
        """
        message = build_request(protocol.NextMessage, prompt, items, options).decode()
        return self._request(message, protocol.ChunkMessage, self._client.timeout)

    def close(self) -> None:
        """End the session, and wait until the server has released it.

        It can be called again.
        """
        with self._socket, suppress(MmkitError):  # the session ends in any case
            self._request(_CLOSE, protocol.ClosedMessage, GOODBYE_SECONDS)

    def _request(self, text: str, expected: type[T], seconds: float | None) -> T:
        """Send a message, and return the message of the server after which the session is idle."""
        if not self._is_idle:
            idle = "a session whose last chunk is whole"
            raise ServerGone(self._url, idle, "another", "Open a new one.")
        # If the wait is interrupted, the answer is still to come, and no later call may get it.
        self._is_idle = False
        with suppress(ConnectionClosed):  # the server's last messages are still to be read
            self._socket.send(text)
        return self._receive(expected, seconds)

    def _receive(self, expected: type[T], seconds: float | None) -> T:
        """Return the next message of a type; tokens go to the caller's function."""
        while True:
            with self._client.convert_errors(self._url):
                text = self._socket.recv(seconds)
                message: Any = _parse_answer(ServerMessage, text, self._url)
            self.remaining = message.remaining
            if isinstance(message, expected):
                self._is_idle = True
                return message
            if isinstance(message, protocol.TokensMessage) and self._on_tokens:
                self._on_tokens(message)
            elif isinstance(message, protocol.ErrorMessage):
                self._is_idle = not message.fatal
                raise _make_request_error(message.error)
            elif isinstance(message, protocol.ClosedMessage):
                got = f"the end of the session ({message.reason})"
                raise ServerGone(self._url, "an answer", got, "Open a new one.")


# -- JSON ------------------------------------------------------------------------------------------


def build_request(kind: Any, prompt: Any, items: Any, options: Mapping[str, Any]) -> bytes:
    """Return a message of some type in JSON.

    Args:
        kind: the type, of `mmkit.serve.protocol`.
        prompt: a text, or token ids; None without one.
        items: as for `encode`; None without any.
        options: fields of the message. Others are sampling parameters; None is left out.

    Raises:
        InputError: a value has no form on the wire.
    """
    fields: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    if isinstance(prompt, str):
        check_unicode(prompt, "prompt")
    if prompt is not None:
        fields["prompt"] = prompt
    if items:
        fields["items"] = encode(items)
    for name, value in options.items():
        if value is None:
            continue
        if name in kind.__struct_fields__:
            fields[name] = value
        else:
            sampling[name] = value
    sampling = {**fields.pop(SAMPLING_FIELD, {}), **sampling}
    if sampling:
        fields[SAMPLING_FIELD] = sampling
    tag = kind.__struct_config__.tag
    if tag:
        fields["type"] = tag
    return msgspec.json.encode(fields, enc_hook=_convert_array)


def _convert_array(value: Any) -> Any:
    """Return an array, a tensor or a scalar of one as numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise InputError("request", "values that JSON has", f"a {type(value).__name__}")


def _iterate_events(response: httpx.Response) -> Iterator[bytes]:
    """Yield the data of each server-sent event.

    httpx's own lines would end at U+2028 and others, too, which texts in JSON may hold.
    """
    remainder = b""
    for part in response.iter_bytes():
        lines = (remainder + part).split(b"\n")
        remainder = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()


def _parse_answer(kind: Any, raw: bytes | str, url: str) -> Any:
    """Return what the server sent as a value of some type.

    Raises:
        ServerGone: it is another server, or its answer is cut.
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        expected = f"a {getattr(kind, '__name__', 'message of a session')} in JSON"
        raise ServerGone(url, expected, repr(raw[:MAX_BODY_CHARS]), _REMEDY) from None


def _parse_error(raw: bytes) -> RequestError | None:
    """Return the error in a body or an event; None where there is none."""
    try:
        body = msgspec.json.decode(raw, type=protocol.ErrorBody)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return _make_request_error(body.error)


def _make_request_error(error: protocol.ErrorInfo) -> RequestError:
    return RequestError(error.message, code=error.code, param=error.param, type=error.type)


def _make_refusal(status: int, raw: bytes, url: str) -> RequestError:
    """Return the server's error; where the body has none, one sentence about the status."""
    error = _parse_error(raw)
    if error is not None:
        return error
    reason = httpx.codes.get_reason_phrase(status)
    got = f"HTTP {status} {reason}".rstrip()
    body = raw.decode(errors="replace").strip()[:MAX_BODY_CHARS]
    if body:
        got = f"{got} ({body})"
    message = str(MmkitError(url, "an answer", got, _REMEDY))
    return RequestError(message, code=status, type=reason.replace(" ", ""))
