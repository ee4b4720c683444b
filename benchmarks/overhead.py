"""Generated processors against hand-written ones: ``python -m benchmarks.overhead --help``.

The same requests through both, in one process, in turns: the stored cases of `tests/data/oracles`
that vLLM's own class takes, too. vLLM has none for Terra's actions, a series and a record: there
the other side is `benchmarks.hand_written`.

A request is parsed and processed as vLLM's renderer does it. The time in the Hugging Face processor
(the call of vLLM's `InputProcessingContext.call_hf_processor`, or of mmkit's `HFCall`) is taken
apart, since it is not the library's: `uncached_own` is all the rest, vLLM's base classes included.
Times are those of the one thread on its core, so that other processes of the machine take no part
in them.
"""

from __future__ import annotations

import statistics
import tracemalloc
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
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
"""Models of vLLM."""

RATIOS = {
    "uncached": "uncached",
    "uncached_own": "uncached, without HF",
    "cached": "cached",
    "prompt_update": "prompt update",
}
"""What the table shows as ratios, with the heads of its columns."""

PARTS = (*RATIOS, "startup")
"""What is measured. The table shows start-up in milliseconds, which happen once, beside the seconds
that a process takes to start."""

COLUMNS = (
    "model",
    *RATIOS.values(),
    "one request, uncached",
    "peak memory",
    "start-up",
    "start-up by hand",
)

SIDES = ("generated", "hand_written")

Request = tuple[list[int], dict[str, Any], dict[str, Any]]
"""The ids of a prompt, the items by modality, and the `mm_processor_kwargs`."""

Call = Callable[[], Any]

_CALL_OF_MMKIT = HFCall.__call__


def main(
    rounds: Annotated[
        int, typer.Option(min=3, help="How often each request goes through each processor.")
    ] = 30,
    systems: Annotated[
        list[str] | None, typer.Option(help="Which models; may be given several times.")
    ] = None,
) -> None:
    """Measure the cost of generated processors, as ratios to vLLM's own."""
    figures: dict[str, dict[str, Any]] = {}
    for name in measure.show_progress(systems or [*SYSTEMS, *KINDS], "overhead"):
        figures[name] = measure_system(name, rounds)
    report = {"rounds": rounds, "systems": figures, "median": find_medians(figures)}
    measure.store("overhead", report, COLUMNS, make_rows(report))


