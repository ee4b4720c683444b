"""Terra on a CPU: ``python -m benchmarks.terra_cpu --help``.

The Hugging Face reference, and vLLM without drafts, with n-grams and with drafts of frames: the
trained checkpoint, float32, greedy, each in a process of its own, one thread each, in turns. Every
round rolls episodes out that none has seen.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from . import measure

KINDS = {
    "hf": "Hugging Face",
    "none": "vLLM",
    "ngrams": "vLLM, n-grams",
    "frames": "vLLM, drafts of frames",
}
COLUMNS = ["streams", "", "steps", "per frame", "frames/s", "frames: times as fast", "ids"]

_model: Any = None
"""What generates frames in this process: the reference, or a `VllmTerra`."""


def main(
    frames: Annotated[int, typer.Option(min=1, max=22, help="Frames of each rollout.")] = 22,
    rounds: Annotated[int, typer.Option(min=2, help="Rollouts of each kind, in turns.")] = 5,
    streams: Annotated[
        list[int] | None, typer.Option(help="Videos at once; may be given several times.")
    ] = None,
) -> None:
    """Measure steps and milliseconds per frame, and how many times as fast drafts of frames are."""
    with ExitStack() as stack:
        # vLLM starts one engine on a CPU per process
        processes = {}
        for kind in KINDS:
            process = ProcessPoolExecutor(1, get_context("spawn"))
            processes[kind] = stack.enter_context(process)
        for kind in measure.show_progress(KINDS, "engines"):
            processes[kind].submit(load_model, kind).result()
        figures = []
        for count in streams or [1, 8]:
            figures.append(measure_streams(processes, count, frames, rounds))
        for process in processes.values():
            process.submit(stop_engine).result()
    rows = []
    for figure in figures:
        for kind in KINDS:
            rows.append(format_row(figure, kind))
    report = {"frames": frames, "rounds": rounds, "rows": figures}
    measure.store("terra_cpu", report, COLUMNS, rows)


def measure_streams(
    processes: dict[str, ProcessPoolExecutor], streams: int, frames: int, rounds: int
) -> dict[str, Any]:
    """Return the figures of one number of streams.

    A frame counts once, however many streams are generated with it.
    """
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    steps: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cached: list[float] = []
    identical = True
    for number in measure.show_progress(range(rounds + 1), f"{streams} streams"):
        seed = 1000 + 100 * streams + number * streams
        seeds = range(seed, seed + streams)
        rollouts: dict[str, Rollout] = {}
        # each kind is as often among the first as among the last
        order = KINDS if number % 2 else reversed(KINDS)
        for kind in order:
            rollout = processes[kind].submit(roll_out, seeds, frames).result()
            rollouts[kind] = rollout
            if number:  # the first round warms up
                seconds[kind].append(rollout.seconds / frames)
                steps[kind].append(rollout.steps / frames)
        if number:
            cached.append(rollouts["none"].cached)
        for rollout in rollouts.values():
            identical &= np.array_equal(rollout.tokens, rollouts["hf"].tokens)
    times = {}
    for kind in KINDS:
        if kind != "frames":
            times[kind] = measure.compare(seconds, kind, "frames")
    return {
        "streams": streams,
        "steps": {kind: float(np.mean(steps[kind])) for kind in KINDS},
        "ms": {kind: float(np.median(seconds[kind])) * 1000 for kind in KINDS},
        "times": times,
        "cached": float(np.mean(cached)),
        "identical": identical,
    }


def format_row(figure: dict[str, Any], kind: str) -> list[str]:
    """Return the line of the table for one number of streams and one kind."""
    milliseconds = figure["ms"][kind]
    times = ""
    if kind in figure["times"]:
        times = measure.format_ratio(figure["times"][kind])
    return [
        str(figure["streams"]),
        KINDS[kind],
        f"{figure['steps'][kind]:.1f}",
        f"{milliseconds:.0f} ms",
        f"{1000 * figure['streams'] / milliseconds:.0f}",
        times,
        "identical" if figure["identical"] else "different",
    ]


# -- in the processes ------------------------------------------------------------------------------


class Rollout(NamedTuple):
    """Frames of some episodes.

    Attributes:
        tokens: (streams, frames, num_image_patches).
        seconds: that all frames took.
        steps: of the model.
        cached: the share of the prompts after the first that the prefix cache had.
    """

    tokens: np.ndarray
    seconds: float
    steps: int
    cached: float


def load_model(kind: str) -> None:
    """Load what generates frames in this process."""
    global _model
    measure.quiet_libraries()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from examples.terra import CHECKPOINT, drafts, register
    from examples.terra.reference import LlamaActionForCausalLM
    from examples.terra.rollout import VllmTerra

    if kind == "hf":
        _model = LlamaActionForCausalLM.from_pretrained(CHECKPOINT).eval()
        return
    register()
    options: dict[str, Any] = {}
    if kind == "ngrams":
        options["speculative_config"] = drafts.make_ngram_config(drafts.NGRAM_TOKENS)
    if kind == "frames":
        options["drafts"] = drafts.FRAME_TOKENS
    _model = VllmTerra(CHECKPOINT, **options)


def roll_out(seeds: range, frames: int) -> Rollout:
    """Generate frames of some episodes."""
    import torch

    from examples.terra.worlds import CONTEXT_FRAMES, make_episode

    episodes = [make_episode(seed) for seed in seeds]
    context = np.stack([episode.frames[:CONTEXT_FRAMES] for episode in episodes])
    actions = np.stack([episode.actions for episode in episodes])
    if isinstance(_model, torch.nn.Module):
        return roll_out_reference(context, actions, frames)
    return roll_out_in_engine(context, actions, frames)


def roll_out_reference(context: np.ndarray, actions: np.ndarray, frames: int) -> Rollout:
    """Generate frames with the reference, a step for each token."""
    import torch

    start = time.perf_counter()
    generated = list(_model.rollout(torch.from_numpy(context), torch.from_numpy(actions), frames))
    seconds = time.perf_counter() - start
    tokens = torch.stack(generated, dim=1).numpy()
    return Rollout(tokens, seconds, steps=frames * tokens.shape[-1], cached=0.0)


def roll_out_in_engine(context: np.ndarray, actions: np.ndarray, frames: int) -> Rollout:
    """Generate frames with vLLM, and count the steps of its engine."""
    engine = _model.llm.llm_engine
    step = engine.step
    num_steps = 0

    def step_and_count() -> Any:
        nonlocal num_steps
        num_steps += 1
        return step()

    engine.step = step_and_count
    start = time.perf_counter()
    generated = list(_model.rollout(context, actions, frames))
    seconds = time.perf_counter() - start
    engine.step = step
    after_first = generated[1:] or generated
    cached_tokens = sum(frame.cached_tokens for frame in after_first)
    prompt_tokens = sum(frame.prompt_tokens for frame in after_first)
    tokens = np.stack([frame.tokens for frame in generated], axis=1)
    return Rollout(tokens, seconds, num_steps, cached_tokens / prompt_tokens)


def stop_engine() -> None:
    """End the engine of this process, if there is one."""
    engine = getattr(_model, "llm", None)
    if engine is not None:
        engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    measure.quiet_libraries()
    typer.run(main)
