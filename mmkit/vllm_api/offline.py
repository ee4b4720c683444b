"""Offline calls of vLLM's `LLM` with items processed in other processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Condition
from typing import Any

from ..errors import VllmApiError
from . import elsewhere
from .moved import REMEDY, installed
from .replaced import replaced
from .undecoded import images_undecoded

_STEPS = ("_preprocess_cmpl_one", "_preprocess_chat_one")
"""The methods of vLLM's LLM that render one prompt, or one conversation."""


@contextmanager
def render_processes(llm: Any, count: int) -> Iterator[Any]:
    """Process the items of offline calls in several processes, while the block runs.

    Inside the block, the prompts of `LLM.generate` and the conversations of `LLM.chat` are rendered
    ahead of the engine. The processes also decode images in data URLs. The answers are the same as
    without the block.

    Args:
        llm: vLLM's `LLM`, with a model that has a spec.
        count: the number of processes.

    Raises:
        SpecError: the processes cannot import the spec.
        VllmApiError: this vLLM has no method that renders one prompt of several.
    """
    if missing := [name for name in _STEPS if not hasattr(llm, name)]:
        raise VllmApiError(installed(), f"LLM.{missing[0]}", "none", REMEDY)
    with elsewhere.lent(llm.renderer, count), rendered_ahead(llm, 2 * count):
        yield llm


@contextmanager
def rendered_ahead(llm: Any, length: int) -> Iterator[None]:
    """Render the prompts of an LLM with render processes ahead of the engine, `length` at once."""
    line = _Line(length, llm.renderer)
    steps: dict[str, Any] = {name: partial(line.begin, getattr(llm, name)) for name in _STEPS}
    theirs = llm._render_and_add_requests

    def add(prompts: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        return theirs(line.rendered(prompts), *args, **kwargs)

    steps["_render_and_add_requests"] = add
    with images_undecoded(), replaced(llm, **steps), line.threads:
        yield


class _Line:
    """Prompts that are rendered ahead, in their order.

    Each prompt has a thread. One thread works at a time; the others wait for items. A request
    changes vLLM's cache after the requests before it.

    Args:
        length: the number of prompts that are rendered at once.
        renderer: vLLM's renderer.
    """

    def __init__(self, length: int, renderer: Any) -> None:
        self.threads = ThreadPoolExecutor(length, thread_name_prefix="mmkit prompt")
        self._length, self._renderer = length, renderer
        self._at_work = Condition()
        self._last, self._first = 0, 0

    def begin(self, render: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin to render one more prompt."""
        number, self._last = self._last, self._last + 1
        return self.threads.submit(self._render, number, partial(render, *args, **kwargs))

    def rendered(self, prompts: Iterable[Any]) -> Iterator[Any]:
        """The rendered prompts, in order; up to `length` are begun ahead."""
        begun: deque[Any] = deque()
        try:
            for prompt in prompts:
                begun.append(prompt)
                if len(begun) == self._length:
                    yield _result(begun.popleft())
            while begun:
                yield _result(begun.popleft())
        except BaseException:
            # the engine will never see the items of the others: see `CommonProcessor.rendered`
            for other in begun:
                if isinstance(other, Future):
                    other.exception()
            self._renderer.clear_mm_cache()
            raise

    def _render(self, number: int, render: Callable[[], Any]) -> Any:
        with self._at_work:
            elsewhere.PLACE.set(partial(self._wait, number))
            try:
                return render()
            finally:
                self._at_work.wait_for(lambda: self._first == number)
                self._first = number + 1
                self._at_work.notify_all()

    def _wait(self, number: int, work: Future[Any]) -> Any:
        """The result of work, once all prompts before this one are rendered."""
        work.add_done_callback(self._notify)
        self._at_work.wait_for(lambda: work.done() and self._first == number)
        return work.result()

    def _notify(self, _: object) -> None:
        with self._at_work:
            self._at_work.notify_all()


def _result(prompt: Any) -> Any:
    return prompt.result() if isinstance(prompt, Future) else prompt