def make_rows(report: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table of a report, one for each model and one for the medians."""
    rows = []
    for name, parts in report["systems"].items():
        row = [name]
        for part in RATIOS:
            row.append(f"{parts[part]['ratio']:.2f}")
        row.append(f"{parts['uncached']['generated_ms']:.2f} ms")
        peak = parts["peak_kib"]
        row.append(f"{peak['generated'] / peak['hand_written']:.2f}")
        for side in SIDES:
            row.append(f"{parts['startup'][f'{side}_ms']:.1f} ms")
        rows.append(row)
    row = ["median"]
    for part in RATIOS:
        row.append(f"{report['median'][part]:.2f}")
    rows.append([*row, "", "", "", ""])
    return rows


def find_medians(figures: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the median ratio of each part over the models of vLLM; over all, if there are none."""
    names = [name for name in figures if name in SYSTEMS] or list(figures)
    medians = {}
    for part in RATIOS:
        medians[part] = statistics.median(figures[name][part]["ratio"] for name in names)
    return medians


@dataclass
class Side:
    """One processor, and the time that its last request spent in the Hugging Face processor."""

    processor: Any
    seconds_in_hf: float = 0.0

    def __post_init__(self) -> None:
        is_generated = hasattr(self.processor, "plan")
        context = self.processor.info.ctx
        call: Any = _CALL_OF_MMKIT if is_generated else context.call_hf_processor

        def call_and_time(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds_in_hf += clock() - start

        if is_generated:
            HFCall.__call__ = call_and_time  # type: ignore[method-assign]
        else:
            object.__setattr__(context, "call_hf_processor", call_and_time)


def measure_system(system: str, rounds: int) -> dict[str, Any]:
    """Return the figures of one model."""
    if system in KINDS:
        sides, requests = make_sides_by_hand(system)
    else:
        sides, requests = make_sides_of_vllm(system)
    num_items = 0
    for _, data, _ in requests:
        num_items += sum(len(items) for items in data.values())
    figures: dict[str, Any] = {"requests": len(requests), "items": num_items}

    uncached = {name: list_renderings(side, requests) for name, side in sides.items()}
    figures |= measure_in_turns(uncached, rounds, sides)
    cached = {}
    for name, side in sides.items():
        cached[name] = list_renderings(side, requests, make_cache(side.processor))
    # some items are processed here, too: DeepSeek-VL2 does not cache those of more than two
    figures["cached"] = measure_in_turns(cached, rounds, sides)["uncached_own"]
    updates = {name: prepare_updates(side.processor, requests) for name, side in sides.items()}
    figures["prompt_update"] = measure_in_turns(updates, rounds, sides)["uncached"]
    starts = {name: [partial(start_engine, side.processor)] for name, side in sides.items()}
    figures["startup"] = measure_in_turns(starts, max(3, rounds // 3), sides)["uncached"]
    figures["peak_kib"] = {name: measure_peak(calls) for name, calls in uncached.items()}
    return figures


# -- the two sides ---------------------------------------------------------------------------------


def make_sides_of_vllm(name: str) -> tuple[dict[str, Side], list[Request]]:
    """Return both processors of a model of vLLM, and requests.

    These are the stored cases with items that both take, with one result.
    """
    from tests import oracles

    sides = {
        "generated": Side(oracles.processor(name)),
        "hand_written": Side(oracles.hand_written(name)),
    }
    requests: list[Request] = []
    for case in oracles.SYSTEMS[name].cases():
        if "error" in case or not case["items"]:
            continue
        kwargs = case.get("mm_processor_kwargs", {})
        request = case["prompt_token_ids"], oracles.items_of(case), kwargs
        try:
            generated = render(sides["generated"], request)
            hand_written = render(sides["hand_written"], request)
        except Exception:  # one that vLLM's class refuses, or crashes on
            continue
        if generated["prompt_token_ids"] == hand_written["prompt_token_ids"]:
            requests.append(request)
    return sides, requests


def make_sides_by_hand(name: str) -> tuple[dict[str, Side], list[Request]]:
    """Return both processors of a modality of `benchmarks.hand_written`, and requests.

    Raises:
        RuntimeError: the classes differ in a result.
    """
    from mmkit.vllm_api import checkpoint_processors

    kind = KINDS[name]
    config = checkpoint_processors.load_config_for_spec(kind.folder)
    sides = {
        "generated": Side(checkpoint_processors.make_processor(kind.spec.classes, config)),
        "hand_written": Side(checkpoint_processors.make_processor(kind.make_classes(), config)),
    }
    requests: list[Request] = [(ids, {kind.name: items}, {}) for ids, items in kind.requests]
    for request in requests:
        difference = find_difference(
            read_result(sides["generated"], request), read_result(sides["hand_written"], request)
        )
        if difference:
            raise RuntimeError(f"{name}: {difference}")
    return sides, requests


def read_result(side: Side, request: Request) -> Any:
    """Return the outcome of a request, without the hashes, which each side makes in its way."""
    from mmkit.testing import vllm_path

    outcome = vllm_path.collect_outcome(render(side, request))
    # the features have the hashes, too
    return replace(outcome, hashes={}, features={})


# -- the steps -------------------------------------------------------------------------------------


def render(side: Side, request: Request, cache: Any = None) -> Any:
    """Parse and process a request, and place its items."""
    from mmkit.testing import vllm_path

    prompt, data, kwargs = request
    return vllm_path.render(side.processor, prompt, data, kwargs, cache)


def list_renderings(side: Side, requests: Sequence[Request], cache: Any = None) -> list[Call]:
    """Return a call for each request, which renders it."""
    return [partial(render, side, request, cache) for request in requests]


def make_cache(processor: Any) -> Any:
    """Return an empty processor cache, which is large enough."""
    from mmkit.testing import vllm_path

    return vllm_path.Caches(processor, 1.0, pair=False).sender


def prepare_updates(processor: Any, requests: Sequence[Request]) -> list[Call]:
    """Return a call for each request, from its processed fields to the ids with placeholders."""
    if hasattr(processor, "plan"):
        return [prepare_generated_update(processor, request) for request in requests]
    return [prepare_hand_written_update(processor, request) for request in requests]


def prepare_generated_update(processor: Any, request: Request) -> Call:
    """Return a call that makes the layouts of a processed request, and places its items."""
    from mmkit.testing import vllm_path
    from mmkit.vllm_api import pipeline

    prompt, data, kwargs = request
    items = vllm_path.parse_items(processor, data).make_items({})
    prepared = pipeline.ProcessorRequest(prompt, items, options=kwargs)
    plan = processor.pipeline.plan_for_options(kwargs)
    pipeline.process_items(plan, items)

    def update() -> Any:
        pipeline.lay_out_items(plan, items, may_be_larger=bool(kwargs))
        return pipeline.place_items(processor.plan, prepared)

    return update


def prepare_hand_written_update(processor: Any, request: Request) -> Call:
    """Return a call that makes the prompt update of a processed request."""
    from mmkit.testing.updates import process_items

    prompt, data, kwargs = request
    processed = process_items(processor, data, kwargs)

    def update() -> Any:
        updates = processor._get_mm_prompt_updates(processed.items, kwargs, processed.kwargs_items)
        return processor._apply_prompt_updates(processor._postprocess_prompt(prompt), updates)

    return update


def start_engine(processor: Any) -> None:
    """Do what the engine does at its start.

    It makes the processor, which binds a spec, asks for the most tokens of an item, and has the
    dummy request processed.
    """
    from mmkit.vllm_api import checkpoint_processors

    classes = Classes(type(processor.info), type(processor.dummy_inputs), type(processor))
    config = copy(processor.info.ctx.model_config)  # nothing is cached for the copy
    fresh = checkpoint_processors.make_processor(classes, config)
    counts = {}
    for name, limit in fresh.info.allowed_mm_limits.items():
        if limit is None or limit:
            counts[name] = 1
    fresh.info.get_mm_max_tokens_per_item(fresh.info.ctx.model_config.max_model_len, counts)
    fresh.get_dummy_mm_inputs(counts)


# -- times and memory ------------------------------------------------------------------------------


def measure_in_turns(
    calls: dict[str, list[Call]], rounds: int, sides: dict[str, Side]
) -> dict[str, Any]:
    """Return the times of the same calls on both sides, with and without the time in HF."""
    whole: dict[str, list[float]] = {name: [] for name in SIDES}
    without_hf: dict[str, list[float]] = {name: [] for name in SIDES}
    num_calls = len(calls[SIDES[0]])
    for index in range(num_calls):  # warm
        for name in SIDES:
            calls[name][index]()
    for number in range(rounds):
        seconds = {name: 0.0 for name in SIDES}
        seconds_in_hf = {name: 0.0 for name in SIDES}
        for index in range(num_calls):
            # each side is as often the first as the second
            order = SIDES if (number + index) % 2 else SIDES[::-1]
            for name in order:
                call = calls[name][index]
                sides[name].seconds_in_hf = 0.0
                start = clock()
                call()
                seconds[name] += clock() - start
                seconds_in_hf[name] += sides[name].seconds_in_hf
        for name in SIDES:
            whole[name].append(seconds[name] / num_calls)
            without_hf[name].append((seconds[name] - seconds_in_hf[name]) / num_calls)
    return {
        "uncached": measure.compare(whole, *SIDES),
        "uncached_own": measure.compare(without_hf, *SIDES),
    }


def measure_peak(calls: Sequence[Call]) -> float:
    """Return the most KiB that Python's allocator holds of what calls make.

    Tensors are not counted. The calls run once before.
    """

    def call_all() -> list[Any]:
        return [call() for call in calls]

    call_all()
    tracemalloc.start()
    try:
        call_all()
        return tracemalloc.get_traced_memory()[1] / 1024
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    measure.quiet_libraries()
    typer.run(main)
