"""Refusals as clients see them, and metrics beside vLLM's at the server's ``/metrics``."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from http import HTTPStatus
from traceback import walk_tb
from typing import Any, NamedTuple

import msgspec
from fastapi.responses import Response
from prometheus_client import Counter, Gauge

from ..errors import InputError, write_message
from ..plan.plan import Plan
from ..vllm_api.errors import FAULT, ServerFault
from ..wire.decoding import SAMPLING_FIELD
from ..wire.limits import TooLarge
from .engine import SAMPLING_NAMES, EngineDeadError, EngineGenerateError, LostItem, Stopped
from .protocol import ErrorBody, ErrorInfo

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000
"""Characters of the message of an error."""

MAX_PARAM_CHARS = 200
"""Characters of the path of an error."""

REFUSED = Counter(
    "mmkit:refused_requests",
    "Requests and session messages that were refused, by route, modality (empty where it is "
    "about none) and reason: schema, item, prompt, sampling, limit, capacity, stop, engine.",
    ["route", "modality", "reason"],
)
SESSIONS = Gauge("mmkit:sessions_open", "Sessions open now.", multiprocess_mode="livesum")

_COUNTED = "mmkit.counted"
"""The key of an ASGI scope whose refusal is counted."""


class NoSpec(Exception):
    """The model of this server has no spec of ours."""


class NoPolicy(Exception):
    """No robot drives the model of this server."""


class SessionRefused(InputError):
    """The server does not open a session."""


class TooBusy(SessionRefused):
    """A limit on what is open at once."""


class OtherOrigin(Exception):
    """A page of another origin opens a session."""


# -- the table of errors ---------------------------------------------------------------------------


class ErrorRow(NamedTuple):
    """How clients see one kind of error.

    Attributes:
        kind: the kind.
        status: of HTTP.
        reason: for the metrics; empty where it follows from the path of the error.
        expected: of the server's sentence; empty where the error has a message for clients.
        got: of the server's sentence.
        remedy: of the server's sentence.
    """

    kind: type[BaseException]
    status: int
    reason: str
    expected: str = ""
    got: str = ""
    remedy: str = ""


_SPEC = "a model with an mmkit spec"
_POLICY = "a model whose spec has a policy"
_CACHED = "an item in its cache"
_SERVE, _FAILED, _SEE_LOG = FAULT
_ORIGIN = "a page of its own address or of --allowed-origins"
_STOPPED = "the order to stop"
_ALIVE = "a living engine"
_DEAD = "one that is dead or stopped"
_OTHER_SERVER = "Send it to another server."

# the first row of which an error is an instance holds
_TABLE = (
    ErrorRow(NoSpec, 404, "schema", _SPEC, "one without", "Use vLLM's routes."),
    ErrorRow(NoPolicy, 404, "schema", _POLICY, "one without"),
    ErrorRow(OtherOrigin, 403, "schema", _ORIGIN, "another origin"),
    ErrorRow(TooLarge, 413, "limit"),
    ErrorRow(TooBusy, 429, "capacity"),
    ErrorRow(EngineGenerateError, 500, "engine", _SERVE, _FAILED, _SEE_LOG),
    ErrorRow(LostItem, 503, "engine", _CACHED, "none, several times", "Send it again."),
    ErrorRow(Stopped, 503, "stop", _SERVE, _STOPPED, "Send it to another one."),
    ErrorRow(EngineDeadError, 503, "engine", _ALIVE, _DEAD, _OTHER_SERVER),
    ErrorRow(InputError, 400, ""),
    ErrorRow(Exception, 500, "engine", _SERVE, _FAILED, _SEE_LOG),
)

_REASONS = {
    "items": "item",
    "uuids": "item",
    "messages": "item",
    "multi_modal_data": "item",
    "multi_modal_uuids": "item",
    "mm_kwargs": "item",
    "prompt": "prompt",
    "input_tokens": "prompt",
    "input_text": "prompt",
    "": "prompt",
    SAMPLING_FIELD: "sampling",
    **dict.fromkeys(SAMPLING_NAMES, "sampling"),
}
"""The reason of a refusal whose row has none, by the first word of its path. For other words it is
"schema"."""

_VLLM_REASONS = {413: "limit", 429: "capacity", 503: "capacity"}
"""The reason of a refusal by vLLM itself, by its status."""


def _find_row(error: BaseException) -> ErrorRow:
    """Return how clients see an error."""
    kind = _classify(error)
    for row in _TABLE:
        if issubclass(kind, row.kind):
            return row
    raise error  # KeyboardInterrupt and its like are no answer to a request


def _classify(error: BaseException) -> type[BaseException]:
    """Return the kind of an error in the table; vLLM's own have one of ours."""
    if isinstance(error, RuntimeError) and "after shutdown" in str(error):
        return Stopped  # vLLM's renderer has let go of its threads
    class_names = [kind.__name__ for kind in type(error).__mro__]
    is_refusal = isinstance(error, ValueError) and _is_raised_by_vllm(error)
    if "VLLMClientError" in class_names or is_refusal or hasattr(error, "http_status"):
        return InputError
    return type(error)


