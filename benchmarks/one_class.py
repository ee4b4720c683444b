"""A class of transformers that vLLM runs as it is: ``python -m benchmarks.one_class --help``.

The time-series model by the class that was trained, and by a class for vLLM before vLLM's Llama:
the same checkpoint, each in a process of its own, in turns. It runs on a GPU where there is one.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from typing import Annotated, Any

import typer

from . import measure

KINDS = ("one_class", "two_classes")
COLUMNS = ["requests at once", "two classes", "one class", "times as long"]
MIB = 2**20

_llm: Any = None
"""The engine of this process."""


def main(
    tokens: Annotated[int, typer.Option(min=1, max=100, help="Tokens of each answer.")] = 100,
    rounds: Annotated[int, typer.Option(min=2, help="Of each class, in turns.")] = 21,
    eager: Annotated[bool, typer.Option("--eager", help="Compile nothing.")] = False,
) -> None:
    """Measure the time per token and the memory of each."""
    with ExitStack() as stack:
        # vLLM starts one engine on a CPU per process
        processes = {}
        for kind in KINDS:
            process = ProcessPoolExecutor(1, get_context("spawn"))
            processes[kind] = stack.enter_context(process)
        for kind in measure.show_progress(KINDS, "engines"):
            processes[kind].submit(start_engine, kind, eager).result()
        figures = []
        for batch in (1, 8):
            figures.append(measure_batch(processes, batch, tokens, rounds))
        memory = {}
        for kind, process in processes.items():
            memory[kind] = process.submit(measure_memory).result()
        for process in processes.values():
            process.submit(stop_engine).result()
    rows = []
    for figure in figures:
        times = [f"{figure[f'{kind}_ms']:.2f} ms" for kind in reversed(KINDS)]
        rows.append([str(figure["batch"]), *times, measure.format_ratio(figure)])
    rows.append(["MiB of memory", *(f"{memory[kind]:.0f}" for kind in reversed(KINDS)), ""])
    report = {"tokens": tokens, "rounds": rounds, "compiled": not eager, "mib": memory}
    report["rows"] = figures
    measure.store("one_class", report, COLUMNS, rows)


def measure_batch(
    processes: dict[str, ProcessPoolExecutor], batch: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Return the figures of one number of requests at once.

    Raises:
        AssertionError: the classes answer otherwise. On a GPU the ids after the end of an answer
            are not compared: they mean nothing, and rounding decides them.
    """
    import torch

    from examples.series.waves import ANSWER_WORDS

    num_compared = ANSWER_WORDS if torch.cuda.is_available() else tokens
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in measure.show_progress(range(rounds + 1), f"{batch} requests"):
        answers = []
        # each kind is as often first as last
        order = KINDS if number % 2 else tuple(reversed(KINDS))
        for kind in order:
            elapsed, ids = processes[kind].submit(generate, batch, tokens).result()
            answers.append([answer[:num_compared] for answer in ids])
            if number:  # the first round warms up
                seconds[kind].append(elapsed / tokens)
        assert answers[0] == answers[1]
    return {"batch": batch, **measure.compare(seconds, *KINDS)}


# -- in the processes ------------------------------------------------------------------------------


def start_engine(kind: str, eager: bool) -> None:
    """Start the engine of this process."""
    global _llm
    measure.quiet_libraries()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # the plugin of the examples registers the other class by the same name
    os.environ["VLLM_PLUGINS"] = "mmkit"
    from vllm import LLM

    from examples import series
    from examples.series.configuration import WavesConfig
    from mmkit import serve_transformers

    if kind == "one_class":
        serve_transformers("examples.series.reference:WavesForCausalLM", WavesConfig)
    else:
        series.register()
    # a GPU has room for the engines of both classes
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "block_size": 32}
    options["gpu_memory_utilization"] = 0.3
    _llm = LLM(str(series.CHECKPOINT), enforce_eager=eager, seed=0, **options)


def generate(batch: int, tokens: int) -> tuple[float, list[list[int]]]:
    """Return the seconds of some requests at once, and the ids of their answers."""
    from vllm import SamplingParams

    from examples.series.waves import FIRST_TEST_SEED, PROMPT, make_wave

    requests = []
    for seed in range(FIRST_TEST_SEED, FIRST_TEST_SEED + batch):
        items = {"series": make_wave(seed).series}
        requests.append({"prompt": PROMPT, "multi_modal_data": items})
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    results = _llm.generate(requests, sampling, use_tqdm=False)
    elapsed = time.perf_counter() - start
    return elapsed, [list(result.outputs[0].token_ids) for result in results]


def measure_memory() -> float:
    """Return the MiB of memory that this process shares with no other one."""
    import psutil

    return float(psutil.Process().memory_full_info().uss / MIB)


def stop_engine() -> None:
    """Stop the engine of this process."""
    _llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    typer.run(main)
