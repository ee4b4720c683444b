"""The request that a server works on, for functions of vLLM that receive only a part of it.

A `ServerRequest` holds how many pixels may still be decoded, and where in the body each item
stands. A server puts it into `SERVER_REQUEST` before vLLM reads the body. Tasks that the request
starts inherit it. Threads do not: what runs there gets what it needs before it starts, or in an
executor that `inherit_context` has changed. Offline there is no such request, and nothing here does
anything.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import wraps
from typing import Any

from ..errors import InputError, MmkitError, relocate
from .errors import ServerFault, TooManyPixels

logger = logging.getLogger(__name__)

ItemPaths = Mapping[str, Sequence[str]]
"""The paths of the items of one conversation, by modality and in order."""


class ServerRequest:
    """One HTTP request, or one message of a session: what patched functions of vLLM read of it.

    `mmkit.serve.bodies.BodyMiddleware` sets it in `SERVER_REQUEST` for each connection, and
    `mmkit.serve.state.ServerState` another one while it loads the media of one message.

    Attributes:
        adds_special_tokens_twice: whether vLLM's options of the route let the tokenizer add the
            special tokens (BOS) that a chat template has written already.
        has_render_processes: whether the items of the request are processed in other processes,
            which also decode JPEG files.

    Args:
        pixels: how many pixels its media may have together.
        refusal: makes the error for a request that has more.
        field: the field of the body that has the messages; empty where none has.
        item_paths: the paths of the items, for each conversation; a body may hold several.
        adds_special_tokens_twice: see above.
        has_render_processes: see above.
    """

    def __init__(
        self,
        pixels: int,
        refusal: Callable[[], InputError],
        field: str = "",
        item_paths: Sequence[ItemPaths] = (),
        adds_special_tokens_twice: bool = False,
        has_render_processes: bool = False,
    ) -> None:
        self._pixels = pixels
        self._refusal = refusal
        self._field = field
        self._item_paths = item_paths
        self.adds_special_tokens_twice = adds_special_tokens_twice
        self.has_render_processes = has_render_processes
        self._conversation_count = 0
        self._lock = threading.Lock()

    def spend_pixels(self, count: int) -> None:
        """Count pixels that are about to be decoded.

        Threads may call it at the same time.

        Raises:
            TooManyPixels: the request has more than it may have.
        """
        with self._lock:
            self._pixels -= count
            exceeded = self._pixels < 0
        if exceeded:
            raise TooManyPixels(self._refusal())

    def next_conversation(self) -> int:
        """Return the index of the conversation that is rendered next."""
        index = self._conversation_count
        self._conversation_count += 1
        return index

    def locate(self, error: InputError, spec: str, conversation: int) -> InputError | None:
        """Return an error with the path in the body of the part that it is about.

        Return None for an error that is about no part of the messages.

        Args:
            error: may name an item by its modality and number, as ``robot.actions[3][0]``.
            spec: the name of the spec.
            conversation: the index of the conversation that was rendered.
        """
        if not self._field:
            return None
        if error.where == self._field:
            return error
        if not error.where.startswith(f"{spec}."):
            return None
        item = re.match(r"(\w+)\[(\d+)\]", error.where.removeprefix(f"{spec}."))
        if item and conversation < len(self._item_paths):
            paths = self._item_paths[conversation].get(item[1], ())
            number = int(item[2])
            if number < len(paths):
                part = error.where.removeprefix(f"{spec}.{item[0]}")
                return relocate(error, paths[number] + part)
        return relocate(error, self._field)


SERVER_REQUEST: ContextVar[ServerRequest | None] = ContextVar("mmkit_request", default=None)
"""The request that a task works on; None offline."""


@contextmanager
def report_faults() -> Iterator[None]:
    """Make errors in a server that are no mistake of the caller faults of the server, and log them.

    Raises:
        ServerFault: in place of an MmkitError that is no InputError.
    """
    try:
        yield
    except InputError:
        raise
    except MmkitError as error:
        if SERVER_REQUEST.get() is None:
            raise
        logger.error("A request failed", exc_info=error)
        raise ServerFault from error


def inherit_context(executor: Executor) -> None:
    """Make an executor run each function in the context of its submitter.

    vLLM renders the messages of its pooling routes in the threads of an executor.
    """
    changed: Any = executor
    submit = changed.submit

    @wraps(submit)
    def submit_with_context(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return submit(copy_context().run, function, *args, **options)

    changed.submit = submit_with_context
