"""Refusals as clients see them, and metrics beside those of vLLM at the server's ``/metrics``."""

from __future__ import annotations

import logging
import re
from http import HTTPStatus
from traceback import walk_tb

import msgspec
from fastapi.responses import Response
from prometheus_client import Counter, Gauge

from ..errors import InputError, sentence
from ..plan import Plan
from .engine import EngineDeadError, EngineGenerateError, Lost
from .protocol import ErrorBody, ErrorInfo, TooLarge

logger = logging.getLogger(__name__)

REFUSED = Counter(
    "mmkit:refused_requests",
    "Requests and session messages that were refused, by route, modality (empty where it is "
    "about none) and reason: schema, item, prompt, sampling, limit, capacity, engine.",
    ["route", "modality", "reason"],
)
SESSIONS = Gauge("mmkit:sessions_open", "Sessions open now.", multiprocess_mode="livesum")


class NoSpec(Exception):
    """The model of this server has no spec of ours."""


class TooBusy(InputError):
    """A limit on what is open at once."""


class Stopping(Exception):
    """vLLM's renderer takes no more work: it has let go of its threads before the server ends."""


_SERVE = "to serve the request"
_FAILED = (_SERVE, "an error of its own", "Its log says which.")
_DEAD = ("a living engine", "one that is dead or stopped", "Send it to another server.")
# kinds of errors with status, reason and the server's sentence; without one, the error has it
_TABLE: tuple[tuple[type[BaseException], int, str, tuple[str, ...]], ...] = (
    (NoSpec, 404, "schema", ("a model with an mmkit spec", "one without", "Use vLLM's routes.")),
    (TooLarge, 413, "limit", ()),
    (TooBusy, 429, "capacity", ()),
    (EngineGenerateError, 500, "engine", _FAILED),
    (Lost, 503, "engine", ("an item in its cache", "none, several times", "Send it again.")),
    (Stopping, 503, "engine", (_SERVE, "the order to stop", "Send it to another one.")),
    (EngineDeadError, 503, "engine", _DEAD),
    (InputError, 400, "", ()),
    (Exception, 500, "engine", _FAILED),
)
# the reason of a request that is wrong follows from the first word of the path
_REASONS = {"items": "item", "uuids": "item", "body": "schema"}
_REASONS |= dict.fromkeys(("prompt", "input_tokens", ""), "prompt")
_MESSAGE, _PARAM = 1000, 200


def info(error: BaseException, plan: Plan | None, route: str) -> ErrorInfo:
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
    message = sentence("server", *told) if told else " ".join(str(error).split())
    where = None if told else path(error, plan)
    first, modality, *_ = [*re.split(r"[.\[]", where or ""), ""]
    if plan is None or first not in ("items", "uuids") or modality not in plan.modalities:
        modality = ""
    REFUSED.labels(route, modality, reason or _REASONS.get(first, "sampling")).inc()
    return ErrorInfo(
        message=_short(message, _MESSAGE),
        type=HTTPStatus(status).phrase.title().replace(" ", "").removesuffix("Error") + "Error",
        param=where and _short(where, _PARAM),
        code=status,
    )


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def of_caller(error: BaseException) -> bool:
    """Whether an error is about the request, rather than the server."""
    return issubclass(_kind(error), InputError)


def _kind(error: BaseException) -> type[BaseException]:
    """What an error is in the table."""
    if isinstance(error, RuntimeError) and "after shutdown" in str(error):
        return Stopping
    is_client_error = any(kind.__name__ == "VLLMClientError" for kind in type(error).__mro__)
    is_refusal = isinstance(error, ValueError) and _of_vllm(error)
    if is_client_error or is_refusal or hasattr(error, "http_status"):
        return InputError
    return type(error)


def _of_vllm(error: BaseException) -> bool:
    """Whether vLLM raised an error itself, rather than a function of a spec or what it calls."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").partition(".")[0] == "vllm"


def path(error: BaseException, plan: Plan | None) -> str | None:
    """Where in the request the error is: ``items.actions[3]``, ``prompt[7]``, ``temperature``; None
    if unknown."""
    where = getattr(error, "where", None) or getattr(error, "parameter", None)
    if not where or not isinstance(where, str):
        return None
    if plan is None or not where.startswith(f"{plan.spec.name}."):
        return where
    where = where.removeprefix(f"{plan.spec.name}.").split(",")[0]
    return f"items.{where}" if where.split("[")[0] in plan.modalities else where


def response(error: BaseException, plan: Plan | None, route: str, **headers: str) -> Response:
    """A refusal."""
    refusal = info(error, plan, route)
    body = msgspec.json.encode(ErrorBody(error=refusal))
    return Response(body, refusal.code, headers, media_type="application/json")
