"""Requests whose items are processed in other processes (`mmkit.render_processes`).

vLLM's thread for items parses a request, hashes its items, and looks them up in the processor
cache. There it stops (`Needed`) where some are missing; they are processed in another process,
while the thread goes on with other requests. Then it does the request again, with the fields at
hand. So the order of requests and the use of the cache are vLLM's own.
"""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any

from ..bound.calls import Taken
from ..bound.processing import Processed
from ..errors import MmkitError
from ..render_processes import Recipe, RenderProcesses

if TYPE_CHECKING:
    from .items import RequestItems
    from .processor import CommonProcessor

OPTION = "render_processes"
"""The key of vLLM's ``additional_config`` that says how many."""

_PROCESSES = f"{__name__} processes"
_TRIES = 3
"""The most times that a request is tried whose items other requests meanwhile put into the cache or
out of it."""

PLACE: ContextVar[Callable[[Future[Any]], Any]] = ContextVar("wait", default=Future.result)
"""The function by which a request of the offline API waits for its items."""

Indices = Mapping[str, tuple[int, ...]]


class Needed(Exception):
    """Items of a request are to be processed before it can go on.

    Attributes:
        indices: which, by modality.
        items: these.
    """

    def __init__(self, indices: Indices, items: Mapping[str, Taken]) -> None:
        super().__init__(indices)
        self.indices, self.items = indices, items


class Elsewhere(dict[str, Any]):
    """A request's ``multi_modal_data``, whose items are processed elsewhere.

    Args:
        data: that of the caller.
        waits: whether the request waits for its turn before it changes vLLM's cache.

    Attributes:
        parsed: vLLM's items, which are parsed once.
    """

    def __init__(self, data: Mapping[str, Any], *, waits: bool) -> None:
        super().__init__(data)
        self.parsed: RequestItems | None = None
        self._indices: Indices | None = None if waits else {}
        self._processed: Mapping[str, Processed] = {}

    def keep(self, indices: Indices, processed: Mapping[str, Processed]) -> None:
        """Take the fields of some items."""
        self._indices, self._processed = indices, processed

    def processed(self, indices: Indices, items: Mapping[str, Taken]) -> dict[str, Processed]:
        """The fields of some of the items.

        Raises:
            Needed: they are not there yet.
        """
        if indices != self._indices:
            raise Needed(indices, items)
        return dict(self._processed)


def count(vllm_config: Any) -> int:
    """The number of processes that a configuration asks for.

    Raises:
        MmkitError: it asks for something else than a number.
    """
    config = getattr(vllm_config, "additional_config", None)
    asked = config.get(OPTION, 0) if isinstance(config, Mapping) else 0
    if type(asked) is not int or asked < 0:
        raise MmkitError(f"additional_config[{OPTION!r}]", "a number of processes", repr(asked))
    return asked


def of(renderer: Any) -> RenderProcesses | None:
    """The processes of a renderer of vLLM's, started at the first call; None where its
    configuration asks for none.

    Raises:
        MmkitError: it asks for something else than a number.
        SpecError: other processes cannot have the spec.
    """
    if not hasattr(renderer, _PROCESSES):
        number = count(renderer.config)
        processes = start(renderer.mm_processor, number) if number else None
        setattr(renderer, _PROCESSES, processes)
        if processes is not None:
            weakref.finalize(renderer, processes.close)
    return getattr(renderer, _PROCESSES)  # type: ignore[no-any-return]


@contextmanager
def lent(renderer: Any, number: int) -> Iterator[None]:
    """A renderer has so many processes."""
    processes = start(renderer.mm_processor, number)
    before = of(renderer)
    setattr(renderer, _PROCESSES, processes)
    try:
        processes.wait()
        yield
    finally:
        setattr(renderer, _PROCESSES, before)
        processes.close()


def start(processor: CommonProcessor, number: int) -> RenderProcesses:
    """Start processes that process what a processor would."""
    info, model_config = processor.info, processor.info.ctx.model_config
    hf_processor = None
    with suppress(Exception):  # many models have none
        hf_processor = info.get_hf_processor()
    recipe = Recipe(
        spec=processor.plan.spec,
        config=info.get_hf_config(),
        tokenizer=info.ctx.tokenizer,
        processor=hf_processor,
        kwargs=info.merged_kwargs({}),
        max_model_len=model_config.max_model_len,
        dtype=model_config.dtype,
    )
    return RenderProcesses(recipe, number)


def with_processes(theirs: Any) -> Any:
    """A method of vLLM's renderer that makes a request for the engine of a tokenized prompt, with
    items processed elsewhere."""

    def split(self: Any, prompt: Any) -> tuple[Any, Any]:
        data = prompt.get("multi_modal_data")
        # options of a request configure the Hugging Face processor, which others do not have so
        if not data or prompt.get("mm_processor_kwargs") or (processes := of(self)) is None:
            return None, prompt
        own = Elsewhere(data, waits=PLACE.get() is not Future.result)
        return processes, {**prompt, "multi_modal_data": own}

    @wraps(theirs)
    def at_once(self: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        processes, own = split(self, prompt)
        for _ in range(_TRIES if processes else 0):
            try:
                return theirs(self, own, *args, **kwargs)
            except Needed as needed:
                done = PLACE.get()(processes.process(needed.items))
                own["multi_modal_data"].keep(needed.indices, done)
        return theirs(self, prompt, *args, **kwargs)

    @wraps(theirs)
    async def later(self: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        processes, own = split(self, prompt)
        for _ in range(_TRIES if processes else 0):
            try:
                return await theirs(self, own, *args, **kwargs)
            except Needed as needed:
                work = asyncio.wrap_future(processes.process(needed.items))
                own["multi_modal_data"].keep(needed.indices, await work)
        return await theirs(self, prompt, *args, **kwargs)

    return later if inspect.iscoroutinefunction(theirs) else at_once
