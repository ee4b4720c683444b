"""Episodes and requests for the tests of this folder."""

from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.terra import CHECKPOINT
from examples.terra.configuration import LlamaActionConfig
from examples.terra.reference import LlamaActionForCausalLM
from examples.terra.worlds import CONTEXT_FRAMES, Episode, make_episode

PAD = LlamaActionConfig.from_pretrained(CHECKPOINT).pad_token_id
"""The placeholder id of the checkpoint."""


def engine(engines: ExitStack, model: Path = CHECKPOINT, **options: Any) -> Any:
    """An engine of a checkpoint, which ends with the others."""
    from examples.terra.rollout import VllmTerra

    terra = VllmTerra(model, dtype="float32", seed=0, **options)
    engines.callback(terra.llm.llm_engine.engine_core.shutdown)
    return terra


@cache
def reference() -> Any:
    return LlamaActionForCausalLM.from_pretrained(CHECKPOINT).eval()


def expected(
    frames: np.ndarray, actions: np.ndarray, count: int = 22, known: int = CONTEXT_FRAMES, **options: Any
) -> np.ndarray:
    """What the reference generates after so many frames, (streams, count, 64)."""
    steps = reference().rollout(torch.from_numpy(frames[:, :known]), torch.from_numpy(actions), count, **options)
    return torch.stack(list(steps), dim=1).numpy()


def generate(terra: Any, frames: np.ndarray, actions: np.ndarray, count: int = 22, **options: Any) -> np.ndarray:
    """What the engine generates, (streams, count, 64)."""
    steps = terra.rollout(frames[:, :CONTEXT_FRAMES], actions, count, **options)
    return np.stack([step.tokens for step in steps], axis=1)


def stacked(seeds: range, num_frames: int = 25) -> tuple[np.ndarray, np.ndarray]:
    """Frames (streams, num_frames, 64) and actions (streams, num_frames - 1, 6, 3) of held-out episodes."""
    episodes = [make_episode(seed, num_frames) for seed in seeds]
    return np.stack([e.frames for e in episodes]), np.stack([e.actions for e in episodes])


def prompt_of(episode: Episode, frames: int = 3) -> list[int]:
    """The first frames, each with the placeholders of the action after it."""
    return [token for frame in episode.frames[:frames].tolist() for token in [*frame, *[PAD] * 6]]


def request(episode: Episode) -> dict[str, Any]:
    """For the fourth frame."""
    return {"prompt_token_ids": prompt_of(episode), "multi_modal_data": {"actions": list(episode.actions[:3])}}
