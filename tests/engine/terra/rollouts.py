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

TOKENS_OF_ACTION = 6
"""Placeholders of an action."""


def start_engine(engines: ExitStack, model: Path = CHECKPOINT, **options: Any) -> Any:
    """Start an engine of a checkpoint, which ends with the other engines."""
    from examples.terra.rollout import VllmTerra

    terra = VllmTerra(model, dtype="float32", seed=0, **options)
    engines.callback(terra.llm.llm_engine.engine_core.shutdown)
    return terra


@cache
def load_reference() -> Any:
    return LlamaActionForCausalLM.from_pretrained(CHECKPOINT).eval()


def generate_by_reference(
    frames: np.ndarray, actions: np.ndarray, count: int = 22, context: int = CONTEXT_FRAMES, **options: Any
) -> np.ndarray:
    """Return the ids that the reference generates after the first `context` frames, (streams, count, 64)."""
    first_frames = torch.from_numpy(frames[:, :context])
    steps = load_reference().rollout(first_frames, torch.from_numpy(actions), count, **options)
    return torch.stack(list(steps), dim=1).numpy()


def generate(terra: Any, frames: np.ndarray, actions: np.ndarray, count: int = 22, **options: Any) -> np.ndarray:
    """Return the ids that the engine generates, (streams, count, 64)."""
    steps = terra.rollout(frames[:, :CONTEXT_FRAMES], actions, count, **options)
    return np.stack([step.tokens for step in steps], axis=1)


def stack_episodes(seeds: range, num_frames: int = 25) -> tuple[np.ndarray, np.ndarray]:
    """Return frames (streams, num_frames, 64) and actions (streams, num_frames - 1, 6, 3) of held-out episodes."""
    frames = []
    actions = []
    for seed in seeds:
        episode = make_episode(seed, num_frames)
        frames.append(episode.frames)
        actions.append(episode.actions)
    return np.stack(frames), np.stack(actions)


def make_prompt(episode: Episode, frames: int = 3) -> list[int]:
    """Return the ids of the first frames, each with the placeholders of the action after it."""
    ids: list[int] = []
    for frame in episode.frames[:frames].tolist():
        ids += frame
        ids += [PAD] * TOKENS_OF_ACTION
    return ids


def make_request(episode: Episode) -> dict[str, Any]:
    """Return the request for the fourth frame."""
    return {"prompt_token_ids": make_prompt(episode), "multi_modal_data": {"actions": list(episode.actions[:3])}}