def _is_raised_by_vllm(error: BaseException) -> bool:
    """Tell whether vLLM raised an error itself, rather than a function of a spec."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    if not frames:
        return False
    module: str = frames[-1].f_globals.get("__name__", "")
    return module.partition(".")[0] == "vllm"


def is_callers_mistake(error: BaseException) -> bool:
    """Tell whether an error is about the request, rather than the server."""
    return issubclass(_classify(error), InputError)


def is_end_of_server(error: BaseException) -> bool:
    """Tell whether an error says that this server answers no more."""
    return issubclass(_classify(error), EngineDeadError)


# -- refusals --------------------------------------------------------------------------------------


def make_response(error: BaseException, plan: Plan | None, route: str, **headers: str) -> Response:
    """Return the answer of a refusal.

    For the arguments, see `make_info`.
    """
    info = make_info(error, plan, route)
    body = msgspec.json.encode(ErrorBody(error=info))
    return Refusal(body, info.code, headers, media_type="application/json")


class Refusal(Response):
    """An answer that `make_info` has counted."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope[_COUNTED] = True
        await super().__call__(scope, receive, send)


def make_info(error: BaseException, plan: Plan | None, route: str) -> ErrorInfo:
    """Return an error in OpenAI's form, and count it in the metrics.

    Args:
        error: what was raised.
        plan: the spec, whose items errors name; None for a server without one.
        route: for the metrics.
    """
    row = _find_row(error)
    status = row.status
    reason = row.reason
    admission_status = getattr(error, "http_status", None)
    if row.kind is InputError and admission_status is not None:
        status = admission_status
        reason = "capacity"
    if status == HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, ServerFault):
        logger.error("%s failed", route, exc_info=error)
    if row.expected:
        message = write_message("server", row.expected, row.got, row.remedy)
        path = None
    else:
        message = " ".join(str(error).split())
        path = find_path(error, plan)
    _count(plan, route, path, reason)
    param = path
    if param is not None:
        param = _shorten(param, MAX_PARAM_CHARS)
    return ErrorInfo(
        message=_shorten(message, MAX_MESSAGE_CHARS),
        type=_name_type(status),
        param=param,
        code=status,
    )


def _name_type(status: int) -> str:
    """Return OpenAI's name of the type of an error, as ``BadRequestError``."""
    words = HTTPStatus(status).phrase.title().replace(" ", "")
    return words.removesuffix("Error") + "Error"


def _shorten(text: str, most: int) -> str:
    """Return a text of at most so many characters."""
    if len(text) <= most:
        return text
    return f"{text[: most - 3]}..."


# -- paths -----------------------------------------------------------------------------------------


def find_path(error: BaseException, plan: Plan | None) -> str | None:
    """Return the path in the request of what an error is about.

    For example ``items.actions[3]``, ``prompt[7]`` or ``temperature``; None if it is unknown.
    """
    where = getattr(error, "where", None) or getattr(error, "parameter", None)
    if not where or not isinstance(where, str):
        return None
    if plan is None:
        return where
    return _convert_path(where, plan)


def _convert_path(where: str, plan: Plan) -> str:
    """Return the path in a request for a path that begins with the name of the spec."""
    prefix = f"{plan.spec.name}."
    if not where.startswith(prefix):
        return where
    where = where.removeprefix(prefix).split(",")[0]
    if where.split("[")[0] in plan.modalities:
        return f"items.{where}"
    return where


# -- metrics ---------------------------------------------------------------------------------------


def _count(plan: Plan | None, route: str, where: str | None, reason: str) -> None:
    """Count a refusal.

    Args:
        plan: the spec, whose modalities are counted by name.
        route: of the request.
        where: the path of the error.
        reason: the reason of the refusal; empty if it follows from the path.
    """
    words = re.split(r"[.\[\]]+", where or "")
    modality = "" if plan is None else _find_modality(words, plan)
    if not reason:
        reason = "item" if modality else _REASONS.get(words[0], "schema")
    REFUSED.labels(route, modality, reason).inc()


def _find_modality(words: Sequence[str], plan: Plan) -> str:
    """Return the modality that a path is about; empty for none.

    Args:
        words: of the path of an item, ``items.series[0]``, or of a part of a message:
            ``messages[0].content[1].series``.
        plan: the spec.
    """
    candidates: Sequence[str] = ()
    if words[0] in ("items", "uuids"):
        candidates = words[1:2]
    elif "content" in words:
        candidates = words[words.index("content") + 1 :]
    for word in candidates:
        if word in plan.modalities:
            return word
    return ""


def count_foreign_refusal(scope: Any, plan: Plan, status: int, body: bytes) -> None:
    """Count a refusal by vLLM itself, unless it is an answer of `make_response`.

    Args:
        scope: ASGI's scope of the request.
        plan: the spec.
        status: of HTTP; 200 for an error within a stream, whose `code` is the status.
        body: an error in OpenAI's form, or another one.
    """
    if scope.get(_COUNTED):
        return
    error = _parse_error(body)
    if status == HTTPStatus.OK:
        code = error.get("code")
        status = code if isinstance(code, int) else HTTPStatus.BAD_REQUEST
    message = error.get("message")
    where = error.get("param")
    if not where and isinstance(message, str) and ": expected " in message:
        where = message.partition(": expected ")[0]  # a sentence of mmkit in an answer of vLLM
    path = "body"
    if isinstance(where, str):
        path = _convert_path(where, plan)
    if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
        reason = ""
    elif status in _VLLM_REASONS:
        reason = _VLLM_REASONS[status]
    elif status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        reason = "engine"
    else:
        reason = "schema"
    _count(plan, "vllm", path, reason)


def _parse_error(body: bytes) -> dict[str, Any]:
    """Return the error in a body of OpenAI's form; empty for another body."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    if not isinstance(value, dict):
        return {}
    error = value.get("error")
    if not isinstance(error, dict):
        return {}
    return error
