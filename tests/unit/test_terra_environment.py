"""Terra's environments over the town itself, which needs no engine."""

import numpy as np
import pytest

from examples.terra.drive.simulator import METRES, NUM_WAYPOINTS
from examples.terra.environment import Scenes, TerraEnv, TerraVectorEnv, TrueTown
from examples.terra.learn import JUDGED, actions_of, always, crashed, returns
from examples.terra.worlds import TownWorld, make_episode
from mmkit import InputError

WORLD = TownWorld()
STAY = np.zeros((NUM_WAYPOINTS, 3), np.float32)
AHEAD = STAY + np.outer(np.arange(1, NUM_WAYPOINTS + 1) / NUM_WAYPOINTS, [METRES, 0, 0]).astype(np.float32)


def test_the_town_goes_on_from_what_a_frame_shows() -> None:
    """And the codebook draws frames never seen as they were."""
    for episode in map(make_episode, range(8)):
        assert np.array_equal(WORLD.pictures(episode.frames), episode.pictures)
        truth = TrueTown(WORLD)
        truth.begin(0, episode.frames[:3], episode.actions[:2])
        for action, frame in zip(episode.actions[2:], episode.frames[3:], strict=True):
            assert np.array_equal(truth.step({0: action})[0], frame)


def test_reward_and_end_are_the_users() -> None:
    seen = []

    def reward(before, action, after):
        seen.append((before, action, after))
        return 0.5

    ended = lambda before, action, after: len(seen) == 2  # noqa: E731
    env = TerraEnv(Scenes(WORLD, [3]), TrueTown(WORLD), reward=reward, ended=ended, max_steps=3)
    picture, info = env.reset()
    last = make_episode(3, 3).frames[2]
    assert np.array_equal(info["tokens"], last)
    steps = [env.step(STAY) for _ in range(3)]
    assert [step[1:4] for step in steps] == [(0.5, False, False), (0.5, True, False), (0.5, False, True)]
    before, action, after = seen[0]
    for given, expected in ((before.tokens, last), (before.picture, picture), (action, STAY)):
        assert np.array_equal(given, expected)
    assert np.array_equal(after.picture, steps[0][0])


def test_several_are_each_as_one() -> None:
    """With the seeds that follow each other, and again after an end."""
    rng = np.random.default_rng(0)
    several = TerraVectorEnv(Scenes(WORLD), TrueTown(WORLD), 3, max_steps=2)
    singles = [TerraEnv(Scenes(WORLD), TrueTown(WORLD), max_steps=2) for _ in range(3)]
    pictures, info = several.reset(seed=5)
    expected = [single.reset(seed=5 + i) for i, single in enumerate(singles)]
    for number in range(6):
        assert np.array_equal(pictures, [one[0] for one in expected])
        assert np.array_equal(info["tokens"], [one[-1]["tokens"] for one in expected])
        assert np.array_equal(pictures, WORLD.pictures(info["tokens"]))
        actions = np.stack([AHEAD if rng.random() < 0.5 else STAY for _ in singles])
        pictures, _, terminated, truncated, info = several.step(actions)
        if number % 3 == 2:
            expected = [single.reset() for single in singles]
        else:
            expected = [single.step(action) for single, action in zip(singles, actions, strict=True)]
        assert truncated.tolist() == [number % 3 == 1] * 3
        assert not terminated.any()


@pytest.mark.parametrize("actions", [np.zeros((6, 3)), np.zeros((2, 6, 3), complex), "east"])
def test_other_actions_are_refused(actions) -> None:
    env = TerraVectorEnv(Scenes(WORLD), TrueTown(WORLD), 2)
    env.reset(seed=0)
    with pytest.raises(InputError, match=r"^action: expected an array \(2, 6, 3\) of numbers, got "):
        env.step(actions)


def test_who_stands_gets_nothing_and_who_races_ends_in_a_vehicle() -> None:
    town = TrueTown(WORLD)
    assert not returns(town, always(0), 4).any()
    racing = returns(town, always(3), 8)
    assert 0 < racing.mean() < 2 * 20 * 0.9
    env = TerraEnv(Scenes(WORLD, JUDGED), town, ended=crashed)
    picture, _ = env.reset(seed=0)
    over = False
    while not over:
        picture, _, over, *_ = env.step(actions_of(picture[None], np.array([3]))[0])
