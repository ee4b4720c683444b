"""Terra's environments over the town itself, which needs no engine."""

from typing import Any

import numpy as np
import pytest

from examples.terra.drive.simulator import METRES, NUM_WAYPOINTS
from examples.terra.environment import Frame, Scenes, TerraEnv, TerraVectorEnv, TrueTown
from examples.terra.learn import JUDGED, choose_always, is_crash, make_actions, measure_returns
from examples.terra.worlds import TownWorld, make_episode
from mmkit import InputError

WORLD = TownWorld()
STAY = np.zeros((NUM_WAYPOINTS, 3), np.float32)
AHEAD = STAY + np.outer(np.arange(1, NUM_WAYPOINTS + 1) / NUM_WAYPOINTS, [METRES, 0, 0]).astype(np.float32)


def test_the_town_goes_on_from_what_a_frame_shows() -> None:
    """And the codebook draws frames never seen as they were."""
    for seed in range(8):
        episode = make_episode(seed)
        assert np.array_equal(WORLD.pictures(episode.frames), episode.pictures)
        truth = TrueTown(WORLD)
        truth.begin(0, episode.frames[:3], episode.actions[:2])
        for action, frame in zip(episode.actions[2:], episode.frames[3:], strict=True):
            assert np.array_equal(truth.step({0: action})[0], frame)


def test_reward_and_end_are_the_users() -> None:
    calls = []

    def reward(before: Frame, action: np.ndarray, after: Frame) -> float:
        calls.append((before, action, after))
        return 0.5

    def is_over(before: Frame, action: np.ndarray, after: Frame) -> bool:
        return len(calls) == 2

    env = TerraEnv(Scenes(WORLD, [3]), TrueTown(WORLD), reward=reward, ended=is_over, max_steps=3)
    picture, info = env.reset()
    last_of_context = make_episode(3, 3).frames[2]
    assert np.array_equal(info["tokens"], last_of_context)
    steps = [env.step(STAY) for _ in range(3)]
    assert [step[1:4] for step in steps] == [(0.5, False, False), (0.5, True, False), (0.5, False, True)]
    before, action, after = calls[0]
    assert np.array_equal(before.tokens, last_of_context)
    assert np.array_equal(before.picture, picture)
    assert np.array_equal(action, STAY)
    assert np.array_equal(after.picture, steps[0][0])


def test_each_of_several_drives_is_as_a_single_one() -> None:
    """With the seeds that follow each other, and again after an end."""
    rng = np.random.default_rng(0)
    several = TerraVectorEnv(Scenes(WORLD), TrueTown(WORLD), 3, max_steps=2)
    singles = [TerraEnv(Scenes(WORLD), TrueTown(WORLD), max_steps=2) for _ in range(3)]
    pictures, info = several.reset(seed=5)
    expected = [single.reset(seed=5 + i) for i, single in enumerate(singles)]
    for number in range(6):
        # a picture is the first of what reset and step return, the info the last
        assert np.array_equal(pictures, [result[0] for result in expected])
        assert np.array_equal(info["tokens"], [result[-1]["tokens"] for result in expected])
        assert np.array_equal(pictures, WORLD.pictures(info["tokens"]))
        goes_ahead = rng.random(len(singles)) < 0.5
        actions = np.where(goes_ahead[:, None, None], AHEAD, STAY)
        pictures, _, terminated, truncated, info = several.step(actions)
        if number % 3 == 2:
            expected = [single.reset() for single in singles]
        else:
            expected = [single.step(action) for single, action in zip(singles, actions, strict=True)]
        assert truncated.tolist() == [number % 3 == 1] * 3
        assert not terminated.any()


@pytest.mark.parametrize(
    "actions",
    [
        pytest.param(np.zeros((6, 3)), id="of one drive"),
        pytest.param(np.zeros((2, 6, 3), complex), id="complex"),
        pytest.param("east", id="text"),
    ],
)
def test_other_actions_are_refused(actions: Any) -> None:
    env = TerraVectorEnv(Scenes(WORLD), TrueTown(WORLD), 2)
    env.reset(seed=0)
    with pytest.raises(InputError, match=r"^action: expected an array \(2, 6, 3\) of numbers, got "):
        env.step(actions)


def test_who_stands_gets_nothing_and_who_races_ends_in_a_vehicle() -> None:
    town = TrueTown(WORLD)
    assert not measure_returns(town, choose_always(0), 4).any()
    racing = measure_returns(town, choose_always(3), 8)
    assert 0 < racing.mean() < 2 * 20 * 0.9
    env = TerraEnv(Scenes(WORLD, JUDGED), town, ended=is_crash)
    picture, _ = env.reset(seed=0)
    over = False
    while not over:
        (action,) = make_actions(picture[None], np.array([3]))
        picture, _, over, _, _ = env.step(action)
