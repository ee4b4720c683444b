"""Terra as environments of Gymnasium: the frames are those that the model dreams."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from mmkit.errors import InputError
from mmkit.serve.client import Client, Session

from .drive.drives import CONTEXT_FRAMES, FRAME_PIXELS, FRAME_SECONDS, NUM_WAYPOINTS
from .drive.metrics import town_of
from .drive.simulator import MOST_METRES, Town
from .rollout import Drive, VllmTerra
from .worlds import TownWorld


class Frame(NamedTuple):
    """What the camera sees.

    Attributes:
        tokens: int64 (num_image_patches,).
        picture: uint8 (height, width, 3).
    """

    tokens: np.ndarray
    picture: np.ndarray


Reward = Callable[[Frame, np.ndarray, Frame], float]
"""Of the frame before, the action (num_action_tokens, action_dim), and the frame after it."""
Ended = Callable[[Frame, np.ndarray, Frame], bool]
"""Of the same."""


class Scenes:
    """Where drives begin, how one can move, and what ids look like.

    Args:
        world: whose episodes are begun, and whose pictures are shown.
        seeds: of the episodes whose first frames are drawn; no model was trained on those below the world's
            `num_episodes`.

    Attributes:
        actions: float32 (num_action_tokens, action_dim), the waypoints that an action may have.
        pictures: uint8 (height, width, 3).
    """

    def __init__(self, world: TownWorld, seeds: Sequence[int] = range(TownWorld.num_episodes)) -> None:
        self._world = world
        self._seeds = seeds
        most = np.tile(np.array([MOST_METRES, MOST_METRES, FRAME_SECONDS], np.float32), (NUM_WAYPOINTS, 1))
        self.actions = Box(most * np.array([-1, -1, 0], np.float32), most)
        self.pictures = Box(0, 255, (FRAME_PIXELS, FRAME_PIXELS, 3), np.uint8)

    def begin(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw the beginning of an episode.

        Returns:
            Frames, int64 (CONTEXT_FRAMES, num_image_patches), and the actions between them, float32 (CONTEXT_FRAMES -
            1, num_action_tokens, action_dim).
        """
        episode = self._world.episode(int(rng.choice(self._seeds)), CONTEXT_FRAMES)
        return episode.frames, episode.actions

    def picture(self, tokens: np.ndarray) -> np.ndarray:
        """Return what ids (num_image_patches,) look like, uint8 (height, width, 3)."""
        return self._world.pictures(tokens[None])[0]


