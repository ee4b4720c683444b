"""Terra's environments over the sessions of a server."""

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from examples.terra.environment import ServerDream, TerraEnv, TerraVectorEnv, Tiles
from examples.terra.world import make_episode
from mmkit.serve import Client

pytestmark = pytest.mark.timeout(600)


def test_gymnasium_takes_a_session(client: Client) -> None:
    env = TerraEnv(Tiles(), ServerDream(client), max_steps=3)
    check_env(env)
    env.close()


def test_a_vector_of_sessions_is_the_reference(client: Client, frames: np.ndarray) -> None:
    """Two drives of the same episode, twice."""
    env = TerraVectorEnv(Tiles([0]), ServerDream(client), 2, max_steps=4)
    env.reset(seed=0)
    actions = make_episode(0).actions
    for _ in range(2):
        for step in range(4):
            _, _, _, truncated, info = env.step(np.stack([actions[2 + step]] * 2))
            assert np.array_equal(info["tokens"], [frames[step]] * 2)
        assert truncated.all()
        _, _, _, _, info = env.step(np.stack([actions[0]] * 2))
        assert np.array_equal(info["tokens"], [make_episode(0).frames[2]] * 2)
    env.close()
