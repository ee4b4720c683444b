"""Terra over HTTP: ``python -m examples.terra.serve_demo --help``."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from tqdm import tqdm

from examples.server import Server
from mmkit.serve import Client

from . import CHECKPOINT, register
from .drive.simulator import CELLS
from .rollout import BLOCK_SIZE, VllmTerra
from .worlds import CONTEXT_FRAMES, TownWorld

OPTIONS = ("--skip-tokenizer-init", "--dtype", "float32", "--block-size", str(BLOCK_SIZE))
"""How to serve the checkpoint as `VllmTerra` runs it."""

SAMPLING: dict[str, Any] = {"max_tokens": CELLS**2, "temperature": 0.0, "ignore_eos": True}
"""One frame, greedily."""


def main(
    frames: Annotated[int, typer.Option(min=1, max=22, help="Frames to generate after the three of the context.")] = 22,
    seed: Annotated[int, typer.Option(min=0, help="Episode of the world.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory for serve.json and the server's log.")] = Path("out"),
    log_level: Annotated[str, typer.Option(help="vLLM's log level.", envvar="VLLM_LOGGING_LEVEL")] = "ERROR",
) -> None:
    """Serve Terra, drive it in a closed loop and by one streamed request, and compare with the engine in this process.

    Fails if one id differs.
    """
    os.environ["VLLM_LOGGING_LEVEL"] = log_level
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    out.mkdir(parents=True, exist_ok=True)
    world = TownWorld()
    episode = world.episode(seed)
    context = episode.frames[:CONTEXT_FRAMES]
    print("Starting the server, half a minute ...", flush=True)
    with Server(CHECKPOINT, *OPTIONS, log=out / "serve.log") as server, Client(server.url) as client:
        looped = run_closed_loop(client, context, episode.actions, frames)
        streamed = stream(client, context, episode.actions)
    print("Starting the engine in this process ...", flush=True)
    register()
    engine = VllmTerra(CHECKPOINT)
    steps = tqdm(
        engine.rollout(context[None], episode.actions[None], frames), "   in process", total=frames, unit="frame"
    )
    offline = np.stack([step.tokens[0] for step in steps])
    is_loop_identical = bool((looped == offline).all())
    is_stream_identical = streamed == offline[0].tolist()
    report: dict[str, Any] = {
        "frames": frames,
        "closed_loop_identical": is_loop_identical,
        "stream_identical": is_stream_identical,
    }
    report |= world.compare(looped, CONTEXT_FRAMES, episode)
    (out / "serve.json").write_text(json.dumps(report, indent=2) + "\n")
    words = {True: "identical", False: "DIFFERENT"}
    print(f"{'closed loop':>13}: {frames} frames, ids {words[is_loop_identical]}")
    print(f"{'stream':>13}: {len(streamed)} tokens, ids {words[is_stream_identical]}")
    print(f"{'vehicles':>13}: {report['persistence']:.1%} there")
    if not (is_loop_identical and is_stream_identical):
        raise typer.Exit(1)


def run_closed_loop(client: Client, context: np.ndarray, actions: np.ndarray, frames: int) -> np.ndarray:
    """Return frames (frames, num_image_patches), each generated after the action that the client sends for it."""
    num_context = len(context)
    items = {"actions": actions[:num_context]}
    later_actions = actions[num_context : num_context + frames - 1]
    with client.session(make_prompt(client, context), items, **SAMPLING) as session:
        chunks = [session.first.token_ids]
        for action in tqdm(later_actions, "  closed loop", initial=1, total=frames, unit="frame"):
            chunks.append(session.next({"actions": [action]}).token_ids)
    return np.array(chunks)


def stream(client: Client, context: np.ndarray, actions: np.ndarray) -> list[int]:
    """Return the tokens of the first frame, which come in one event each."""
    tokens: list[int] = []
    for event in client.stream(make_prompt(client, context), {"actions": actions[: len(context)]}, **SAMPLING):
        for choice in event.choices:
            tokens += choice.token_ids
    return tokens


def make_prompt(client: Client, context: np.ndarray) -> list[int]:
    """Return the frames of the context, each with the placeholders of the action after it."""
    (actions,) = client.modalities().modalities
    prompt: list[int] = []
    for frame in context.tolist():
        prompt += frame
        prompt += actions.placeholder or []
    return prompt


if __name__ == "__main__":
    typer.run(main)
