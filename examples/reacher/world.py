"""The world of the robot: an arm of two links on a table with three coloured discs, seen by two cameras.

Lengths are in units of half the table's side, whose middle is the arm's foot; angles are in radians. All functions take
many scenes at once. The module needs numpy alone, so that it runs beside openpi's client.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

COLOURS = {"red": (220, 50, 50), "green": (50, 200, 70), "blue": (60, 90, 230)}
"""Of the discs, in RGB."""

UPPER_LINK = 0.5
LOWER_LINK = 0.45
DISC_RADIUS = 0.1
MIN_DISC_GAP = 0.28
"""Between the middles of two discs."""

STEPS = 8
"""Actions of a chunk."""

MAX_DELTA = 0.1
"""The most that one action moves the tip, in x and in y."""

MAX_CHUNKS = 5
"""Chunks after which a robot that has not touched its disc has failed."""

SCENE_PIXELS = 64
WRIST_PIXELS = 32
STATE_SIZE = 6

_TABLE = 235
_LINK_COLOUR = (40, 40, 40)
_LINK_RADIUS = 0.035
_TIP_COLOUR = (250, 170, 0)
_TIP_RADIUS = 0.055
_BEYOND_TABLE = 128
"""The grey that the camera at the tip sees where the table ends."""

_RENDERED_TOGETHER = 64
"""Scenes whose pictures are drawn at once: more would not stay in the processor's cache."""

Array = np.ndarray[Any, Any]


class Scenes(NamedTuple):
    """Arms and the discs before them.

    Attributes:
        joints: float64 (scenes, 2), the angle of the upper link to the x axis, and of the lower to the upper link.
        discs: float64 (scenes, 3, 2), x and y of the discs in the order of `COLOURS`.
        targets: int64 (scenes,), which disc the arm is to touch.
    """

    joints: Array
    discs: Array
    targets: Array

    @property
    def goals(self) -> Array:
        """The places of the discs to touch, float64 (scenes, 2)."""
        return self.discs[np.arange(len(self.discs)), self.targets]

    def select(self, chosen: Array) -> Scenes:
        """Return the scenes of a mask or of indices."""
        return Scenes(self.joints[chosen], self.discs[chosen], self.targets[chosen])

    def move(self, actions: Array) -> Scenes:
        """Return the scenes after chunks of actions, (scenes, STEPS, 2)."""
        joints = self.joints
        for deltas in actions.swapaxes(0, 1):
            joints = move_tips(joints, deltas)
        return self._replace(joints=joints)


def draw_scenes(rng: np.random.Generator, count: int) -> Scenes:
    """Return scenes with random arms, discs and targets; no two discs of a scene touch."""
    discs = np.zeros((count, len(COLOURS), 2))
    missing = np.arange(count)
    while len(missing):
        radius = rng.uniform(0.25, 0.85, (len(missing), len(COLOURS)))
        angle = rng.uniform(-math.pi, math.pi, (len(missing), len(COLOURS)))
        places = np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1)
        discs[missing] = places
        gaps = np.linalg.norm(places[:, :, None] - places[:, None], axis=-1)
        gaps += 9 * np.eye(len(COLOURS))  # not of a disc to itself
        missing = missing[gaps.min((1, 2)) <= MIN_DISC_GAP]
    joints = rng.uniform(-math.pi, math.pi, (count, 2)) * [1.0, 0.9]
    return Scenes(joints, discs, rng.integers(len(COLOURS), size=count))


# -- the arm -----------------------------------------------------------------------------------------------------------


def locate_elbows(joints: Array) -> Array:
    """Return x and y of the elbows, (scenes, 2)."""
    upper = joints[..., 0]
    return UPPER_LINK * np.stack([np.cos(upper), np.sin(upper)], -1)


def locate_tips(joints: Array) -> Array:
    """Return x and y of the tips, (scenes, 2)."""
    lower = joints[..., 0] + joints[..., 1]
    return locate_elbows(joints) + LOWER_LINK * np.stack([np.cos(lower), np.sin(lower)], -1)


def move_tips(joints: Array, deltas: Array) -> Array:
    """Return the joints after the tips have moved by (scenes, 2), as far as they reach; elbows keep their side."""
    return reach(locate_tips(joints) + deltas, find_sides(joints))


