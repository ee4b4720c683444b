"""Train the robot with several seeds, and judge each: ``python -m examples.reacher.seeds --help``."""

from typing import Annotated, Any

import numpy as np
import torch
import typer

from .__main__ import SEEDS
from .train import TRAINING_STEPS, train
from .world import draw_scenes, observe, run_episodes


def main(
    seeds: Annotated[list[int] | None, typer.Option("--seed", help="May be given several times.")] = None,
    steps: Annotated[int, typer.Option(help="Training steps.", min=0)] = TRAINING_STEPS,
    count: Annotated[int, typer.Option(min=30, help="Scenes of each of three seeds.")] = 300,
) -> None:
    """Print how many scenes each model touches the right disc in, in transformers."""
    torch.set_num_threads(1)
    for seed in seeds or [0, 1, 2]:
        model, processor = train(steps, seed)
        touched = [count_touched(model, processor, scene_seed, count) for scene_seed in SEEDS]
        print(f"weights of seed {seed}: {touched} of {count} in the scenes of seeds {list(SEEDS)}", flush=True)


def count_touched(model: Any, processor: Any, scene_seed: int, count: int) -> int:
    """Return how many scenes of a seed end with the right disc touched."""
    scenes = draw_scenes(np.random.default_rng(scene_seed), count)
    episodes = run_episodes(scenes, lambda now: model.act(processor, observe(now)))
    return int(episodes.touched.sum())


if __name__ == "__main__":
    typer.run(main)
