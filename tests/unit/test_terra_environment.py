"""Terra's environments over the road world itself, which needs no engine."""

import numpy as np
import pytest

from examples.terra.environment import TerraEnv, TerraVectorEnv, Tiles, TrueTiles
from examples.terra.world import drive, make_action, make_episode
from mmkit import InputError

STAY, EAST = make_action(0, 0), make_action(0, 1)


def test_a_move_from_one_frame_is_that_of_the_episode_and_leaves_no_road() -> None:
    """Whatever is asked for, the car is on the road that it was on, or nowhere."""
    for episode in map(make_episode, range(20)):
        for before, action, after in zip(episode.frames, episode.actions, episode.frames[1:], strict=False):
            assert np.array_equal(drive(before, action), after)
        frame, reach = episode.frames[0], range(-3, 4)
        moves = {(rows, cols): drive(frame, make_action(rows, cols)) for rows in reach for cols in reach}
        assert all(after is None for (rows, cols), after in moves.items() if (rows and cols) or abs(rows + cols) > 2)
        assert sum(after is not None for after in moves.values()) in (5, 9)


def test_reward_and_end_are_the_users() -> None:
    seen = []

    def reward(before, action, after):
        seen.append((before, action, after))
        return 0.5

    ended = lambda before, action, after: len(seen) == 2  # noqa: E731
    env = TerraEnv(Tiles([3]), TrueTiles(), reward=reward, ended=ended, max_steps=3)
    picture, info = env.reset()
    last = make_episode(3).frames[2]
    assert np.array_equal(info["tokens"], last)
    assert [env.step(STAY)[1:4] for _ in range(3)] == [(0.5, False, False), (0.5, True, False), (0.5, False, True)]
    before, action, after = seen[0]
    for given, expected in ((before.tokens, last), (before.picture, picture), (action, STAY), (after.tokens, last)):
        assert np.array_equal(given, expected)


def test_several_are_each_as_one() -> None:
    """With the seeds that follow each other, and again after an end."""
    rng = np.random.default_rng(0)
    several = TerraVectorEnv(Tiles(), TrueTiles(), 3, max_steps=2)
    singles = [TerraEnv(Tiles(), TrueTiles(), max_steps=2) for _ in range(3)]
    pictures, info = several.reset(seed=5)
    expected = [single.reset(seed=5 + i) for i, single in enumerate(singles)]
    for number in range(6):
        assert np.array_equal(pictures, [one[0] for one in expected])
        assert np.array_equal(info["tokens"], [one[-1]["tokens"] for one in expected])
        actions = np.stack([EAST if rng.random() < 0.5 else STAY for _ in singles])
        pictures, _, terminated, truncated, info = several.step(actions)
        if number % 3 == 2:
            expected = [single.reset() for single in singles]
        else:
            expected = [single.step(action) for single, action in zip(singles, actions, strict=True)]
        assert truncated.tolist() == [number % 3 == 1] * 3
        assert not terminated.any()


@pytest.mark.parametrize("actions", [np.zeros((6, 3)), np.zeros((2, 6, 3), complex), "east"])
def test_other_actions_are_refused(actions) -> None:
    env = TerraVectorEnv(Tiles(), TrueTiles(), 2)
    env.reset(seed=0)
    with pytest.raises(InputError, match=r"^action: expected an array \(2, 6, 3\) of numbers, got "):
        env.step(actions)
