"""Refusals as clients see them, and metrics beside those of vLLM at the server's ``/metrics``."""

from __future__ import annotations

import logging
import re
from http import HTTPStatus
from traceback import walk_tb
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response
from prometheus_client import Counter, Gauge

from ..errors import InputError, write_message
from ..plan.plan import Plan
from .engine import SAMPLING_NAMES, EngineDeadError, EngineGenerateError, LostItem, Stopped
from .protocol import ErrorBody, ErrorInfo, TooLarge

logger = logging.getLogger(__name__)

REFUSED = Counter(
    "mmkit:refused_requests",
    "Requests and session messages that were refused, by route, modality (empty where it is "
    "about none) and reason: schema, item, prompt, sampling, limit, capacity, stop, engine.",
    ["route", "modality", "reason"],
)
SESSIONS = Gauge("mmkit:sessions_open", "Sessions open now.", multiprocess_mode="livesum")


class NoSpec(Exception):
    """The model of this server has no spec of ours."""


class TooBusy(InputError):
    """A limit on what is open at once."""


class OtherOrigin(Exception):
    """A page of another origin opens a session."""


_SERVE = "to serve the request"
_FAILED = (_SERVE, "an error of its own", "Its log says which.")
_STOPS = (_SERVE, "the order to stop", "Send it to another one.")
_DEAD = ("a living engine", "one that is dead or stopped", "Send it to another server.")
_ORIGIN = ("a page of its own address or of --allowed-origins", "another origin")
# kinds of errors with status, reason and the server's sentence; without one, the error has it
_TABLE: tuple[tuple[type[BaseException], int, str, tuple[str, ...]], ...] = (
    (NoSpec, 404, "schema", ("a model with an mmkit spec", "one without", "Use vLLM's routes.")),
    (OtherOrigin, 403, "schema", _ORIGIN),
    (TooLarge, 413, "limit", ()),
    (TooBusy, 429, "capacity", ()),
    (EngineGenerateError, 500, "engine", _FAILED),
    (LostItem, 503, "engine", ("an item in its cache", "none, several times", "Send it again.")),
    (Stopped, 503, "stop", _STOPS),
    (EngineDeadError, 503, "engine", _DEAD),
    (InputError, 400, "", ()),
    (Exception, 500, "engine", _FAILED),
)
# the reason of a request that is wrong follows from the first word of the path
_ITEMS = ("items", "uuids", "messages", "multi_modal_data", "multi_modal_uuids", "mm_kwargs")
_REASONS = dict.fromkeys(_ITEMS, "item")
_REASONS |= dict.fromkeys(("prompt", "input_tokens", "input_text", ""), "prompt")
_REASONS |= dict.fromkeys(("sampling_params", *SAMPLING_NAMES), "sampling")
# of what vLLM refuses itself, it follows from the status
_STATUSES = {413: "limit", 429: "capacity", 503: "capacity"}
_MESSAGE, _PARAM = 1000, 200

_COUNTED = "mmkit.counted"
"""The key of an ASGI scope whose answer is counted."""


def make_info(error: BaseException, plan: Plan | None, route: str) -> ErrorInfo:
    """An error in OpenAI's form, counted.

    Args:
        error: what was raised.
        plan: the spec, which tells paths of items.
        route: for the metrics.
    """
    kind = _kind(error)
    status, reason, told = next(row[1:] for row in _TABLE if issubclass(kind, row[0]))
    if kind is InputError and (code := getattr(error, "http_status", None)) is not None:
        status, reason = code, "capacity"  # vLLM's admission control
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.error("%s failed", route, exc_info=error)
    message = write_message("server", *told) if told else " ".join(str(error).split())
    where = None if told else find_path(error, plan)
    _count(plan, route, where, reason)
    return ErrorInfo(
        message=_short(message, _MESSAGE),
        type=HTTPStatus(status).phrase.title().replace(" ", "").removesuffix("Error") + "Error",
        param=where and _short(where, _PARAM),
        code=status,
    )