def find_sides(joints: Array) -> Array:
    """Return to which side the elbows are bent, 1 or -1, (scenes,)."""
    return np.where(joints[..., 1] >= 0, 1, -1)


def reach(places: Array, sides: Array) -> Array:
    """Return the joints of arms whose tips are at places (scenes, 2), or as near as they reach.

    Args:
        places: x and y.
        sides: to which the elbows are bent, 1 or -1, (scenes,).
    """
    least = UPPER_LINK - LOWER_LINK + 0.01
    most = UPPER_LINK + LOWER_LINK - 0.01
    distances = np.clip(np.hypot(places[..., 0], places[..., 1]), least, most)
    # the law of cosines
    cosines = (distances**2 - UPPER_LINK**2 - LOWER_LINK**2) / (2 * UPPER_LINK * LOWER_LINK)
    bends = sides * np.arccos(np.clip(cosines, -1, 1))
    directions = np.arctan2(places[..., 1], places[..., 0])
    upper = directions - np.arctan2(LOWER_LINK * np.sin(bends), UPPER_LINK + LOWER_LINK * np.cos(bends))
    return wrap_angles(np.stack([upper, bends], -1))


def wrap_angles(angles: Array) -> Array:
    """Return angles from -pi to pi."""
    return (angles + math.pi) % (2 * math.pi) - math.pi


def plan_as_expert(scenes: Scenes) -> Array:
    """Return the chunk of an expert, who knows the goal: straight to it, float64 (scenes, STEPS, 2)."""
    joints = scenes.joints
    actions = []
    for _ in range(STEPS):
        offsets = scenes.goals - locate_tips(joints)
        longest = np.abs(offsets).max(-1, keepdims=True)
        deltas = offsets * np.minimum(1, MAX_DELTA / np.maximum(longest, 1e-9))
        deltas = np.clip(deltas, -MAX_DELTA, MAX_DELTA)  # the last bit of a product
        actions.append(deltas)
        joints = move_tips(joints, deltas)
    return np.stack(actions, 1)


# -- what the robot observes -------------------------------------------------------------------------------------------


class Observations(NamedTuple):
    """What the cameras and the joints tell.

    Attributes:
        scene: uint8 (scenes, SCENE_PIXELS, SCENE_PIXELS, 3), from above the table.
        wrist: uint8 (scenes, WRIST_PIXELS, WRIST_PIXELS, 3), a part of the same picture around the tip.
        state: float32 (scenes, STATE_SIZE), x and y of the tip, cosines and sines of the joints.
        instructions: as ``touch red``.
    """

    scene: Array
    wrist: Array
    state: Array
    instructions: list[str]


def observe(scenes: Scenes) -> Observations:
    """Return what is observed of scenes."""
    pictures = render(scenes)
    tips = locate_tips(scenes.joints)
    angles = [np.cos(scenes.joints), np.sin(scenes.joints)]
    state = np.concatenate([tips, *angles], -1).astype(np.float32)
    names = list(COLOURS)
    instructions = [f"touch {names[target]}" for target in scenes.targets]
    return Observations(pictures, _cut_around(pictures, tips), state, instructions)


def write_messages(scenes: Scenes) -> list[dict[str, Any]]:
    """Return the observation of each scene under the keys of the policy."""
    observations = observe(scenes)
    messages = []
    for scene, wrist, state, instruction in zip(*observations, strict=True):
        messages.append(
            {
                "observation/image": scene,
                "observation/wrist_image": wrist,
                "observation/state": state,
                "prompt": instruction,
            }
        )
    return messages


def _cut_around(pictures: Array, tips: Array) -> Array:
    """Return the parts of pictures around the tips."""
    half = WRIST_PIXELS // 2
    centres = np.round((tips + 1) * SCENE_PIXELS / 2).astype(int)
    padded = np.pad(pictures, ((0, 0), (half, half), (half, half), (0, 0)), constant_values=_BEYOND_TABLE)
    parts = []
    for picture, (column, row) in zip(padded, centres, strict=True):
        parts.append(picture[row : row + WRIST_PIXELS, column : column + WRIST_PIXELS])
    return np.stack(parts)


