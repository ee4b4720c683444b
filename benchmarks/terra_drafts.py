"""Drafts of frames against n-grams and none: ``python -m benchmarks.terra_drafts --help``.

An engine of each kind in a process of its own, one thread each, which take turns: every round, each
rolls the same episodes out, which none has seen.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from . import measure

KINDS = {"none": "none", "ngrams": "n-grams", "frames": "frames"}

_engine: Any = None
"""That of this process."""


def main(
    model: Annotated[
        Path | None, typer.Option(help="Directory of a checkpoint; by default that of the tiles.")
    ] = None,
    frames: Annotated[int, typer.Option(min=1, max=22, help="Frames of each rollout.")] = 22,
    rounds: Annotated[int, typer.Option(min=2, help="Rollouts of each kind, in turns.")] = 7,
    streams: Annotated[
        list[int] | None, typer.Option(help="Videos at once; may be given several times.")
    ] = None,
) -> None:
    """Steps and milliseconds per frame, and how many times as many frames per second drafts of
    frames give."""
    from examples.terra import CHECKPOINT

    model = model or CHECKPOINT
    with ExitStack() as stack:
        # vLLM starts one engine on a CPU per process
        processes = {
            kind: stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
            for kind in KINDS
        }
        for kind in measure.progress(KINDS, "engines"):
            processes[kind].submit(start, kind, model).result()
        rows = [row(processes, n, frames, rounds, model) for n in streams or [1, 8]]
        for process in processes.values():
            process.submit(stop).result()
    cells = [
        [str(row["streams"]), name, f"{row['steps'][kind]:.1f}", f"{row['ms'][kind]:.0f} ms",
         f"{1000 * row['streams'] / row['ms'][kind]:.0f}",
         measure.shown(row["times"][kind]) if kind in row["times"] else "",
         "identical" if row["identical"] else "different"]
        for row in rows
        for kind, name in KINDS.items()
    ]  # fmt: skip
    columns = ["streams", "drafts", "steps", "per frame", "frames/s", "times as fast with frames"]
    of_model = "" if model == CHECKPOINT else f"_{model.parent.name}"
    report = {"model": model.parent.name, "frames": frames, "rounds": rounds, "rows": rows}
    measure.store(f"terra_drafts{of_model}", report, [*columns, "ids"], cells)


def row(
    processes: dict[str, ProcessPoolExecutor], streams: int, frames: int, rounds: int, model: Path
) -> dict[str, Any]:
    """The figures of one number of streams. A frame counts once, however many streams are generated
    with it."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    steps: dict[str, list[float]] = {kind: [] for kind in KINDS}
    identical = True
    for number in measure.progress(range(rounds + 1), f"{streams} streams"):
        seed = 1000 + 100 * streams + number * streams
        tokens = {}
        for kind in KINDS if number % 2 else reversed(KINDS):
            done = processes[kind].submit(rollout, model, range(seed, seed + streams), frames)
            tokens[kind], took, stepped = done.result()
            if number:  # the first round warms up
                seconds[kind].append(took / frames)
                steps[kind].append(stepped / frames)
        identical &= all(np.array_equal(tokens["none"], other) for other in tokens.values())
    return {
        "streams": streams,
        "steps": {kind: float(np.mean(steps[kind])) for kind in KINDS},
        "ms": {kind: float(np.median(seconds[kind])) * 1000 for kind in KINDS},
        "times": {
            kind: measure.ratio(seconds, kind, "frames") for kind in KINDS if kind != "frames"
        },
        "identical": identical,
    }


# -- in the processes ------------------------------------------------------------------------------


def start(kind: str, model: Path) -> None:
    """Start the engine of this process."""
    global _engine
    measure.quiet()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from examples.terra import drafts, register
    from examples.terra.rollout import VllmTerra

    register()
    options: dict[str, Any] = {
        "none": {},
        "ngrams": {"speculative_config": drafts.ngrams(drafts.NGRAM_TOKENS)},
        "frames": {"drafts": drafts.FRAME_TOKENS},
    }[kind]
    _engine = VllmTerra(model, **options)


def rollout(model: Path, seeds: range, frames: int) -> tuple[np.ndarray, float, int]:
    """Tokens (streams, frames, num_image_patches), the seconds that they took, and the engine's
    steps."""
    from examples.terra import worlds
    from examples.terra.world import CONTEXT_FRAMES

    world = worlds.of_config(_engine.config)
    episodes = [world.episode(seed % world.num_episodes) for seed in seeds]
    context = np.stack([episode.tokens[:CONTEXT_FRAMES] for episode in episodes])
    actions = np.stack([episode.actions for episode in episodes])
    inner, step, calls = _engine.llm.llm_engine, _engine.llm.llm_engine.step, count()
    inner.step = lambda: (next(calls), step())[1]
    begun = time.perf_counter()
    generated = list(_engine.rollout(context, actions, frames))
    took = time.perf_counter() - begun
    inner.step = step
    return np.stack([frame.tokens for frame in generated], axis=1), took, next(calls)


def stop() -> None:
    """End the engine of this process."""
    _engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    measure.quiet()
    typer.run(main)
