"""Refusals as clients see them."""

from __future__ import annotations

import logging
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse

from ..errors import InputError, MmkitError, sentence
from ..plan import Plan
from . import metrics
from .engine import EngineDeadError, EngineGenerateError, Lost
from .protocol import ErrorBody, ErrorInfo
from .wire import TooLarge

logger = logging.getLogger(__name__)

_REASONS = {"items": "item", "prompt": "prompt", "body": "schema", "uuids": "item"}


_MESSAGE, _PARAM = 1000, 200
"""Characters of an error that a client sees, whatever it sent."""


class TooBusy(InputError):
    """A limit on what is open at once."""


def info(error: BaseException, plan: Plan | None, route: str) -> ErrorInfo:
    """An error in OpenAI's form, counted.

    Args:
        error: what was raised.
        plan: the spec, which tells paths of items.
        route: for the metrics.
    """
    reason = ""  # where it follows from the path
    if isinstance(error, TooLarge):
        status, reason = HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "limit"
    elif isinstance(error, TooBusy):
        status, reason = HTTPStatus.TOO_MANY_REQUESTS, "capacity"
    elif isinstance(error, (EngineDeadError, Lost)) or _stopping(error):
        status, reason = HTTPStatus.SERVICE_UNAVAILABLE, "engine"
    elif (code := getattr(error, "http_status", None)) is not None:  # vLLM's admission control
        status, reason = HTTPStatus(code), "capacity"
    elif isinstance(error, EngineGenerateError) or not of_caller(error):
        status, reason = HTTPStatus.INTERNAL_SERVER_ERROR, "engine"
        logger.error("%s failed", route, exc_info=error)
    else:
        status = HTTPStatus.BAD_REQUEST
    param = path(error, plan)
    param = param and _short(param, _PARAM)
    message = _short(" ".join(str(error).split()), _MESSAGE)  # vLLM's may have several lines
    if status is HTTPStatus.INTERNAL_SERVER_ERROR:
        message = _of_server("to serve the request", "an error of its own", "Its log says which.")
    elif isinstance(error, EngineDeadError):
        dead = "one that is dead or stopped"
        message = _of_server("a living engine", dead, "Send it to another server.")
    elif _stopping(error):
        message = _of_server("to serve the request", "the order to stop", "Send it to another one.")
    elif isinstance(error, Lost):
        several = "none, several times"
        message = _of_server("an item in its cache", several, "Send the request again.")
    first = param.split(".")[0].split("[")[0] if param else ""
    reason = reason or _REASONS.get(first, "sampling" if first else "prompt")
    metrics.REFUSED.labels(route, modality_of(param, plan), reason).inc()
    return ErrorInfo(message=message, type=kind(status), param=param, code=status)


_of_server = partial(sentence, "server")


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def kind(status: HTTPStatus) -> str:
    """OpenAI's `type` of an error: ``BadRequestError``."""
    return status.phrase.title().replace(" ", "").removesuffix("Error") + "Error"


def _stopping(error: BaseException) -> bool:
    """Whether vLLM's renderer takes no more work: it has let go of its threads before the server
    ends."""
    return isinstance(error, RuntimeError) and "after shutdown" in str(error)


def of_caller(error: BaseException) -> bool:
    """Whether an error is about the request, rather than the server."""
    if isinstance(error, MmkitError):
        return isinstance(error, InputError)  # others are about the spec
    if any(kind.__name__ == "VLLMClientError" for kind in type(error).__mro__):
        return True
    # where vLLM has no kind of its own for it
    return isinstance(error, ValueError) and _raised_in(error) == "vllm"


def _raised_in(error: BaseException) -> str:
    """The package that raised an error; functions of a spec, and what they call, are not vLLM's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name: str = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return name.partition(".")[0]


def path(error: BaseException, plan: Plan | None) -> str | None:
    """Where in the request the error is: ``items.actions[3]``, ``prompt[7]``, ``temperature``; None
    if unknown."""
    where = getattr(error, "where", None) or getattr(error, "parameter", None)
    if not where or not isinstance(where, str):
        return None
    if plan is None or not where.startswith(f"{plan.spec.name}."):
        return where
    where = where.removeprefix(f"{plan.spec.name}.").split(",")[0]
    if where == "multi_modal_data":
        return "items"
    name = where.split("[")[0]
    return f"items.{where}" if name in plan.modalities else where


def modality_of(param: str | None, plan: Plan | None) -> str:
    """The modality that a path is about; empty for none, or for one that the model does not
    have."""
    parts = (param or "").split(".")
    name = parts[1].split("[")[0] if len(parts) > 1 and parts[0] in ("items", "uuids") else ""
    return name if plan is not None and name in plan.modalities else ""


def response(error: BaseException, plan: Plan | None, route: str) -> JSONResponse:
    """A refusal of a request that may not have come whole: the rest of its body would be taken for
    the next request, so the connection ends."""
    refusal = info(error, plan, route)
    return JSONResponse(body(refusal), refusal.code, headers={"connection": "close"})


def body(error: ErrorInfo) -> dict[str, Any]:
    """The body of a refusal."""
    return ErrorBody(error=error).model_dump(mode="json")
