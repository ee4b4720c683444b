"""One session without end: ``python -m benchmarks.terra_session --help``.

A server of the trained checkpoint, and a client that steers one session of it, frame by frame, far
beyond what the model holds: its window slides. Other sessions, one after the other, tell what it
costs to keep fewer or more frames.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated, Any

import numpy as np
import psutil
import typer

from . import measure

WARM, SPAN = 25, 100
"""Frames that are not looked at, and frames of the first and of the last span."""


def main(
    frames: Annotated[int, typer.Option(min=WARM + 2 * SPAN, help="Of the long session.")] = 1000,
    keep: Annotated[int, typer.Option(help="Frames that are left after a slide.")] = 13,
    others: Annotated[
        list[int] | None, typer.Option(help="Other numbers; may be given several times.")
    ] = None,
    other_frames: Annotated[
        int, typer.Option(min=WARM + 2 * SPAN, help="Of each other session.")
    ] = 225,
) -> None:
    """Milliseconds per frame, early and late, memory, and what a slide costs."""
    from examples.terra import CHECKPOINT
    from examples.terra.serve_demo import OPTIONS
    from mmkit.serve import Client
    from mmkit.serve.process import Server

    with Server(CHECKPOINT, *OPTIONS) as server, Client(server.url) as client:
        rows = [session(server, client, keep, frames)]
        for other in measure.progress(others or [4, 24], "others"):
            rows.append(session(server, client, other, other_frames))
    columns = ["frames", "kept", "a slide each", "a frame", "with a slide"]
    columns += ["the last 100 to the first", "the engine's memory"]
    columns += ["tokens read again, per frame", "of these from the cache"]
    cells = [
        [str(frames if row is rows[0] else other_frames), str(row["keep"]),
         f"{row['every']} frames",
         f"{row['frame_ms']:.0f} ms", f"{row['slide_ms']:.0f} ms",
         f"{row['last_ms'] / row['first_ms']:.2f}",
         f"{row['engine_mib'][1] / row['engine_mib'][0]:.3f}",
         f"{row['again']:.0f}", f"{row['cached']:.1%}"]
        for row in rows
    ]  # fmt: skip
    measure.store("terra_session", {"rows": rows}, columns, cells)


def session(server: Any, client: Any, keep: int, frames: int) -> dict[str, Any]:
    """The figures of one session."""
    from examples.terra.serve_demo import SAMPLING, prompt_of
    from examples.terra.worlds import CONTEXT_FRAMES, make_episode

    episode = make_episode(keep, CONTEXT_FRAMES + frames)
    context, actions = episode.frames[:CONTEXT_FRAMES], episode.actions
    prompt = prompt_of(client, context)
    items = {"actions": actions[:CONTEXT_FRAMES]}
    chunks, seconds, spent, memory = [], [], [], []
    start = time.perf_counter()
    with client.session(prompt, items, window={"keep": keep}, **SAMPLING) as open_session:
        chunks.append(open_session.first)
        seconds.append(time.perf_counter() - start)
        for action in measure.progress(actions[CONTEXT_FRAMES:], f"keep={keep}"):
            start = time.perf_counter()
            chunks.append(open_session.next({"actions": [action]}))
            seconds.append(time.perf_counter() - start)
            if len(chunks) in (WARM, WARM + SPAN, frames - SPAN, frames):
                spent.append(cpu_seconds(server))
            if len(chunks) in (WARM + SPAN, frames):
                memory.append(resident(server))
    ms = np.array(seconds) * 1000
    slid = np.array([chunk.slid is not None for chunk in chunks])
    slides = [chunk.usage for chunk in chunks if chunk.slid]
    again = sum(usage.prompt_tokens for usage in slides)
    return {
        "keep": keep,
        "frames": frames,
        "resubmitted_cached": resubmitted(client, keep),
        "every": int(np.diff(np.flatnonzero(slid)).max()),
        "first_ms": float(ms[WARM : WARM + SPAN].mean()),
        "last_ms": float(ms[-SPAN:].mean()),
        "spans_ms": [
            float(ms[first : first + SPAN].mean()) for first in range(WARM, frames - SPAN + 1, SPAN)
        ],
        # beside other work on the machine, the processors' time says more
        "first_cpu_ms": (spent[1] - spent[0]) / SPAN * 1000,
        "last_cpu_ms": (spent[-1] - spent[-2]) / SPAN * 1000,
        "frame_ms": statistics.median(ms[WARM:][~slid[WARM:]].tolist() or [float("nan")]),
        "slide_ms": statistics.median(ms[slid].tolist()),
        "mean_ms": float(ms[WARM:].mean()),
        "again": again / frames,
        "cached": sum(u.prompt_tokens_details.cached_tokens for u in slides) / again,
        "server_mib": [server for server, _ in memory],
        "engine_mib": [engine for _, engine in memory],
    }


def resubmitted(client: Any, keep: int) -> float:
    """The share of prompt tokens that the prefix cache has, where each frame is a request of its
    own: 72 frames beyond those that the model holds, of an episode that it has not seen."""
    from examples.terra import CHECKPOINT
    from examples.terra.configuration import LlamaActionConfig
    from examples.terra.rollout import Drive
    from examples.terra.serve_demo import SAMPLING
    from examples.terra.worlds import make_episode

    config = LlamaActionConfig.from_pretrained(CHECKPOINT)
    known = config.num_temporal_embeddings
    episode = make_episode(1000 + keep, known + 72)
    drive = Drive(config, episode.frames[:known], episode.actions[: known - 1], keep)
    usages = []
    for action in episode.actions[known - 1 : known + 71]:
        request = drive.request(action)
        items = request["multi_modal_data"]
        answer = client.generate(request["prompt_token_ids"], items, **SAMPLING)
        drive.add(np.array(answer.choices[0].token_ids))
        usages.append(answer.usage)
    cached = sum(usage.prompt_tokens_details.cached_tokens for usage in usages)
    return cached / sum(usage.prompt_tokens for usage in usages)


def resident(server: Any) -> tuple[float, float]:
    """MiB of the server's process, and of those that it has started."""
    sizes = [process.memory_info().rss / 2**20 for process in processes(server)]
    return sizes[0], sum(sizes[1:])


def cpu_seconds(server: Any) -> float:
    """What all of them have computed."""
    return sum(sum(process.cpu_times()[:2]) for process in processes(server))


def processes(server: Any) -> list[psutil.Process]:
    """The server's process, and those that it has started."""
    process = psutil.Process(server.process.pid)
    return [process, *process.children(recursive=True)]


if __name__ == "__main__":
    measure.quiet()
    typer.run(main)
