"""Generated processors against hand-written ones: ``python -m benchmarks.overhead --help``.

The same requests through both, in one process, in turns: the stored cases of `tests/data/oracles`
that vLLM's own class takes, too. vLLM has none for Terra's actions, a series and a record: there
the other side is `benchmarks.hand_written`.

A request is parsed and processed as vLLM's renderer does it. The time in the Hugging Face processor
(the call of vLLM's `InputProcessingContext.call_hf_processor`, or of mmkit's `HFCall`) is taken
apart, since it is not the library's: `own` is all the rest, vLLM's base classes included. Times are
those of the one thread on its core, so that other processes of the machine take no part in them.
"""

from __future__ import annotations

import statistics
import tracemalloc
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from time import thread_time as clock
from typing import Annotated, Any

import typer

from mmkit.generate import Classes
from mmkit.plan.hf_calls import HFCall
from mmkit.testing.differences import find_difference

from . import measure
from .hand_written import KINDS

SYSTEMS = (
    "llava",
    "blip2",
    "molmo",
    "deepseek_vl2",
    "internvl2",
    "qwen2_vl",
    "llava_next",
    "gemma3",
    "ultravox",
    "phi3v",
)
PARTS = {
    "uncached": "uncached",
    "uncached_own": "uncached, without HF",
    "cached": "cached",
    "prompt_update": "prompt update",
    "startup": "start-up",
}
SIDES = ("generated", "hand_written")
_CALL = HFCall.__call__


@dataclass
class Side:
    """One processor, and the time that its last request spent in the Hugging Face processor."""

    processor: Any
    in_hf: float = 0.0

    def __post_init__(self) -> None:
        is_generated = hasattr(self.processor, "plan")
        context = self.processor.info.ctx
        call: Any = _CALL if is_generated else context.call_hf_processor

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return call(*args, **kwargs)
            finally:
                self.in_hf += clock() - start

        if is_generated:
            HFCall.__call__ = timed  # type: ignore[method-assign]
        else:
            object.__setattr__(context, "call_hf_processor", timed)


def main(
    rounds: Annotated[
        int, typer.Option(min=3, help="How often each request goes through each processor.")
    ] = 30,
    systems: Annotated[
        list[str] | None, typer.Option(help="Which models; may be given several times.")
    ] = None,
) -> None:
    """The cost of generated processors, as ratios to vLLM's own."""
    report = {"rounds": rounds, "systems": {}}
    for name in measure.progress(systems or [*SYSTEMS, *KINDS], "overhead"):
        report["systems"][name] = system(name, rounds)
    names = [name for name in report["systems"] if name in SYSTEMS] or list(report["systems"])
    report["median"] = {
        part: statistics.median(report["systems"][name][part]["ratio"] for name in names)
        for part in PARTS
    }
    rows = [
        [
            name,
            *(f"{parts[part]['ratio']:.2f}" for part in PARTS),
            f"{parts['uncached']['generated_ms']:.2f} ms",
            f"{parts['peak_kib']['generated'] / parts['peak_kib']['hand_written']:.2f}",
        ]
        for name, parts in report["systems"].items()
    ]
    rows.append(["median", *(f"{report['median'][part]:.2f}" for part in PARTS), "", ""])
    columns = ["model", *PARTS.values(), "one request, uncached", "peak memory"]
    measure.store("overhead", report, columns, rows)


