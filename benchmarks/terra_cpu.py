"""Terra on a CPU, in vLLM and in the Hugging Face reference: ``python -m benchmarks.terra_cpu --help``.

The trained checkpoint, float32, greedy, in one process with the same threads, in turns: the reference keeps its KV
cache over the whole rollout, vLLM finds it in the prefix cache. Every round drives episodes that neither has seen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import typer

from . import measure

KINDS = ("vllm", "hf")


def main(
    frames: Annotated[int, typer.Option(min=1, max=22, help="Frames of each rollout.")] = 22,
    rounds: Annotated[int, typer.Option(min=2, help="Rollouts of each kind, in turns.")] = 5,
    streams: Annotated[list[int] | None, typer.Option(help="Videos at once; may be given several times.")] = None,
) -> None:
    """Seconds per frame, and how many times as fast as the reference vLLM is."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from examples.terra import CHECKPOINT, register
    from examples.terra.reference import LlamaActionForCausalLM
    from examples.terra.rollout import VllmTerra

    register()
    engine = VllmTerra(CHECKPOINT)
    reference = LlamaActionForCausalLM.from_pretrained(CHECKPOINT).eval()
    rows = [row(engine, reference, count, frames, rounds) for count in measure.progress(streams or [1, 8], "streams")]
    engine.llm.llm_engine.engine_core.shutdown()
    measure.store("terra_cpu", {"frames": frames, "rounds": rounds, "rows": rows})
    measure.table(
        ["streams", "vLLM, ms/frame", "HF, ms/frame", "times as fast", "ids", "prefix cache"],
        [
            [
                found["streams"],
                f"{found['vllm_ms']:.1f}",
                f"{found['hf_ms']:.1f}",
                f"{found['speedup']:.2f} ({found['low']:.2f}-{found['high']:.2f})",
                "identical" if found["identical"] else "DIFFERENT",
                f"{found['cached']:.1%}",
            ]
            for found in rows
        ],
    )


def row(engine: Any, reference: Any, streams: int, frames: int, rounds: int) -> dict[str, Any]:
    """The figures of one number of streams. A frame counts once, however many streams are generated with it."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    identical, cached = True, []
    for number, (context, actions) in enumerate(episodes(streams, rounds + 1)):
        made = {}
        for kind in KINDS if number % 2 else reversed(KINDS):
            start = time.perf_counter()
            if kind == "vllm":
                steps = list(engine.rollout(context, actions, frames))
                made[kind] = np.stack([step.tokens for step in steps], axis=1)
                # the first frame finds nothing there, by intention
                cached.append(sum(s.cached_tokens for s in steps[1:]) / sum(s.prompt_tokens for s in steps[1:]))
            else:
                made[kind] = referred(reference, context, actions, frames)
            if number:  # the first round warms up
                seconds[kind].append((time.perf_counter() - start) / frames)
        identical &= bool((made["vllm"] == made["hf"]).all())
    found = measure.ratio(seconds, "hf", "vllm")
    return {
        "streams": streams,
        "speedup": found["ratio"],
        "low": found["p10"],
        "high": found["p90"],
        "vllm_ms": found["vllm_ms"],
        "hf_ms": found["hf_ms"],
        "identical": identical,
        "cached": sum(cached) / len(cached),
    }


def referred(reference: Any, context: np.ndarray, actions: np.ndarray, frames: int) -> np.ndarray:
    """The reference's frames, (streams, frames, num_image_patches)."""
    import torch

    made = reference.rollout(torch.from_numpy(context), torch.from_numpy(actions), frames)
    return torch.stack(list(made), dim=1).numpy()


def episodes(streams: int, rounds: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Contexts (streams, 3, num_image_patches) and actions of episodes, others in each round."""
    from examples.terra.world import CONTEXT_FRAMES, make_episode

    for number in range(rounds):
        drawn = [make_episode(1000 + 100 * streams + number * streams + i) for i in range(streams)]
        yield np.stack([e.frames[:CONTEXT_FRAMES] for e in drawn]), np.stack([e.actions for e in drawn])


if __name__ == "__main__":
    measure.quiet()
    typer.run(main)