def render(scenes: Scenes, size: int = SCENE_PIXELS) -> Array:
    """Return pictures from above, uint8 (scenes, size, size, 3)."""
    pictures = []
    for start in range(0, len(scenes.joints), _RENDERED_TOGETHER):
        part = scenes.select(np.arange(start, min(start + _RENDERED_TOGETHER, len(scenes.joints))))
        pictures.append(_render_together(part, size))
    return np.concatenate(pictures)


def _render_together(scenes: Scenes, size: int) -> Array:
    """Draw discs, links and tip over each other, with soft edges of one pixel."""
    axis = ((np.arange(size) + 0.5) * 2 / size - 1).astype(np.float32)
    x = axis[None, None, :]
    y = axis[None, :, None]
    # colours first: each is a plane that lies together in memory
    planes = np.full((3, len(scenes.joints), size, size), _TABLE, np.float32)

    def paint(distances: Array, radius: float, colour: tuple[int, int, int]) -> None:
        cover = np.clip((radius - distances) * size / 2 + 0.5, 0, 1)
        for plane, value in zip(planes, colour, strict=True):
            plane += cover * (value - plane)

    def measure_lengths(across: Array, down: Array) -> Array:
        return np.sqrt(across * across + down * down)  # np.hypot takes four times as long

    def measure_to_points(points: Array) -> Array:
        return measure_lengths(x - points[:, 0, None, None], y - points[:, 1, None, None])

    def measure_to_segments(starts: Array, ends: Array) -> Array:
        way_x, way_y = (ends - starts).T[:, :, None, None]
        from_x = x - starts[:, 0, None, None]
        from_y = y - starts[:, 1, None, None]
        along = np.clip((from_x * way_x + from_y * way_y) / (way_x**2 + way_y**2), 0, 1)
        return measure_lengths(from_x - along * way_x, from_y - along * way_y)

    discs = scenes.discs.astype(np.float32)
    elbows = locate_elbows(scenes.joints).astype(np.float32)
    tips = locate_tips(scenes.joints).astype(np.float32)
    for index, colour in enumerate(COLOURS.values()):
        paint(measure_to_points(discs[:, index]), DISC_RADIUS, colour)
    links = np.minimum(measure_to_segments(np.zeros_like(elbows), elbows), measure_to_segments(elbows, tips))
    paint(links, _LINK_RADIUS, _LINK_COLOUR)
    paint(measure_to_points(tips), _TIP_RADIUS, _TIP_COLOUR)
    return np.ascontiguousarray(planes.astype(np.uint8).transpose(1, 2, 3, 0))


# -- a robot at work ---------------------------------------------------------------------------------------------------

Planner = Callable[[Scenes], Array]
"""Returns the next chunk of each scene as it stands, (scenes, STEPS, 2)."""


class Episodes(NamedTuple):
    """What became of scenes.

    Attributes:
        touched: bool (scenes,), whether the tip came over the disc.
        actions: float64 (scenes, MAX_CHUNKS, STEPS, 2), NaN for chunks after the touch.
        joints: float64 (scenes, MAX_CHUNKS * STEPS + 1, 2), before and after each action. An arm that touches its disc
            stays there.
    """

    touched: Array
    actions: Array
    joints: Array

    def select(self, chosen: Array) -> Episodes:
        """Return the scenes of a mask or of indices."""
        return Episodes(self.touched[chosen], self.actions[chosen], self.joints[chosen])


def run_episodes(scenes: Scenes, plan: Planner) -> Episodes:
    """Let a robot work in each scene until it touches its disc: it executes a chunk, then it is asked for the next."""
    count = len(scenes.joints)
    touched = np.zeros(count, bool)
    actions = np.full((count, MAX_CHUNKS, STEPS, 2), np.nan)
    joints = [scenes.joints]
    for chunk in range(MAX_CHUNKS):
        working = np.flatnonzero(~touched)
        if len(working):
            actions[working, chunk] = plan(scenes.select(working))
        for step in range(STEPS):
            moved = move_tips(scenes.joints, np.nan_to_num(actions[:, chunk, step]))
            scenes = scenes._replace(joints=np.where(touched[:, None], scenes.joints, moved))
            distances = np.linalg.norm(locate_tips(scenes.joints) - scenes.goals, axis=-1)
            touched = touched | (distances < DISC_RADIUS)
            joints.append(scenes.joints)
    return Episodes(touched, actions, np.stack(joints, 1))