def system(name: str, rounds: int) -> dict[str, Any]:
    """The figures of one model."""
    sides, requests = of_kind(name) if name in KINDS else of_vllm(name)
    timings: dict[str, Any] = {
        "requests": len(requests),
        "items": sum(len(v) for _, d, _ in requests for v in d.values()),
    }
    uncached = {side: lambda request, s=sides[side]: apply(s, request) for side in SIDES}
    timings |= in_turns(uncached, requests, rounds, sides)
    caches = {side: cache(sides[side].processor) for side in SIDES}
    cached = {
        side: lambda request, s=sides[side], c=caches[side]: apply(s, request, c) for side in SIDES
    }
    # some items are processed here, too: DeepSeek-VL2 does not cache those of more than two
    timings["cached"] = in_turns(cached, requests, rounds, sides)["uncached_own"]
    timings["prompt_update"] = prompt_updates(sides, requests, rounds)
    startup = {side: lambda _, s=sides[side]: start(s.processor) for side in SIDES}
    timings["startup"] = in_turns(startup, [None], max(3, rounds // 3), sides)["uncached"]
    timings["peak_kib"] = {
        side: peak(lambda s=side: [uncached[s](request) for request in requests]) for side in SIDES
    }
    return timings


def of_vllm(name: str) -> tuple[dict[str, Side], list[Any]]:
    """Both processors of a model of vLLM; ids, data and kwargs of the stored cases with items that
    both take, with one result."""
    from tests import oracles

    sides = {
        "generated": Side(oracles.processor(name)),
        "hand_written": Side(oracles.hand_written(name)),
    }
    requests = []
    for case in oracles.SYSTEMS[name].cases():
        if "error" in case or not case["items"]:
            continue
        kwargs = case.get("mm_processor_kwargs", {})
        request = case["prompt_token_ids"], oracles.items_of(case), kwargs
        try:
            results = [apply(side, request) for side in sides.values()]
        except Exception:  # one that vLLM's class refuses, or crashes on
            continue
        if results[0]["prompt_token_ids"] == results[1]["prompt_token_ids"]:
            requests.append(request)
    return sides, requests


def of_kind(name: str) -> tuple[dict[str, Side], list[Any]]:
    """The same for a modality of `benchmarks.hand_written`.

    Raises:
        RuntimeError: the classes differ in a result.
    """
    from mmkit.testing import processors, vllm_path

    kind = KINDS[name]
    config = processors.load_config_for_spec(kind.folder)
    classes = {"generated": kind.spec.classes, "hand_written": kind.classes()}
    sides = {side: Side(processors.make_processor(classes[side], config)) for side in SIDES}
    requests = [(ids, {kind.name: items}, {}) for ids, items in kind.requests]
    for request in requests:
        outcomes = [vllm_path.read_outcome(apply(side, request)) for side in sides.values()]
        # their hashes, which the features have too, are their own
        outcomes = [replace(outcome, hashes={}, features={}) for outcome in outcomes]
        if difference := find_difference(*outcomes):
            raise RuntimeError(f"{name}: {difference}")
    return sides, requests


def apply(side: Side, request: Any, cache: Any = None) -> Any:
    """One request: parsed, processed, placed."""
    from mmkit.testing import vllm_path

    prompt, data, kwargs = request
    return vllm_path.render(side.processor, prompt, data, kwargs, cache)


def cache(processor: Any) -> Any:
    """An empty processor cache, large enough."""
    from mmkit.testing import vllm_path

    return vllm_path.Caches(processor, 1.0, pair=False).sender


def start(known: Any) -> None:
    """What the engine does at its start: it makes the processor, which binds a spec, asks for the
    most tokens of an item, and has the dummy request processed."""
    from mmkit.testing import processors

    classes = Classes(type(known.info), type(known.dummy_inputs), type(known))
    config = copy(known.info.ctx.model_config)  # nothing is known of it yet
    processor = processors.make_processor(classes, config)
    limits = processor.info.allowed_mm_limits
    seq_len = processor.info.ctx.model_config.max_model_len
    counts = {name: 1 for name, limit in limits.items() if limit is None or limit}
    processor.info.get_mm_max_tokens_per_item(seq_len, counts)
    processor.get_dummy_mm_inputs(counts)


def in_turns(
    calls: dict[str, Callable[[Any], Any]], requests: list[Any], rounds: int, sides: dict[str, Side]
) -> dict[str, Any]:
    """Times of the same requests on both sides, with and without the Hugging Face processor."""
    whole: dict[str, list[float]] = {side: [] for side in SIDES}
    own: dict[str, list[float]] = {side: [] for side in SIDES}
    for request in requests:  # warm
        for side in SIDES:
            calls[side](request)
    for number in range(rounds):
        spent = {side: 0.0 for side in SIDES}
        in_hf = {side: 0.0 for side in SIDES}
        for index, request in enumerate(requests):
            for side in SIDES if (number + index) % 2 else reversed(SIDES):
                sides[side].in_hf = 0.0
                start = clock()
                calls[side](request)
                spent[side] += clock() - start
                in_hf[side] += sides[side].in_hf
        for side in SIDES:
            whole[side].append(spent[side] / len(requests))
            own[side].append((spent[side] - in_hf[side]) / len(requests))
    return {"uncached": measure.ratio(whole, *SIDES), "uncached_own": measure.ratio(own, *SIDES)}


def prompt_updates(sides: dict[str, Side], requests: list[Any], rounds: int) -> dict[str, Any]:
    """From processed fields to the ids with placeholders, without anything before."""
    prepared: dict[str, list[Callable[[], Any]]] = {side: [] for side in SIDES}
    for name, side in sides.items():
        for request in requests:
            update = own_update if name == "generated" else hand_written_update
            prepared[name].append(update(side.processor, request))
    indices = list(range(len(requests)))
    calls = {side: lambda index, p=prepared[side]: p[index]() for side in SIDES}
    return in_turns(calls, indices, rounds, sides)["uncached"]


def own_update(processor: Any, request: Any) -> Callable[[], Any]:
    """The layouts and the placement of one processed request."""
    from mmkit.testing import vllm_path
    from mmkit.vllm_api import pipeline

    prompt, data, kwargs = request
    items = vllm_path.parse_items(processor, data).make_items({})
    prepared = pipeline.Request(prompt, items, options=kwargs)
    plan = processor.pipeline.plan_for_options(kwargs)
    pipeline.process_items(plan, items)

    def call() -> Any:
        pipeline.lay_out_items(plan, items, may_be_larger=bool(kwargs))
        return pipeline.place_items(processor.plan, prepared)

    return call


def hand_written_update(processor: Any, request: Any) -> Callable[[], Any]:
    """The prompt update of one processed request."""
    from mmkit.testing.updates import process_items

    prompt, data, kwargs = request
    processed = process_items(processor, data, kwargs)

    def call() -> Any:
        updates = processor._get_mm_prompt_updates(processed.items, kwargs, processed.kwargs_items)
        return processor._apply_prompt_updates(processor._postprocess_prompt(prompt), updates)

    return call


def peak(call: Callable[[], Any]) -> float:
    """KiB that Python's allocator holds at most during a call, of what the call makes; tensors not
    counted."""
    call()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1] / 1024
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    measure.quiet()
    typer.run(main)
