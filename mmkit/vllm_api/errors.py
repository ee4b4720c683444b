"""Refusals in the classes of error that vLLM's server answers with their own status."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from ..errors import InputError
from .compat import find


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