class Dream(Protocol):
    """What gives the next frames of some streams, each under its number."""

    def begin(self, stream: int, frames: np.ndarray, actions: np.ndarray) -> None:
        """Let a stream go on from here, whatever it was before; arrays as `Scenes.begin` returns them."""

    def step(self, actions: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Return the frame, int64 (num_image_patches,), after one action of each of some streams."""

    def close(self) -> None:
        """Let go of what the streams hold."""


class EngineDream:
    """Frames of an engine in this process; those of one step are one batch.

    Args:
        terra: the engine.
        keep: the frames to go on from when the model is full, as in `LlamaActionConfig.falling`.
    """

    def __init__(self, terra: VllmTerra, keep: int | None = 13) -> None:
        self._terra = terra
        self._keep = keep
        self._drives: dict[int, Drive] = {}

    def begin(self, stream: int, frames: np.ndarray, actions: np.ndarray) -> None:
        """See `Dream`."""
        self._drives[stream] = Drive(self._terra.config, frames, actions, self._keep)

    def step(self, actions: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """See `Dream`."""
        drives = [self._drives[stream] for stream in actions]
        frames = self._terra.step(drives, np.stack(list(actions.values())))
        return dict(zip(actions, frames.tokens, strict=True))

    def close(self) -> None:
        """See `Dream`; the engine is its owner's."""
        self._drives.clear()


class ServerDream:
    """Frames of a server, a session for each stream.

    Args:
        client: of the server. It stays open.
        keep: as in `EngineDream`.
        streams: how many step at once.
    """

    def __init__(self, client: Client, keep: int = 13, streams: int = 64) -> None:
        self._client = client
        self._keep = keep
        (accepted,) = client.modalities().modalities
        self._placeholders = accepted.placeholder or []
        self._begins: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._sessions: dict[int, Session] = {}
        self._threads = ThreadPoolExecutor(streams)

    def begin(self, stream: int, frames: np.ndarray, actions: np.ndarray) -> None:
        """See `Dream`."""
        self._close_session(stream)
        self._begins[stream] = frames, actions

    def step(self, actions: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """See `Dream`."""
        frames = self._threads.map(self._generate_next, actions, actions.values())
        return dict(zip(actions, frames, strict=True))

    def _generate_next(self, stream: int, action: np.ndarray) -> np.ndarray:
        """Return the next frame of a stream, whose first one opens its session."""
        if stream in self._sessions:
            return np.array(self._sessions[stream].next({"actions": [action]}).token_ids)
        frames, actions = self._begins[stream]
        prompt: list[int] = []
        for frame in frames.tolist():
            prompt += frame + self._placeholders
        session = self._client.session(
            prompt,
            {"actions": [*actions, action]},
            window={"keep": self._keep},
            max_tokens=frames.shape[1],
            temperature=0.0,
            ignore_eos=True,
        )
        self._sessions[stream] = session.__enter__()
        return np.array(session.first.token_ids)

    def _close_session(self, stream: int) -> None:
        session = self._sessions.pop(stream, None)
        if session is not None:
            session.close()

    def close(self) -> None:
        """See `Dream`."""
        for stream in list(self._sessions):
            self._close_session(stream)
        self._threads.shutdown()


class TrueTown:
    """No dream: the frames of the town itself, which goes on from what a frame shows.

    Args:
        world: whose pictures and tokens they are.
    """

    def __init__(self, world: TownWorld) -> None:
        self._world = world
        self._towns: dict[int, Town] = {}

    def begin(self, stream: int, frames: np.ndarray, actions: np.ndarray) -> None:
        """See `Dream`."""
        self._towns[stream] = town_of(self._world.pictures(frames[-1:])[0])

    def step(self, actions: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """See `Dream`."""
        frames = {}
        for stream, action in actions.items():
            town = self._towns[stream]
            town.follow(action)
            frames[stream] = self._world.tokens(town.picture()[None])[0]
        return frames

    def close(self) -> None:
        """See `Dream`."""
        self._towns.clear()


def give_no_reward(before: Frame, action: np.ndarray, after: Frame) -> float:
    """Return no reward at all."""
    return 0.0


def never_end(before: Frame, action: np.ndarray, after: Frame) -> bool:
    """Return that an episode goes on; only `max_steps` ends it."""
    return False


class _Outcome(NamedTuple):
    frame: Frame
    reward: float
    terminated: bool
    truncated: bool


class _Episodes:
    """The episodes of some streams; what `TerraEnv` and `TerraVectorEnv` have in common."""

    def __init__(self, scenes: Scenes, dream: Dream, reward: Reward, ended: Ended, max_steps: int | None) -> None:
        self._scenes = scenes
        self.dream = dream
        self._reward = reward
        self._ended = ended
        self._max_steps = max_steps
        self._frames: dict[int, Frame] = {}
        self._steps: dict[int, int] = {}

    def begin(self, stream: int, rng: np.random.Generator) -> Frame:
        frames, actions = self._scenes.begin(rng)
        self.dream.begin(stream, frames, actions)
        frame = self._show(frames[-1])
        self._frames[stream] = frame
        self._steps[stream] = 0
        return frame

    def _show(self, tokens: np.ndarray) -> Frame:
        return Frame(tokens, self._scenes.picture(tokens))

    def step(self, actions: Mapping[int, np.ndarray]) -> dict[int, _Outcome]:
        if not actions:
            return {}
        tokens = self.dream.step(actions)
        return {stream: self._end_step(stream, actions[stream], tokens[stream]) for stream in actions}

    def _end_step(self, stream: int, action: np.ndarray, tokens: np.ndarray) -> _Outcome:
        before = self._frames[stream]
        after = self._show(tokens)
        self._frames[stream] = after
        self._steps[stream] += 1
        return _Outcome(
            after,
            float(self._reward(before, action, after)),
            bool(self._ended(before, action, after)),
            self._steps[stream] == self._max_steps,
        )


def _convert_actions(actions: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return actions as float32.

    Raises:
        InputError: they have another shape, or are no numbers.
    """
    values = np.asarray(actions)
    if values.shape != shape or values.dtype.kind not in "fiu":
        raise InputError("action", f"an array {shape} of numbers", f"{values.dtype} {values.shape}")
    return values.astype(np.float32)


class TerraEnv(gymnasium.Env[np.ndarray, np.ndarray]):
    """One drive.

    An observation is the picture of a frame, uint8 (height, width, 3); `info["tokens"]` has its ids, int64
    (num_image_patches,). An action is the waypoints that lead to the next frame, float32 (num_action_tokens,
    action_dim).

    Args:
        scenes: where it begins and how it looks.
        dream: what gives the frames. `close` closes it.
        reward: of the frame before, the action and the frame after.
        ended: whether an episode ends with that step.
        max_steps: an episode is cut off after so many steps.
        render_mode: None or ``"rgb_array"``.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 2}  # noqa: RUF012

    def __init__(
        self,
        scenes: Scenes,
        dream: Dream,
        *,
        reward: Reward = give_no_reward,
        ended: Ended = never_end,
        max_steps: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        self._episodes = _Episodes(scenes, dream, reward, ended, max_steps)
        self.observation_space = scenes.pictures
        self.action_space = scenes.actions
        self.render_mode = render_mode
        self._picture: np.ndarray | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin a drive that `scenes` draws with the seed."""
        super().reset(seed=seed)
        frame = self._episodes.begin(0, self.np_random)
        self._picture = frame.picture
        return frame.picture.copy(), {"tokens": frame.tokens.copy()}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Drive on to the next frame.

        Raises:
            InputError: an action of another shape.
        """
        outcome = self._episodes.step({0: _convert_actions(action, self.action_space.shape)})[0]
        frame = outcome.frame
        self._picture = frame.picture
        info = {"tokens": frame.tokens.copy()}
        return frame.picture.copy(), outcome.reward, outcome.terminated, outcome.truncated, info

    def render(self) -> np.ndarray | None:
        """Return the last picture."""
        if self.render_mode == "rgb_array":
            return self._picture
        return None

    def close(self) -> None:
        """Close the dream."""
        self._episodes.dream.close()


class TerraVectorEnv(VectorEnv[np.ndarray, np.ndarray, np.ndarray]):
    """Several drives, whose next frames are generated together; each as in `TerraEnv`.

    A drive that has ended begins anew with the next step, whose action it ignores (`AutoresetMode.NEXT_STEP`).

    Args:
        scenes, dream, reward, ended, max_steps: as in `TerraEnv`.
        num_envs: how many.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(
        self,
        scenes: Scenes,
        dream: Dream,
        num_envs: int,
        *,
        reward: Reward = give_no_reward,
        ended: Ended = never_end,
        max_steps: int | None = None,
    ) -> None:
        self.num_envs = num_envs
        self.single_observation_space = scenes.pictures
        self.single_action_space = scenes.actions
        self.observation_space = batch_space(scenes.pictures, num_envs)
        self.action_space = batch_space(scenes.actions, num_envs)
        self._episodes = _Episodes(scenes, dream, reward, ended, max_steps)
        self._rngs = [seeding.np_random()[0] for _ in range(num_envs)]
        self._over = np.ones(num_envs, bool)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin all drives anew; number i as `TerraEnv.reset` does with the seed + i."""
        super().reset(seed=seed)
        if seed is not None:
            self._rngs = [seeding.np_random(seed + stream)[0] for stream in range(self.num_envs)]
        self._over[:] = False
        frames = [self._episodes.begin(stream, rng) for stream, rng in enumerate(self._rngs)]
        return self._stack_frames(frames)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Drive on, all at once.

        Raises:
            InputError: actions of another shape.
        """
        actions = _convert_actions(actions, self.action_space.shape)
        going = np.flatnonzero(~self._over).tolist()
        by_stream = self._episodes.step({stream: actions[stream] for stream in going})
        for stream in np.flatnonzero(self._over).tolist():
            frame = self._episodes.begin(stream, self._rngs[stream])
            by_stream[stream] = _Outcome(frame, 0.0, False, False)
        outcomes = [by_stream[stream] for stream in range(self.num_envs)]
        pictures, info = self._stack_frames([outcome.frame for outcome in outcomes])
        rewards = np.array([outcome.reward for outcome in outcomes])
        terminated = np.array([outcome.terminated for outcome in outcomes])
        truncated = np.array([outcome.truncated for outcome in outcomes])
        self._over = terminated | truncated
        return pictures, rewards, terminated, truncated, info

    @staticmethod
    def _stack_frames(frames: Sequence[Frame]) -> tuple[np.ndarray, dict[str, Any]]:
        """Return the pictures of frames, and their info as Gymnasium has it for several environments."""
        tokens = np.stack([frame.tokens for frame in frames])
        present = np.ones(len(frames), bool)
        return np.stack([frame.picture for frame in frames]), {"tokens": tokens, "_tokens": present}

    def close_extras(self, **options: Any) -> None:
        """Close the dream."""
        self._episodes.dream.close()
