"""Refusals and faults in the classes of error that vLLM's server answers with their own status."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from ..errors import InputError, write_message
from .compat import find

FAULT = ("to serve the request", "an error of its own", "Its log says which.")
"""What was expected, what happened, and what to do, in a client's sentence about a fault of the
server."""


class ServerError(InputError):
    """An InputError with the attributes that vLLM's server reads of its own errors."""

    def __init__(self, error: InputError) -> None:
        # not `__init__` of vLLM's class, which takes other arguments in each release
        Exception.__init__(self, str(error))
        self.where = error.where
        self.parameter = error.where or None
        self.value = None

    def __str__(self) -> str:
        return str(self.args[0])


# before 0.16 vLLM has none; there are no routes of ours then
_VALIDATION_ERROR: Any = find("exceptions:VLLMValidationError", default=object)

# 413 where vLLM lets an error choose its status; else 400
_STATUS_ERROR: Any = find(
    "exceptions:GracefulHTTPError", "exceptions:VLLMValidationError", default=object
)


class Refused(ServerError, _VALIDATION_ERROR):
    """A request that was refused after rendering.

    vLLM's server answers 500 to any other class of error that is raised there.
    """


class TooManyPixels(ServerError, _STATUS_ERROR):
    """A request whose media have more pixels than a server decodes for one request."""

    http_status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


# before there was one: no RuntimeError, for which these releases answer 400 too
_SERVER_ERROR: Any = find("exceptions:VLLMServerError", default=Exception)


class ServerFault(_SERVER_ERROR):
    """A fault of a server: of its spec, or of a process that processes items.

    It stands in place of an `MmkitError`, which is a ValueError: vLLM's server answers 400 to it,
    as if the caller were wrong. The client does not learn of the cause, which the log has.
    """

    def __init__(self) -> None:
        super().__init__(write_message("server", *FAULT))
