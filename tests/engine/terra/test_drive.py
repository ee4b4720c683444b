"""From camera frames to camera frames: the world model of a simulator's drives."""

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from examples.terra import worlds
from examples.terra.drafts import FRAME_TOKENS
from examples.terra.drive import CHECKPOINT
from examples.terra.reference import LlamaActionForCausalLM
from examples.terra.world import CONTEXT_FRAMES

from .rollouts import engine, generate, shuffled

EPISODES = 5


@pytest.fixture(scope="module")
def drive(engines: ExitStack) -> Any:
    """An engine of the drives' checkpoint, with drafts of frames."""
    return engine(engines, CHECKPOINT, drafts=FRAME_TOKENS)


def test_greedy_ids_are_those_of_the_reference_and_follow_the_actions(
    drive: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Complete rollouts of 5 drives never seen, and with the actions of each in another order."""
    world = worlds.of_config(drive.config)
    episodes = [world.episode(seed) for seed in range(EPISODES)]
    frames, actions = np.stack([e.tokens for e in episodes]), np.stack([e.actions for e in episodes])
    tokens = generate(drive, frames, actions)
    reference = LlamaActionForCausalLM.from_pretrained(CHECKPOINT).eval()
    expected = reference.rollout(torch.from_numpy(frames[:, :CONTEXT_FRAMES]), torch.from_numpy(actions), 22)
    assert np.array_equal(tokens, torch.stack(list(expected), dim=1).numpy())

    def in_place(tokens: np.ndarray) -> float:
        pairs = zip(tokens, episodes, strict=True)
        return float(np.mean([world.compare(own, CONTEXT_FRAMES, e)["ego_in_place"] for own, e in pairs]))

    share, share_shuffled = in_place(tokens), in_place(generate(drive, frames, shuffled(actions)))
    with capsys.disabled():
        print(f"\n{EPISODES} drives: ego vehicle in place in {share:.0%}, {share_shuffled:.0%} with shuffled actions")
    assert share > 2 * share_shuffled
