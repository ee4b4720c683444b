"""Episodes and requests for the tests of this folder."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from examples.terra import CHECKPOINT
from examples.terra.world import CONTEXT_FRAMES, Episode, make_episode

PAD = 31
"""The placeholder id of the checkpoint."""


def engine(engines: ExitStack, model: Path = CHECKPOINT, **options: Any) -> Any:
    """An engine of a checkpoint, which ends with the others."""
    from examples.terra.rollout import VllmTerra

    terra = VllmTerra(model, dtype="float32", seed=0, **options)
    engines.callback(terra.llm.llm_engine.engine_core.shutdown)
    return terra


def shuffled(actions: np.ndarray) -> np.ndarray:
    """Actions (streams, frames, ...) with those of each stream in another order."""
    return np.stack([own[np.random.default_rng(i).permutation(len(own))] for i, own in enumerate(actions)])


def stacked(seeds: range) -> tuple[np.ndarray, np.ndarray]:
    """Frames (streams, 25, 64) and actions (streams, 24, 6, 3) of held-out episodes."""
    episodes = [make_episode(seed) for seed in seeds]
    return np.stack([e.frames for e in episodes]), np.stack([e.actions for e in episodes])


def generate(terra: Any, frames: np.ndarray, actions: np.ndarray, count: int = 22) -> np.ndarray:
    """Generated tokens, (streams, count, 64)."""
    return np.stack([step.tokens for step in terra.rollout(frames[:, :CONTEXT_FRAMES], actions, count)], axis=1)


def prompt_of(episode: Episode) -> list[int]:
    """Three frames, each with the placeholders of what the car does after it."""
    return [token for frame in episode.frames[:3].tolist() for token in [*frame, *[PAD] * 6]]


def request(episode: Episode) -> dict[str, Any]:
    """For the fourth frame."""
    return {"prompt_token_ids": prompt_of(episode), "multi_modal_data": {"actions": list(episode.actions[:3])}}
