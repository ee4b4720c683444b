"""Common code of clients and sessions: the address of a server, the form of requests, and failures
of the connection as errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from ..errors import InputError, MmkitError
from . import wire
from .options import Items, Prompt
from .protocol import ErrorBody, ErrorInfo, Generation

M = TypeVar("M", bound=BaseModel)

SHOWN = 200
"""Characters of a body or message of unknown form that an error shows."""
GOODBYE_SECONDS = 5.0
"""The most seconds that the end of a session may take."""


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


@dataclass(frozen=True)
class Endpoint:
    """The address of a server, and the form of requests to it."""

    base: str
    headers: Mapping[str, str]
    timeout: float | None
    model: str | None

    @classmethod
    def at(
        cls, base_url: str, api_key: str | None, timeout: float | None, model: str | None
    ) -> Endpoint:
        if not _is_address(base_url):
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
            "close_timeout": GOODBYE_SECONDS,
            "compression": None,  # base64 of floats hardly shrinks
            "max_size": None,
            "max_queue": None,  # a full one would hold up the end of a session
        }

    def request(
        self, prompt: Prompt, items: Items, options: Mapping[str, Any], **more: Any
    ) -> bytes:
        """Body of one request."""
        return _json(prompt, items, {"model": self.model, **options, **more}).encode()

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
            raise refused(response.status_code, bytes(response.body or b""), url) from None
        except ConnectionClosed as error:
            got = f"a closed connection ({error})"
            raise ServerGone(url, "an answer", got, "Open a new session.") from None
        except (httpx.ConnectError, OSError) as error:
            remedy = "Start one with `python -m mmkit.serve`, or check the address."
            raise ServerGone(url, "a server", f"no connection ({_cause(error)})", remedy) from None
        except (httpx.HTTPError, httpx.InvalidURL, WebSocketException) as error:
            raise ServerGone(url, "an answer", _cause(error), "See the server's log.") from None


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port or an IPv6 address
        return False


def _cause(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__


def session_message(kind: str, prompt: Prompt, items: Items, options: Mapping[str, Any]) -> str:
    return _json(prompt, items, {"type": kind, **options})


def _json(prompt: Prompt, items: Items, options: Mapping[str, Any]) -> str:
    fields = {"prompt": prompt, "items": wire.encode(items or {}), **options}
    given = {name: value for name, value in fields.items() if value is not None}
    if "messages" in given:
        given["messages"] = wire.encoded(given["messages"], "messages")
    if "logit_bias" in given:  # whose ids may be scalars of numpy
        given["logit_bias"] = {_plain_id(token): v for token, v in given["logit_bias"].items()}
    return json.dumps(given, default=_plain, separators=(",", ":"))


def _plain_id(token: Any) -> Any:
    return token.__index__() if hasattr(token, "__index__") else token


def _plain(value: Any) -> Any:
    """Arrays, tensors and their scalars as numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise InputError("request", "values that JSON has", f"a {type(value).__name__}")


def parsed(model: type[M], raw: bytes, url: str) -> M:
    try:
        return model.model_validate_json(raw)
    except ValidationError:
        shown = raw[:SHOWN].decode(errors="replace")
        raise not_ours(url, f"a {model.__name__} in JSON", shown) from None


def not_ours(url: str, expected: str, got: str | bytes) -> ServerGone:
    """The error of an answer of unknown form."""
    return ServerGone(url, expected, repr(got), "Check that it is a server of mmkit.")


def request_error(info: ErrorInfo) -> RequestError:
    return RequestError(info.message, code=info.code, param=info.param, type=info.type)


_REMEDIES = {
    401: "Give the client the server's api_key.",
    # what a refused websocket gets
    403: "Check that it is a server of mmkit, for a model with a spec.",
    404: "Check that it is a server of mmkit.",
}


def refused(status: int, raw: bytes, url: str) -> RequestError:
    """The server's error; one sentence about the status where the body is none of its own."""
    with suppress(ValidationError):
        return request_error(ErrorBody.model_validate_json(raw).error)
    reason = httpx.codes.get_reason_phrase(status)
    body = raw.decode(errors="replace").strip()[:SHOWN]
    shown = f"({body})" if body else ""
    got = f"HTTP {status} {reason} {shown}".strip()
    message = MmkitError(url, "an answer", got, _REMEDIES.get(status, ""))
    return RequestError(str(message), code=status, type=reason.replace(" ", "") or "HTTPError")


class Events:
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
                raise request_error(ErrorBody.model_validate_json(data).error)
            self._count += 1
            yield parsed(Generation, data, self.url)

    def cut(self) -> ServerGone:
        """The error of a stream that ends too early."""
        got = f"its end after {self._count} events"
        return ServerGone(self.url, "[DONE] at the end of a stream", got, "See the server's log.")
