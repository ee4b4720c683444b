"""Drive without end in what vLLM dreams: `python -m examples.terra.drive.endless --help`.

The town's own driver looks at each frame that is generated, and chooses the next action by it, as a person does on the
page.
"""

import json
import os
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from tqdm import tqdm

from .. import CHECKPOINT, register
from ..drafts import FRAME_TOKENS
from ..rollout import Drive, VllmTerra
from ..worlds import CONTEXT_FRAMES, TownWorld
from .metrics import METRES_NEAR, blobs, ego_distance, hour, persistence, town_of
from .simulator import EGO, Driver, Town

SPAN = 100
"""Frames that a share is of."""


def main(
    model: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = CHECKPOINT,
    frames: Annotated[int, typer.Option(min=2 * SPAN, help="Frames of each drive.")] = 1000,
    drives: Annotated[int, typer.Option(min=1, help="Drives, one after the other.")] = 4,
    first: Annotated[int, typer.Option(min=0, help="Seed of the first one.")] = 200,
    keep: Annotated[int, typer.Option(min=1, help="Frames that are left when the model is full.")] = 13,
    out: Annotated[Path, typer.Option(help="Where to write the figures.")] = Path("out/drive-endless.json"),
) -> None:
    """Let the town itself drive beside the dream, by the same actions, and print which share of its vehicles the dream
    shows, and of those that it would have after the frame before, in the first and in the last frames of each drive."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    register()
    engine = VllmTerra(model, drafts=FRAME_TOKENS)
    world = TownWorld(model)
    rows = []
    for seed in range(first, first + drives):
        row = drive(engine, world, seed, frames, keep)
        rows.append(row)
        show(f"drive {seed}", row["parts"], row["rate"])
    means = {}
    for name in rows[0]["parts"]:
        means[name] = np.mean([row["parts"][name] for row in rows], axis=0).tolist()
    rate = float(np.mean([row["rate"] for row in rows]))
    show("drive all", means, rate)
    report = {"frames": frames, "first": first, "means": means, "rate": rate, "drives": rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report) + "\n")


def show(title: str, parts: dict[str, list[float]], rate: float) -> None:
    """Print the shares in the first and in the last frames, and frames per second."""
    texts = [f"{name} {shares[0]:.1%} -> {shares[-1]:.1%}" for name, shares in parts.items()]
    print(f"{title}: {', '.join(texts)}; {rate:.1f} frames per second")


def drive(engine: VllmTerra, world: TownWorld, seed: int, frames: int, keep: int) -> dict[str, Any]:
    """Return the figures of one drive: shares in each SPAN frames, and frames per second."""
    episode = world.episode(seed, CONTEXT_FRAMES)
    truth = Town(seed)
    for _ in range(CONTEXT_FRAMES - 1):
        truth.advance()
    stream = Drive(engine.config, episode.frames, episode.actions, keep)
    driver = Driver(np.random.default_rng(seed))
    picture = episode.pictures[-1]
    shares = []
    seconds = 0.0
    for _ in tqdm(range(frames), f"drive {seed}", unit="frame"):
        try:
            town = town_of(picture)
        except ValueError:  # the ego vehicle is lost
            town = deepcopy(truth)
        action = driver.action(town)
        step = engine.step([stream], action[None])
        seconds += step.seconds
        picture = world.pictures(step.tokens)[0]
        town.follow(action)
        truth.follow(action)
        shares.append(compare(picture, town, truth))
    parts: dict[str, list[float]] = {name: [] for name in shares[0]}
    for start in range(0, frames, SPAN):
        span = shares[start : start + SPAN]
        for name, means in parts.items():
            means.append(float(np.mean([share[name] for share in span])))
    return {"rate": frames / seconds, "parts": parts}


def compare(picture: np.ndarray, town: Town, truth: Town) -> dict[str, float]:
    """Return what a picture shows, as shares.

    Args:
        picture: uint8 (height, width, 3).
        town: what the frame before it showed, one frame later.
        truth: the town itself.
    """
    shown = blobs(picture)
    expected = blobs(truth.picture())
    colours = Counter(blob.colour for blob in shown)
    true_colours = Counter(blob.colour for blob in expected)
    traffic = [blob for blob in shown if blob.colour != EGO]
    true_traffic = [blob for blob in expected if blob.colour != EGO]
    return {
        "vehicles there": (colours & true_colours).total() / len(expected),
        "others in place": persistence(traffic, true_traffic),
        "ego in place": float(ego_distance(shown, expected) <= METRES_NEAR),
        "spots for each vehicle": len(shown) / len(expected),
        "clock right": float(hour(picture) == truth.hour),
        "in place by the frame before": persistence(shown, blobs(town.picture())),
    }


if __name__ == "__main__":
    typer.run(main)
