"""Terra's environments over an engine in this process."""

from typing import Any

import numpy as np
from gymnasium.utils.env_checker import check_env

from examples.terra.environment import EngineDream, Scenes, TerraEnv
from examples.terra.worlds import TownWorld, make_episode

from .rollouts import expected


def test_gymnasium_takes_the_dream(terra: Any) -> None:
    check_env(TerraEnv(Scenes(TownWorld()), EngineDream(terra), max_steps=3))


def test_drives_of_one_batch_are_each_the_rollout(terra: Any) -> None:
    """With ends at different times, and beyond what the model holds."""
    drives = {seed: make_episode(seed, 33) for seed in (0, 1, 2)}
    rolled = {
        seed: expected(drives[seed].frames[None, :known], drives[seed].actions[None], count, keep=20)[0]
        for seed, known, count in ((0, 3, 27), (1, 3, 10), (2, 3, 17))
    }
    dream = EngineDream(terra, keep=20)
    for stream in (0, 1):
        dream.begin(stream, drives[stream].frames[:3], drives[stream].actions[:2])
    for step in range(27):
        if step == 10:
            dream.begin(1, drives[2].frames[:3], drives[2].actions[:2])
        other, at = (1, step) if step < 10 else (2, step - 10)
        frames = dream.step({0: drives[0].actions[2 + step], 1: drives[other].actions[2 + at]})
        assert np.array_equal(frames[0], rolled[0][step]), step
        assert np.array_equal(frames[1], rolled[other][at]), step
