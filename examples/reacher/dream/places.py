"""Scenes as ids: where the tip and the discs are, each on a grid of 64 x 64, and the elbow's side."""

import numpy as np

from ..world import COLOURS, SCENE_PIXELS, Array, Scenes, find_sides, locate_tips, reach

NUM_PLACES = SCENE_PIXELS
"""Of x and of y: one for each pixel."""

NUM_SIDES = 2
NUM_COORDINATES = 2 * (1 + len(COLOURS))
"""Of the tip and the discs."""


def encode_places(scenes: Scenes) -> Array:
    """Return the places of scenes from 0 on, int64 (scenes, NUM_COORDINATES + 1), the elbow's side as the last."""
    points = np.concatenate([locate_tips(scenes.joints)[:, None], scenes.discs], 1)
    places = ((points.reshape(len(points), -1) + 1) / 2 * NUM_PLACES).astype(np.int64)
    sides = (find_sides(scenes.joints) + 1) // 2
    return np.concatenate([places.clip(0, NUM_PLACES - 1), sides[:, None]], 1)


def decode_places(values: Array, targets: Array) -> Scenes:
    """Return the scenes of places, each in the middle of its square of the grid.

    Args:
        values: as `encode_places` returns them.
        targets: which disc each arm is to touch, which is no part of a frame.
    """
    points = ((values[:, :NUM_COORDINATES] + 0.5) / NUM_PLACES * 2 - 1).reshape(len(values), -1, 2)
    return Scenes(reach(points[:, 0], 2 * values[:, -1] - 1), points[:, 1:], targets)
