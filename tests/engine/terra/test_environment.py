"""Terra's environments over an engine in this process."""

from typing import Any

import numpy as np
from gymnasium.utils.env_checker import check_env

from examples.terra.environment import EngineDream, TerraEnv, Tiles, TrueTiles
from examples.terra.learn import WAYPOINTS, chance, environments
from examples.terra.world import make_episode


def test_gymnasium_takes_the_dream(terra: Any) -> None:
    check_env(TerraEnv(Tiles(), EngineDream(terra), max_steps=3))


def test_drives_of_one_batch_are_each_the_episode(terra: Any) -> None:
    """With ends at different times, and beyond what the model holds."""
    drives = {seed: make_episode(seed, num_frames=33) for seed in (0, 1, 2)}
    dream = EngineDream(terra, keep=20)
    dream.begin(0, drives[0].frames[:3], drives[0].actions[:2])
    dream.begin(1, drives[1].frames[:5], drives[1].actions[:4])
    for step in range(27):
        if step == 10:
            dream.begin(1, drives[2].frames[:3], drives[2].actions[:2])
        other, at = (1, 5 + step) if step < 10 else (2, step - 7)
        frames = dream.step({0: drives[0].actions[2 + step], 1: drives[other].actions[at - 1]})
        assert np.array_equal(frames[0], drives[0].frames[3 + step]), step
        assert np.array_equal(frames[1], drives[other].frames[at]), step


def test_a_vector_of_dreams_is_a_vector_of_worlds(terra: Any) -> None:
    """Rewards and ends of the task that `examples.terra.learn` learns, as long as the cars keep to the roads."""
    dreamt, true = (environments(dream, 3, range(20)) for dream in (EngineDream(terra), TrueTiles()))
    policy = chance(0, legal=True)
    (_, info), (_, expected) = dreamt.reset(seed=1), true.reset(seed=1)
    for _ in range(12):
        assert np.array_equal(info["tokens"], expected["tokens"])
        actions = WAYPOINTS[policy(info["tokens"])]
        (*results, info), (*of_world, expected) = dreamt.step(actions), true.step(actions)
        assert all(map(np.array_equal, results, of_world))
