"""Where the time of a request goes: ``python -m benchmarks.stages --help``.

Two engines in this process, one request at a time, in turns: LLaVA with images of 336 x 336 pixels,
in vLLM's hand-written class and in the generated one; and Terra, which vLLM does not know. Weights
of the former are random, and small: what the model costs is not the point here.

The stages are those of vLLM's own statistics (``--enable-mm-processor-stats``); what these leave
out of the processor's time is added here. Whose code ran is told by a profile of the same requests:
the time of each Python function, and of what it calls in C, belongs to the package that it is in.
"""

from __future__ import annotations

import cProfile
import os
import pstats
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from . import measure
from .render import TEMPLATE, enlarged, message

STAGES = {
    "get_mm_hashes": "hashes",
    "get_cache_missing_items": "look-up in the cache",
    "apply_hf_processor": "processing of items",
    "merge_mm_kwargs": "merge with the cache",
    "apply_prompt_updates": "placing in the prompt",
    "encoder_forward": "encoder",
}
REST = "all else: decoding, tokenizer, scheduler, language model"
PACKAGES = ("mmkit", "vllm", "transformers", "torch", "PIL")


def main(
    rounds: Annotated[int, typer.Option(min=3, help="Requests to each engine, in turns.")] = 40,
) -> None:
    """Milliseconds of each stage of a request, and whose code ran."""
    report: dict[str, Any] = {"rounds": rounds, "rows": []}
    with tempfile.TemporaryDirectory(prefix="mmkit-bench-") as folder:
        asks = dict(engines(Path(folder)))
        times: dict[str, dict[str, list[float]]] = {what: defaultdict(list) for what in asks}
        for number in measure.progress(range(rounds + 2), "requests"):
            for what, ask in asks.items():
                taken = timed(*ask, number)
                if number > 1:  # the first ones warm up
                    for stage, seconds in taken.items():
                        times[what][stage].append(seconds)
        for what, ask in asks.items():
            shares = profiled(*ask, range(rounds + 2, rounds + 22))
            stages = {stage: statistics.median(own) * 1000 for stage, own in times[what].items()}
            report["rows"].append({"what": what, "ms": stages, "shares": shares})
    columns = ["", *(row["what"] for row in report["rows"])]
    measure.store("stages", report, columns, lines(report))


def lines(report: dict[str, Any]) -> list[list[str]]:
    """A line for each stage, and for each package."""
    rows = report["rows"]
    stages = [[s, *(f"{r['ms'][s]:.2f} ms" for r in rows)] for s in (*STAGES.values(), REST)]
    packages = (*PACKAGES, "others")
    return stages + [
        [f"the processor's time in {p}", *(f"{r['shares'].get(p, 0):.0%}" for r in rows)]
        for p in packages
    ]


Send = Callable[[], Any]
Ask = tuple[Any, Callable[[int], Send]]


def engines(folder: Path) -> Iterator[tuple[str, Ask]]:
    """By name, an engine, and what makes a request with a number, to be sent by a call."""
    from vllm import LLM, SamplingParams

    from examples import llava_like
    from examples.terra import CHECKPOINT, register
    from examples.terra.worlds import make_episode
    from tests import oracles

    llava_like.register()
    register()
    options = {"dtype": "float32", "block_size": 32, "enforce_eager": True}
    options |= {"enable_mm_processor_stats": True, "disable_log_stats": True}
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    checkpoint = str(enlarged("llava", oracles.SYSTEMS["llava"].checkpoint, folder / "llava"))
    for what, architecture in (
        ("LLaVA, hand-written", None),
        ("LLaVA, generated", llava_like.ARCHITECTURE),
    ):
        overrides = {"architectures": [architecture]} if architecture else {}
        llm = LLM(checkpoint, load_format="dummy", hf_overrides=overrides, **options)

        def chat(number: int, llm: Any = llm) -> Send:
            form = {"chat_template": TEMPLATE, "chat_template_content_format": "string"}
            return partial(llm.chat, message(number), sampling, use_tqdm=False, **form)

        yield what, (llm, chat)
    terra = LLM(str(CHECKPOINT), skip_tokenizer_init=True, **options)
    (pad,) = terra.llm_engine.renderer.mm_processor.plan.embed_ids

    def frame(number: int) -> Send:
        episode = make_episode(number)
        ids = [token for own in episode.frames[:24].tolist() for token in [*own, *[pad] * 6]]
        prompt = {"prompt_token_ids": ids, "multi_modal_data": {"actions": episode.actions[:24]}}
        return partial(terra.generate, [prompt], sampling, use_tqdm=False)

    yield "Terra, 24 actions", (terra, frame)


def timed(llm: Any, ask: Callable[[int], Send], number: int) -> dict[str, float]:
    """Seconds of each stage of one request."""
    from vllm.benchmarks.mm_processor import collect_mm_processor_stats

    send = ask(number)
    start = time.perf_counter()
    send()
    whole = time.perf_counter() - start
    stats = collect_mm_processor_stats(llm.llm_engine)
    stages = {STAGES[name]: sum(stats.get(f"{name}_secs", [0.0])) for name in STAGES}
    return {**stages, REST: whole - sum(stages.values())}


def profiled(llm: Any, ask: Callable[[int], Send], numbers: range) -> dict[str, float]:
    """The share of each package in the time of the processor."""
    profile = cProfile.Profile()
    processor: Any = type(llm.llm_engine.renderer.mm_processor)
    theirs = processor.apply
    processor.apply = lambda *args, **kwargs: profile.runcall(theirs, *args, **kwargs)
    try:
        for number in numbers:
            ask(number)()
    finally:
        processor.apply = theirs
    seconds: Counter[str] = Counter()
    for function, (_, _, own, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if function[0] != "~":
            seconds[package(function[0])] += own
            continue
        for caller, (_, _, by_caller, _) in callers.items():
            seconds[package(caller[0])] += by_caller
    return {name: value / seconds.total() for name, value in seconds.items()}


def package(file: str) -> str:
    """Whose a source file is."""
    if file.startswith("<mmkit") or f"{os.sep}examples{os.sep}" in file:
        return "mmkit"
    parts = Path(file).parts
    return next((name for name in PACKAGES if name in parts), "others")


if __name__ == "__main__":
    measure.quiet()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    typer.run(main)
