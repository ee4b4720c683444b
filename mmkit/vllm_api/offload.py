"""Let vLLM's server process the items of requests in other processes (`mmkit.rendering.pool`).

vLLM's thread for items parses a request, hashes its items, and looks them up in the processor
cache. There it stops (`ItemsPending`) where items are missing; they are processed in another
process, while the thread goes on with other requests. Then it takes the request through the steps
again, with the fields at hand (`Offloaded`). So the order of requests and the use of the cache are
vLLM's own.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import wraps
from typing import Any

from ..errors import MmkitError
from ..language.items.pictures import decode_pictures
from ..plan.item import make_batches
from ..rendering.pool import Recipe, RenderProcesses
from .items import ItemsPending, Offloaded
from .server_request import report_faults

OPTION = "render_processes"
"""The key of vLLM's ``additional_config`` that says how many."""

_MAX_TRIES = 3
"""The most times that a request is tried whose items other requests meanwhile put into the cache or
out of it."""


def install(renderer: Any) -> RenderProcesses | None:
    """Start the processes that a server's configuration asks for, and give them its items.

    Return None where it asks for none.

    Raises:
        MmkitError: it asks for something else than a number.
        SpecError: other processes cannot have the spec.
    """
    config = getattr(renderer.config, "additional_config", None)
    count = 0
    if isinstance(config, Mapping):
        count = config.get(OPTION, 0)
    if type(count) is not int or count < 0:
        raise MmkitError(f"additional_config[{OPTION!r}]", "a number of processes", repr(count))
    if not count:
        return None
    processes = RenderProcesses(make_recipe(renderer.mm_processor), count)
    weakref.finalize(renderer, processes.close)
    # an instance, not the class: no other renderer has these processes
    renderer._process_tokens_async = wrap_process_tokens_async(
        renderer._process_tokens_async, processes
    )
    return processes


def make_recipe(processor: Any) -> Recipe:
    """Return what another process needs to process items as a processor of a spec does."""
    info = processor.info
    model_config = info.ctx.model_config
    hf_processor = None
    with suppress(Exception):  # many models have none
        hf_processor = info.get_hf_processor()
    return {
        "spec": processor.plan.spec,
        "config": info.get_hf_config(),
        "tokenizer": info.ctx.tokenizer,
        "processor": hf_processor,
        "kwargs": info.merge_kwargs({}),
        "max_model_len": model_config.max_model_len,
        "dtype": model_config.dtype,
    }


def wrap_process_tokens_async(
    process_tokens: Callable[..., Awaitable[Any]], processes: RenderProcesses
) -> Callable[..., Awaitable[Any]]:
    """Make a renderer process items in other processes.

    Args:
        process_tokens: the renderer's step from a tokenized prompt to the engine's input.
        processes: where items are processed.
    """

    @wraps(process_tokens)
    async def process_elsewhere(prompt: Any, **options: Any) -> Any:
        with report_faults():
            return await process_items_elsewhere(prompt, options)

    async def process_items_elsewhere(prompt: Any, options: Mapping[str, Any]) -> Any:
        data = prompt.get("multi_modal_data")
        # other processes do not have the Hugging Face processor that options of a request configure
        if not data:
            return await process_tokens(prompt, **options)
        if prompt.get("mm_processor_kwargs"):
            # not in the thread in which vLLM processes the items of all requests
            await asyncio.to_thread(decode_pictures, dict(data), "multi_modal_data")
            return await process_tokens(prompt, **options)
        offloaded = Offloaded(data)
        offloaded_prompt = {**prompt, "multi_modal_data": offloaded}
        for _ in range(_MAX_TRIES):
            try:
                return await process_tokens(offloaded_prompt, **options)
            except ItemsPending as pending:
                items = pending.items
            fields = await asyncio.wrap_future(processes.process(make_batches(items)))
            offloaded.add_fields(items, fields)
        return await process_tokens(prompt, **options)

    return process_elsewhere
