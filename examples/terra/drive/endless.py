"""Drive without end in what vLLM dreams: `python -m examples.terra.drive.endless --help`.

The town's own driver looks at each frame that is generated, and chooses the next action by it, as a person does on the
page.
"""

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from tqdm import tqdm

from .. import CHECKPOINT, register
from ..drafts import FRAME_TOKENS
from ..rollout import Drive, VllmTerra
from ..worlds import CONTEXT_FRAMES, TownWorld
from .metrics import blobs, kept, vehicles
from .simulator import EGO, Town, render

SPAN = 100
"""Frames of the first and of the last part."""


def main(
    model: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = CHECKPOINT,
    frames: Annotated[int, typer.Option(min=2 * SPAN, help="Frames of each drive.")] = 1000,
    drives: Annotated[int, typer.Option(min=1, help="Drives, one after the other.")] = 4,
    first: Annotated[int, typer.Option(min=0, help="Seed of the first one.")] = 200,
    keep: Annotated[int, typer.Option(min=1, help="Frames that are left when the model is full.")] = 13,
    out: Annotated[Path, typer.Option(help="Where to write the figures.")] = Path("out/drive-endless.json"),
) -> None:
    """Print how many of the town's vehicles are shown, and how many of those that the town itself would have after the
    frame before, in the first and in the last frames of each drive."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    register()
    engine, world = VllmTerra(model, drafts=FRAME_TOKENS), TownWorld(model)
    rows = [drive(engine, world, seed, frames, keep) for seed in range(first, first + drives)]
    for seed, row in enumerate(rows, first):
        parts = ", ".join(f"{name} {begin:.1%} -> {end:.1%}" for name, (begin, end) in row["parts"].items())
        print(f"drive {seed}: {parts}; {row['rate']:.1f} frames per second")
    means = {name: np.mean([row["parts"][name] for row in rows], axis=0).tolist() for name in rows[0]["parts"]}
    rate = float(np.mean([row["rate"] for row in rows]))
    print(", ".join(f"{name} {begin:.1%} -> {end:.1%}" for name, (begin, end) in means.items()), f"{rate:.1f} frames/s")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"frames": frames, "first": first, "means": means, "rate": rate, "drives": rows}) + "\n")


def drive(engine: VllmTerra, world: TownWorld, seed: int, frames: int, keep: int) -> dict[str, Any]:
    """The figures of one drive: shares in the first SPAN frames and in the last, and frames per second."""
    episode, town = world.episode(seed, CONTEXT_FRAMES), Town(seed)
    stream = Drive(engine.config, episode.frames, episode.actions, keep)
    there = Counter(blob.colour for blob in blobs(episode.pictures[-1]))
    picture, shares, seconds = episode.pictures[-1], [], 0.0
    for _ in tqdm(range(frames), f"drive {seed}", unit="frame"):
        action = steered(town, picture)
        step = engine.step([stream], action[None])
        seconds += step.seconds
        picture = world.pictures(step.tokens)[0]
        shown = blobs(picture)
        counts = (Counter(blob.colour for blob in shown) & there).total(), len(shown)
        shares.append((*np.divide(counts, there.total()), kept(shown, blobs(render(town.vehicles)))))
    names = ("vehicles there", "spots for each vehicle", "in place by the frame before")
    parts = [np.mean(part, axis=0) for part in (shares[:SPAN], shares[-SPAN:])]
    return {"rate": frames / seconds, "parts": dict(zip(names, np.transpose(parts).tolist(), strict=True))}


def steered(town: Town, picture: np.ndarray) -> np.ndarray:
    """The action that the driver of a town chooses by what a picture shows, which becomes the town's own state."""
    ego, shown = town.vehicles[0], vehicles(picture)
    if shown and shown[0].colour == EGO:
        # what is not to be seen: where the driver wants to go, and how fast
        town.vehicles = [replace(shown[0], line=ego.line, speed=ego.speed), *shown[1:]]
    return town.advance()


if __name__ == "__main__":
    typer.run(main)
