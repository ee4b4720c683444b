"""Terra's environments over an engine in this process."""

from typing import Any, NamedTuple

import numpy as np
from gymnasium.utils.env_checker import check_env

from examples.terra.environment import EngineDream, Scenes, TerraEnv
from examples.terra.worlds import Episode, TownWorld, make_episode

from .rollouts import generate_by_reference


def test_the_dream_passes_the_checks_of_gymnasium(terra: Any) -> None:
    check_env(TerraEnv(Scenes(TownWorld()), EngineDream(terra), max_steps=3))


class Drive(NamedTuple):
    episode: Episode
    expected: np.ndarray
    """The frames that the reference generates, (steps, 64)."""


def make_drive(seed: int, num_steps: int) -> Drive:
    episode = make_episode(seed, 33)
    tokens = generate_by_reference(episode.frames[None, :3], episode.actions[None], num_steps, keep=20)
    return Drive(episode, tokens[0])


def begin_drive(dream: EngineDream, stream: int, drive: Drive) -> None:
    dream.begin(stream, drive.episode.frames[:3], drive.episode.actions[:2])


def test_drives_of_a_batch_give_the_frames_of_their_rollouts(terra: Any) -> None:
    """One drive lasts for all 27 steps, which are more than the model holds. In the other stream, a drive ends after 10
    steps, and the next one begins.
    """
    long_drive = make_drive(seed=0, num_steps=27)
    first_drive = make_drive(seed=1, num_steps=10)
    second_drive = make_drive(seed=2, num_steps=17)

    dream = EngineDream(terra, keep=20)
    begin_drive(dream, 0, long_drive)
    begin_drive(dream, 1, first_drive)
    drive = first_drive
    drive_step = 0
    for step in range(27):
        if step == 10:
            begin_drive(dream, 1, second_drive)
            drive = second_drive
            drive_step = 0

        frames = dream.step({0: long_drive.episode.actions[2 + step], 1: drive.episode.actions[2 + drive_step]})

        assert np.array_equal(frames[0], long_drive.expected[step]), step
        assert np.array_equal(frames[1], drive.expected[drive_step]), step
        drive_step += 1