def _count(plan: Plan | None, route: str, where: str | None, reason: str) -> None:
    """Count a refusal; without a reason, that of the path."""
    first, modality, *_ = [*re.split(r"[.\[]", where or ""), ""]
    if plan is None or first not in ("items", "uuids") or modality not in plan.modalities:
        modality = ""
    REFUSED.labels(route, modality, reason or _REASONS.get(first, "schema")).inc()


def count_foreign_refusal(scope: Any, plan: Plan, status: int, body: bytes) -> None:
    """Count what vLLM itself has answered to a request, unless it is an answer of `make_response`.

    Args:
        scope: that of the request.
        plan: the spec.
        status: of HTTP.
        body: an error in OpenAI's form, or another one.
    """
    if scope.get(_COUNTED):
        return
    error = _told(body)
    message, where = error.get("message"), error.get("param")
    if not where and isinstance(message, str) and ": expected " in message:
        where = message.partition(": expected ")[0]  # a sentence of mmkit in an answer of vLLM
    where = _of_spec(where, plan) if isinstance(where, str) else "body"
    is_of_caller = status in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)
    reason = "engine" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "schema"
    _count(plan, "vllm", where, "" if is_of_caller else _STATUSES.get(status, reason))


def _told(body: bytes) -> dict[str, Any]:
    """The error that a body holds; nothing if it is another one."""
    try:
        told = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    error = told.get("error") if isinstance(told, dict) else None
    return error if isinstance(error, dict) else {}


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def is_callers_mistake(error: BaseException) -> bool:
    """Whether an error is about the request, rather than the server."""
    return issubclass(_kind(error), InputError)


def is_end_of_server(error: BaseException) -> bool:
    """Whether an error says that this server answers no more."""
    return issubclass(_kind(error), EngineDeadError)


def _kind(error: BaseException) -> type[BaseException]:
    """What an error is in the table."""
    if isinstance(error, RuntimeError) and "after shutdown" in str(error):
        return Stopped  # vLLM's renderer has let go of its threads
    is_client_error = any(kind.__name__ == "VLLMClientError" for kind in type(error).__mro__)
    is_refusal = isinstance(error, ValueError) and _of_vllm(error)
    if is_client_error or is_refusal or hasattr(error, "http_status"):
        return InputError
    return type(error)


def _of_vllm(error: BaseException) -> bool:
    """Whether vLLM raised an error itself, rather than a function of a spec or what it calls."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").partition(".")[0] == "vllm"


def find_path(error: BaseException, plan: Plan | None) -> str | None:
    """Where in the request the error is: ``items.actions[3]``, ``prompt[7]``, ``temperature``; None
    if unknown."""
    where = getattr(error, "where", None) or getattr(error, "parameter", None)
    if not where or not isinstance(where, str):
        return None
    return where if plan is None else _of_spec(where, plan)


def _of_spec(where: str, plan: Plan) -> str:
    """A path of a spec as one of a request."""
    if not where.startswith(f"{plan.spec.name}."):
        return where
    where = where.removeprefix(f"{plan.spec.name}.").split(",")[0]
    return f"items.{where}" if where.split("[")[0] in plan.modalities else where


class Refusal(Response):
    """An answer that `make_info` has counted."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope[_COUNTED] = True
        await super().__call__(scope, receive, send)


def make_response(error: BaseException, plan: Plan | None, route: str, **headers: str) -> Response:
    """A refusal."""
    refusal = make_info(error, plan, route)
    body = msgspec.json.encode(ErrorBody(error=refusal))
    return Refusal(body, refusal.code, headers, media_type="application/json")


async def handle_input_error(request: Request, error: Exception) -> Response:
    """The answer to a request at one of vLLM's routes that mmkit refuses after its body is read."""
    state = getattr(request.app.state, "mmkit", None)
    return make_response(error, state and state.plan, "vllm")
