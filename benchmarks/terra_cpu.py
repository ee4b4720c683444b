"""Terra on a CPU, in vLLM and in the Hugging Face reference: ``python -m benchmarks.terra_cpu
--help``.

The trained checkpoint, float32, greedy, in one process with the same threads, in turns: the
reference keeps its KV cache over the whole rollout, vLLM finds it in the prefix cache. Every round
drives episodes that neither has seen. With drafts, vLLM checks what the stream's own frames say of
the next one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from multiprocessing import get_context
from typing import Annotated, Any

import numpy as np
import typer

from examples.terra.drafts import FRAME_TOKENS

from . import measure


def main(
    frames: Annotated[int, typer.Option(min=1, max=22, help="Frames of each rollout.")] = 22,
    rounds: Annotated[int, typer.Option(min=2, help="Rollouts of each kind, in turns.")] = 5,
    streams: Annotated[
        list[int] | None, typer.Option(help="Videos at once; may be given several times.")
    ] = None,
    drafts: Annotated[
        list[int] | None, typer.Option(help="Most drafted tokens; may be given several times.")
    ] = None,
) -> None:
    """Seconds per frame, and how many times as fast as the reference vLLM is."""
    rows = []
    for drafted in measure.progress(drafts or [0, FRAME_TOKENS], "drafts"):
        # vLLM starts one engine on a CPU per process
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            rows += process.submit(part, drafted, streams or [1, 8], frames, rounds).result()
    cells = [
        [str(r["streams"]), str(r["drafts"] or ""), f"{r['steps']:.0f}",
         f"{r['vllm_ms']:.0f} ms", f"{r['together']['hf_ms']:.0f} ms",
         measure.shown(r["together"]), measure.shown(r["each"]) if r["streams"] > 1 else "",
         "identical" if r["identical"] else "different", f"{r['cached']:.1%}"]
        for r in rows
    ]  # fmt: skip
    columns = ["streams", "drafts", "steps", "vLLM, per frame", "HF, per frame", "times as fast"]
    columns += ["than one by one", "ids", "prefix cache"]
    report = {"frames": frames, "rounds": rounds, "rows": rows}
    measure.store("terra_cpu", report, columns, cells)


def part(drafts: int, streams: list[int], frames: int, rounds: int) -> list[dict[str, Any]]:
    """The rows of one number of drafts, in this process."""
    measure.quiet()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from examples.terra import CHECKPOINT, register
    from examples.terra.reference import LlamaActionForCausalLM
    from examples.terra.rollout import VllmTerra

    register()
    engine = VllmTerra(CHECKPOINT, drafts=drafts)
    reference = LlamaActionForCausalLM.from_pretrained(CHECKPOINT).eval()
    rows = [
        {"streams": n, "drafts": drafts, **row(engine, reference, n, frames, rounds)}
        for n in streams
    ]
    engine.llm.llm_engine.engine_core.shutdown()
    return rows


def row(engine: Any, reference: Any, streams: int, frames: int, rounds: int) -> dict[str, Any]:
    """The figures of one number of streams: against the reference with all of them in one batch
    (`together`), and one after the other (`each`). A frame counts once, however many streams are
    generated with it."""
    kinds = ["vllm", "hf", "hf_each"][: 2 + (streams > 1)]
    inner, step, calls = engine.llm.llm_engine, engine.llm.llm_engine.step, count()
    inner.step = lambda: (next(calls), step())[1]
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    identical, cached = True, []
    for number, (context, actions) in enumerate(episodes(streams, rounds + 1)):
        timings = {}
        for kind in kinds if number % 2 else reversed(kinds):
            start = time.perf_counter()
            if kind == "vllm":
                steps = list(engine.rollout(context, actions, frames))
                timings[kind] = np.stack([step.tokens for step in steps], axis=1)
                # the first frame finds nothing there, by intention
                cached.append(
                    sum(s.cached_tokens for s in steps[1:])
                    / sum(s.prompt_tokens for s in steps[1:])
                )
            elif kind == "hf":
                timings[kind] = referred(reference, context, actions, frames)
            else:
                one = [
                    referred(reference, context[i : i + 1], actions[i : i + 1], frames)
                    for i in range(streams)
                ]
                timings[kind] = np.concatenate(one)
            if number:  # the first round warms up
                seconds[kind].append((time.perf_counter() - start) / frames)
        identical &= all(bool((timings["vllm"] == other).all()) for other in timings.values())
    inner.step = step
    together = measure.ratio(seconds, "hf", "vllm")
    return {
        "steps": next(calls) / frames / (rounds + 1),
        "vllm_ms": together.pop("vllm_ms"),
        "together": together,
        "each": measure.ratio(seconds, kinds[-1], "vllm"),
        "identical": identical,
        "cached": sum(cached) / len(cached),
    }


def referred(reference: Any, context: np.ndarray, actions: np.ndarray, frames: int) -> np.ndarray:
    """The reference's frames, (streams, frames, num_image_patches)."""
    import torch

    rollout = reference.rollout(torch.from_numpy(context), torch.from_numpy(actions), frames)
    return torch.stack(list(rollout), dim=1).numpy()


def episodes(streams: int, rounds: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Contexts (streams, 3, num_image_patches) and actions of episodes, others in each round."""
    from examples.terra.world import CONTEXT_FRAMES, make_episode

    for number in range(rounds):
        drawn = [make_episode(1000 + 100 * streams + number * streams + i) for i in range(streams)]
        yield (
            np.stack([e.frames[:CONTEXT_FRAMES] for e in drawn]),
            np.stack([e.actions for e in drawn]),
        )


if __name__ == "__main__":
    measure.quiet()
    typer.run(main)
