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
from .metrics import METRES_NEAR, blobs, ego_distance, hour, kept, town_of
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
    engine, world = VllmTerra(model, drafts=FRAME_TOKENS), TownWorld(model)
    rows = [drive(engine, world, seed, frames, keep) for seed in range(first, first + drives)]
    means = {name: np.mean([row["parts"][name] for row in rows], axis=0).tolist() for name in rows[0]["parts"]}
    rate = float(np.mean([row["rate"] for row in rows]))
    for title, row in (*enumerate(rows, first), ("all", {"parts": means, "rate": rate})):
        parts = ", ".join(f"{name} {begin:.1%} -> {end:.1%}" for name, (begin, *_, end) in row["parts"].items())
        print(f"drive {title}: {parts}; {row['rate']:.1f} frames per second")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"frames": frames, "first": first, "means": means, "rate": rate, "drives": rows}) + "\n")


def drive(engine: VllmTerra, world: TownWorld, seed: int, frames: int, keep: int) -> dict[str, Any]:
    """The figures of one drive: shares in each SPAN frames, and frames per second."""
    episode, truth = world.episode(seed, CONTEXT_FRAMES), Town(seed)
    for _ in range(CONTEXT_FRAMES - 1):
        truth.advance()
    stream, driver = Drive(engine.config, episode.frames, episode.actions, keep), Driver(np.random.default_rng(seed))
    picture, shares, seconds = episode.pictures[-1], [], 0.0
    for _ in tqdm(range(frames), f"drive {seed}", unit="frame"):
        try:
            town = town_of(picture)
        except ValueError:  # the ego vehicle is lost
            town = deepcopy(truth)
        action = driver.action(town)
        step = engine.step([stream], action[None])
        seconds += step.seconds
        picture = world.pictures(step.tokens)[0]
        for one in (town, truth):
            one.follow(action)
        shares.append(compared(picture, town, truth))
    spans = [shares[first : first + SPAN] for first in range(0, frames, SPAN)]
    parts = {name: [float(np.mean([share[name] for share in span])) for span in spans] for name in shares[0]}
    return {"rate": frames / seconds, "parts": parts}


def compared(picture: np.ndarray, town: Town, truth: Town) -> dict[str, float]:
    """What a picture shows, as shares.

    Args:
        picture: uint8 (height, width, 3).
        town: what the frame before it showed, one frame later.
        truth: the town itself.
    """
    shown, there = blobs(picture), blobs(truth.picture())
    others, true_others = ([blob for blob in spots if blob.colour != EGO] for spots in (shown, there))
    colours, true_colours = (Counter(blob.colour for blob in spots) for spots in (shown, there))
    return {
        "vehicles there": (colours & true_colours).total() / len(there),
        "others in place": kept(others, true_others),
        "ego in place": float(ego_distance(shown, there) <= METRES_NEAR),
        "spots for each vehicle": len(shown) / len(there),
        "clock right": float(hour(picture) == truth.hour),
        "in place by the frame before": kept(shown, blobs(town.picture())),
    }


if __name__ == "__main__":
    typer.run(main)
