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
    """An episode whose first `context` frames are given.

    Attributes:
        expected: the frames after them that the reference generates, (steps, 64).
    """

    episode: Episode
    context: int
    expected: np.ndarray

    def begin(self, dream: EngineDream, stream: int) -> None:
        dream.begin(stream, self.episode.frames[: self.context], self.episode.actions[: self.context - 1])

    def action(self, step: int) -> np.ndarray:
        """Return the action that leads to the frame of a step."""
        return self.episode.actions[self.context - 1 + step]


def make_drive(seed: int, context: int, num_steps: int) -> Drive:
    episode = make_episode(seed, 33)
    tokens = generate_by_reference(episode.frames[None], episode.actions[None], num_steps, context, keep=20)
    return Drive(episode, context, tokens[0])


def test_drives_of_a_batch_give_the_frames_of_their_rollouts(terra: Any) -> None:
    """One drive lasts for all 8 steps, of which the model holds 5. In the other stream, a drive ends after 4 steps, and
    the next one begins.
    """
    long_drive = make_drive(seed=0, context=20, num_steps=8)
    first_drive = make_drive(seed=1, context=3, num_steps=4)
    second_drive = make_drive(seed=2, context=3, num_steps=4)

    dream = EngineDream(terra, keep=20)
    long_drive.begin(dream, 0)
    first_drive.begin(dream, 1)
    drive = first_drive
    drive_step = 0
    for step in range(8):
        if step == 4:
            second_drive.begin(dream, 1)
            drive = second_drive
            drive_step = 0

        frames = dream.step({0: long_drive.action(step), 1: drive.action(drive_step)})

        assert np.array_equal(frames[0], long_drive.expected[step]), step
        assert np.array_equal(frames[1], drive.expected[drive_step]), step
        drive_step += 1
