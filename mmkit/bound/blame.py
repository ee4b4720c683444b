"""Where in a spec an error arose, and whose it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import MmkitError, SpecError


class At:
    """Errors of the spec that arise inside name the part of it: ``with At("robot.actions, layout"):``."""

    __slots__ = ("where",)

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, SpecError):
            raise SpecError(f"{self.where}: {error}") from error
        if isinstance(error, Exception) and not isinstance(error, MmkitError):  # of a function of the spec
            raise SpecError(self.where, "a value", _cause(error)) from error


@contextmanager
def calling(kind: type[MmkitError], where: str, expected: str) -> Iterator[None]:
    """Whatever a function of the spec raises becomes an error of mmkit, unless it is one."""
    try:
        yield
    except MmkitError:
        raise
    except Exception as error:
        raise kind(where, expected, _cause(error)) from error


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": .")
