"""One request of 1 to 10,000 items, and prompts of up to 1 M ids: ``python -m benchmarks.scale``.

Both grow linearly if each item, and each id of a prompt, takes as long in a large request as in a
small one. The items are the series and the records of `benchmarks.hand_written`, which has a class
of vLLM for them, too. vLLM takes 999 items of a modality unless `limit_mm_per_prompt` says more, as
here. Nobody sends an unexpanded prompt without a target but by mistake; such a refusal must not
take longer than an answer.

Times are those of the one thread on its core, the fastest of the rounds: other processes of the
machine take the caches of the core away, and a request of 10,000 items fits into none. So the calls
of functions are counted, too, which no other work changes. Memory is the most that Python and numpy
hold at once of what a request makes, which does not count tensors. As in vLLM's server, what exists
before is out of the reach of the garbage collector.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import thread_time as clock
from typing import Annotated, Any

import typer

from . import measure

NUM_ITEMS = (1, 10, 100, 1_000, 10_000)
NUM_IDS = (1_000, 10_000, 100_000, 1_000_000)

BEGINNING = 1
"""The id with which a prompt begins."""

TARGET = 3
"""The id that stands for an item."""

WORDS = (5, 6, 11, 10)
"""Ids of a text."""

METHODS = {
    "expand": "`plan.expand`",
    "outline": "`plan.outline`",
    "refused": "refused: a target is missing",
    "generated": "vLLM's path, generated",
    "hand_written": "vLLM's path, hand-written",
    "generated_cached": "cached, generated",
    "hand_written_cached": "cached, hand-written",
}
"""What is measured, with its name in the tables."""

Call = Callable[[], Any]


@dataclass
class Figure:
    """What one call of growing size costs.

    Attributes:
        name: of the modality, or of what grows.
        method: a key of `METHODS`.
        sizes: the numbers of items or of ids.
        microseconds: of each item or id, by size.
        peak_bytes: of each item or id, by size; of the two largest.
        calls: of functions of Python and of C for each item or id; of the two largest sizes.
    """

    name: str
    method: str
    sizes: list[int] = field(default_factory=list)
    microseconds: list[float] = field(default_factory=list)
    peak_bytes: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """How many times as long an item takes at the largest size as at the size before."""
        return self.microseconds[-1] / self.microseconds[-2]

    @property
    def growth_of_calls(self) -> float:
        """How many times as many calls an item takes at the largest size as at the size before."""
        return self.calls[-1] / self.calls[-2]


def main(
    items: Annotated[int, typer.Option(min=10, help="The most items of a request.")] = 10_000,
    ids: Annotated[int, typer.Option(min=1_000, help="The most ids of a prompt.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(min=1, help="How often each request is made.")] = 7,
) -> None:
    """Measure the time and the memory of each item and of each id, by the size of a request."""
    item_sizes = [size for size in NUM_ITEMS if size <= items]
    id_sizes = [size for size in NUM_IDS if size <= ids]
    of_items: list[Figure] = []
    of_ids: list[Figure] = []
    for name in measure.show_progress(("series", "record"), "scale"):
        system = System(name, max(item_sizes))
        gc.freeze()
        of_items += measure_growth(name, item_sizes, system.list_calls_for_items, rounds)
        if name == "series":
            of_ids += measure_growth("ids", id_sizes, system.list_calls_for_ids, rounds)
    store("scale", "items", of_items, item_sizes, rounds)
    store("scale_ids", "ids", of_ids, id_sizes, rounds)


def store(
    name: str, what: str, figures: Sequence[Figure], sizes: Sequence[int], rounds: int
) -> None:
    """Store the figures of what grows: items, or ids."""
    word = what.removesuffix("s")
    columns = ["" if what == "ids" else "model", "method"]
    columns += [f"{size:,} {what if size > 1 else word}" for size in sizes]
    columns += ["last to the one before", "calls: last to the one before"]
    columns += [f"memory at {size:,}" for size in sizes[-2:]]
    rows = []
    for figure in figures:
        row = [figure.name, METHODS[figure.method]]
        row += [format_time(microseconds) for microseconds in figure.microseconds]
        row += [f"{figure.growth:.2f}", f"{figure.growth_of_calls:.2f}"]
        row += [f"{peak:,.0f} B" for peak in figure.peak_bytes]
        if what == "ids":
            row = row[1:]
        rows.append(row)
    if what == "ids":
        columns = columns[1:]
    report = []
    for figure in figures:
        growths = {"growth": figure.growth, "growth_of_calls": figure.growth_of_calls}
        report.append({**vars(figure), **growths})
    measure.store(name, {"rounds": rounds, "per": word, "rows": report}, columns, rows)


def format_time(microseconds: float) -> str:
    if microseconds < 1:
        return f"{1000 * microseconds:.0f} ns"
    return f"{microseconds:.1f} us"


class System:
    """The plan, the processors and the requests of a modality of `benchmarks.hand_written`.

    Args:
        name: of the modality.
        most: the most items of a request.
    """

    def __init__(self, name: str, most: int) -> None:
        from mmkit.vllm_api import checkpoint_processors

        from .hand_written import KINDS

        kind = KINDS[name]
        # without a limit that is stated, vLLM takes 999
        config = checkpoint_processors.load_config_for_spec(
            kind.folder, limit_mm_per_prompt={kind.name: max(most, 1)}, mm_processor_cache_gb=4
        )
        self._generated = checkpoint_processors.make_processor(kind.spec.classes, config)
        self._hand_written = checkpoint_processors.make_processor(kind.make_classes(), config)
        self._plan = self._generated.plan
        self._modality = kind.name

    def list_calls_for_items(self, size: int) -> dict[str, Call]:
        """Return the calls for a request with so many items, by their key in `METHODS`."""
        prompt = [BEGINNING, *[TARGET, *WORDS] * size]
        calls = self._list_calls(prompt, size)
        calls["refused"] = self._make_refusal(prompt[len(WORDS) + 1 :], size)
        calls["generated_cached"] = self._make_cached(self._generated, prompt, size)
        calls["hand_written_cached"] = self._make_cached(self._hand_written, prompt, size)
        return calls

    def list_calls_for_ids(self, size: int) -> dict[str, Call]:
        """Return the calls for a prompt of so many ids with one item, by their key in `METHODS`."""
        prompt = [BEGINNING, *WORDS * (size // len(WORDS)), TARGET]
        return self._list_calls(prompt, 1)

    def _list_calls(self, prompt: list[int], size: int) -> dict[str, Call]:
        data = self._make_data(size)
        calls: dict[str, Call] = {
            "expand": lambda: self._plan.expand(prompt, data),
            "outline": lambda: self._plan.outline(prompt, data).prompt_token_ids,
        }
        for method, processor in (
            ("generated", self._generated),
            ("hand_written", self._hand_written),
        ):
            calls[method] = make_rendering(processor, prompt, data, None)
        check_equal({method: call() for method, call in calls.items()})
        return calls

    def _make_refusal(self, prompt: list[int], size: int) -> Call:
        """Return a call for a prompt that lacks a target."""
        from mmkit import InputError

        data = self._make_data(size)

        def refuse() -> None:
            with suppress(InputError):
                self._plan.expand(prompt, data)
                raise AssertionError("a prompt without a target is accepted")

        return refuse

    def _make_cached(self, processor: Any, prompt: list[int], size: int) -> Call:
        """Return a call for a request whose items are all in the processor cache."""
        from mmkit.testing import vllm_path

        cache = vllm_path.Caches(processor, 4.0, pair=False).sender
        return make_rendering(processor, prompt, self._make_data(size), cache)

    def _make_data(self, size: int) -> dict[str, list[Any]]:
        """Return items, of which no two are equal, as a caller sends them."""
        import numpy as np

        random = np.random.default_rng(size)
        items: list[Any] = []
        for index in range(size):
            if self._modality == "series":
                shape = (1 + index % 64, 1)
                items.append(random.normal(size=shape).astype(np.float32))
            else:
                joints = random.normal(size=7).astype(np.float32)
                items.append({"joints": joints, "camera": np.zeros((3, 16, 16), np.float32)})
        return {self._modality: items}


def make_rendering(processor: Any, prompt: list[int], data: Any, cache: Any) -> Call:
    """Return a call that parses and processes a request, and returns the ids of its prompt."""
    from mmkit.testing import vllm_path

    return lambda: vllm_path.render(processor, prompt, data, {}, cache)["prompt_token_ids"]


def check_equal(ids: dict[str, list[int]]) -> None:
    """Refuse methods that make different ids of a request.

    Raises:
        RuntimeError: names the first of them.
    """
    first = next(iter(ids))
    for method, of_method in ids.items():
        if list(of_method) != list(ids[first]):
            raise RuntimeError(f"{method}: other ids than {first}")


# -- times and memory ------------------------------------------------------------------------------


def measure_growth(
    name: str, sizes: Sequence[int], list_calls: Callable[[int], dict[str, Call]], rounds: int
) -> list[Figure]:
    """Return the figures of each method, for requests of growing size."""
    figures: dict[str, Figure] = {}
    calls_by_size = {size: list_calls(size) for size in sizes}
    for method in METHODS:
        if method not in calls_by_size[sizes[0]]:
            continue
        figure = figures[method] = Figure(name, method, list(sizes))
        calls = {size: calls_by_size[size][method] for size in sizes}
        for size, seconds in measure_in_turns(calls, rounds).items():
            figure.microseconds.append(1e6 * seconds / size)
        for size in sizes[-2:]:
            figure.peak_bytes.append(measure_peak(calls[size]) / size)
            figure.calls.append(count_calls(calls[size]) / size)
        times = [format_time(microseconds) for microseconds in figure.microseconds]
        print(name, method, *times, flush=True)
    return list(figures.values())


def measure_in_turns(calls: dict[int, Call], rounds: int) -> dict[int, float]:
    """Return the least seconds of a call of each size."""
    fastest: dict[int, float] = {}
    for call in calls.values():
        call()  # warm
    for _ in range(rounds):
        for size, call in calls.items():
            gc.collect()
            start = clock()
            call()
            seconds = clock() - start
            fastest[size] = min(seconds, fastest.get(size, seconds))
    return fastest


def measure_peak(call: Call) -> int:
    """Return the most bytes that Python's allocator holds of what a call makes."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def count_calls(call: Call) -> int:
    """Return how many functions of Python and of C run in a call."""
    count = 0

    def count_event(frame: Any, event: str, value: Any) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1

    sys.setprofile(count_event)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


if __name__ == "__main__":
    measure.quiet_libraries()
    typer.run(main)
