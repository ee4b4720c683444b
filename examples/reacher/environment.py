"""The robot's world as an environment of Gymnasium: the true one, or the one that a server dreams."""

from string import ascii_lowercase
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Text

from mmkit.serve import Client

from .dream.places import decode_places
from .dream.spec import PROMPT
from .world import (
    DISC_RADIUS,
    MAX_CHUNKS,
    MAX_DELTA,
    SCENE_PIXELS,
    STATE_SIZE,
    STEPS,
    WRIST_PIXELS,
    Scenes,
    draw_scenes,
    locate_tips,
    observe,
    render,
    write_messages,
)


class World(Protocol):
    """What a chunk of actions leads to."""

    def step(self, scene: Scenes, actions: np.ndarray) -> Scenes:
        """Return one scene after a chunk (STEPS, 2)."""


class TrueWorld:
    """The world itself."""

    def step(self, scene: Scenes, actions: np.ndarray) -> Scenes:
        """See `World`."""
        return scene.move(actions[None])


class DreamedWorld:
    """What a server of the world model says of pictures.

    Args:
        client: of the server. It stays open.

    Attributes:
        ids: the answers so far, each the ids of a frame.
    """

    def __init__(self, client: Client) -> None:
        self.ids: list[list[int]] = []
        self._client = client

    def step(self, scene: Scenes, actions: np.ndarray) -> Scenes:
        """See `World`."""
        observations = observe(scene)
        items = {"frame": observations.scene, "state": observations.state, "chunk": [actions]}
        (choice,) = self._client.generate(PROMPT, items, output="places", temperature=0.0).choices
        self.ids.append(choice.token_ids)
        return decode_places(choice.output[None], scene.targets)


class ReacherEnv(gymnasium.Env[dict[str, Any], np.ndarray]):
    """One arm before three discs.

    An observation is what a robot sends to the model, by the keys of its policy. An action is a whole chunk, float64
    (STEPS, 2). An episode ends when the tip is over its disc after a chunk, with a reward of 1, and is cut off after
    MAX_CHUNKS. `info["scene"]` is the scene as the world has it.

    Args:
        world: the true one, or a dream.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 1}  # noqa: RUF012

    def __init__(self, world: World) -> None:
        self.render_mode = "rgb_array"
        self.action_space = Box(-MAX_DELTA, MAX_DELTA, (STEPS, 2), np.float64)
        self.observation_space = Dict(
            {
                "observation/image": Box(0, 255, (SCENE_PIXELS, SCENE_PIXELS, 3), np.uint8),
                "observation/wrist_image": Box(0, 255, (WRIST_PIXELS, WRIST_PIXELS, 3), np.uint8),
                "observation/state": Box(-1, 1, (STATE_SIZE,), np.float32),
                "prompt": Text(16, charset=ascii_lowercase + " "),
            }
        )
        self._world = world
        self._num_chunks = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin in a new scene, which the seed decides."""
        super().reset(seed=seed)
        self._scene = draw_scenes(self.np_random, 1)
        self._num_chunks = 0
        return self._observe()

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Execute a chunk."""
        self._scene = self._world.step(self._scene, action)
        self._num_chunks += 1
        distance = np.linalg.norm(locate_tips(self._scene.joints) - self._scene.goals)
        touched = bool(distance < DISC_RADIUS)
        observation, info = self._observe()
        return observation, float(touched), touched, self._num_chunks == MAX_CHUNKS, info

    def render(self) -> np.ndarray:
        """Return the picture from above."""
        return render(self._scene)[0]

    def _observe(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return write_messages(self._scene)[0], {"scene": self._scene}
