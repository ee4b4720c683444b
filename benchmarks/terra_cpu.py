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
from itertools import count
from multiprocessing import get_context
from typing import Annotated, Any

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

_rollout: Any = None
"""What generates frames in this process."""


def main(
    frames: Annotated[int, typer.Option(min=1, max=22, help="Frames of each rollout.")] = 22,
    rounds: Annotated[int, typer.Option(min=2, help="Rollouts of each kind, in turns.")] = 5,
    streams: Annotated[
        list[int] | None, typer.Option(help="Videos at once; may be given several times.")
    ] = None,
) -> None:
    """Steps and milliseconds per frame, and how many times as fast drafts of frames are."""
    with ExitStack() as stack:
        # vLLM starts one engine on a CPU per process
        processes = {
            kind: stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
            for kind in KINDS
        }
        for kind in measure.progress(KINDS, "engines"):
            processes[kind].submit(start, kind).result()
        rows = [row(processes, n, frames, rounds) for n in streams or [1, 8]]
        for process in processes.values():
            process.submit(stop).result()
    report = {"frames": frames, "rounds": rounds, "rows": rows}
    measure.store("terra_cpu", report, COLUMNS, [line for row in rows for line in lines(row)])


def row(
    processes: dict[str, ProcessPoolExecutor], streams: int, frames: int, rounds: int
) -> dict[str, Any]:
    """The figures of one number of streams. A frame counts once, however many streams are generated
    with it."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    steps: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cached: list[float] = []
    identical = True
    for number in measure.progress(range(rounds + 1), f"{streams} streams"):
        seed = 1000 + 100 * streams + number * streams
        tokens = {}
        for kind in KINDS if number % 2 else reversed(KINDS):
            done = processes[kind].submit(rollout, range(seed, seed + streams), frames)
            tokens[kind], took, stepped, share = done.result()
            if number:  # the first round warms up
                seconds[kind].append(took / frames)
                steps[kind].append(stepped / frames)
                cached += [share] * (kind == "none")
        identical &= all(np.array_equal(tokens["hf"], other) for other in tokens.values())
    return {
        "streams": streams,
        "steps": {kind: float(np.mean(steps[kind])) for kind in KINDS},
        "ms": {kind: float(np.median(seconds[kind])) * 1000 for kind in KINDS},
        "times": {
            kind: measure.ratio(seconds, kind, "frames") for kind in KINDS if kind != "frames"
        },
        "cached": float(np.mean(cached)),
        "identical": identical,
    }


def lines(row: dict[str, Any]) -> list[list[str]]:
    """The lines of a table, one for each kind."""
    return [
        [
            str(row["streams"]),
            name,
            f"{row['steps'][kind]:.1f}",
            f"{row['ms'][kind]:.0f} ms",
            f"{1000 * row['streams'] / row['ms'][kind]:.0f}",
            measure.shown(row["times"][kind]) if kind in row["times"] else "",
            "identical" if row["identical"] else "different",
        ]
        for kind, name in KINDS.items()
    ]


# -- in the processes ------------------------------------------------------------------------------


def start(kind: str) -> None:
    """Load what generates frames in this process."""
    global _rollout
    measure.quiet()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from examples.terra import CHECKPOINT, drafts, register
    from examples.terra.reference import LlamaActionForCausalLM
    from examples.terra.rollout import VllmTerra

    if kind == "hf":
        _rollout = LlamaActionForCausalLM.from_pretrained(CHECKPOINT).eval().rollout
        return
    register()
    options: dict[str, Any] = {
        "none": {},
        "ngrams": {"speculative_config": drafts.ngrams(drafts.NGRAM_TOKENS)},
        "frames": {"drafts": drafts.FRAME_TOKENS},
    }[kind]
    _rollout = VllmTerra(CHECKPOINT, **options).rollout


def rollout(seeds: range, frames: int) -> tuple[np.ndarray, float, int, float]:
    """Tokens (streams, frames, num_image_patches), the seconds that they took, the steps of the
    model, and the share of the prompts after the first that the prefix cache had."""
    import torch

    from examples.terra.worlds import CONTEXT_FRAMES, make_episode

    episodes = [make_episode(seed) for seed in seeds]
    context = np.stack([episode.frames[:CONTEXT_FRAMES] for episode in episodes])
    actions = np.stack([episode.actions for episode in episodes])
    terra, calls = _rollout.__self__, count()
    if isinstance(terra, torch.nn.Module):
        begun = time.perf_counter()
        steps = list(_rollout(torch.from_numpy(context), torch.from_numpy(actions), frames))
        took = time.perf_counter() - begun
        tokens = torch.stack(steps, dim=1).numpy()
        return tokens, took, frames * tokens.shape[-1], 0.0
    inner, step = terra.llm.llm_engine, terra.llm.llm_engine.step
    inner.step = lambda: (next(calls), step())[1]
    begun = time.perf_counter()
    generated = list(_rollout(context, actions, frames))
    took = time.perf_counter() - begun
    inner.step = step
    later = generated[1:] or generated
    cached = sum(f.cached_tokens for f in later) / sum(f.prompt_tokens for f in later)
    return np.stack([frame.tokens for frame in generated], axis=1), took, next(calls), cached


def stop() -> None:
    """End the engine of this process, if there is one."""
    if llm := getattr(_rollout.__self__, "llm", None):
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    measure.quiet()
    typer.run(main)
