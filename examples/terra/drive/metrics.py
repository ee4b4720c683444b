"""How near generated frames are to true ones."""

import math

import numpy as np

from .drives import METRES_PER_PIXEL, VIEW_METRES

EGO_GREEN = 40
"""How much more green than red and blue a pixel of the ego vehicle has."""
EGO_PIXELS = 4
"""A smaller green spot is no vehicle."""


def psnr(frames: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Peak signal to noise ratio of each frame, in dB.

    Args:
        frames, truth: uint8 (..., height, width, 3).

    Returns:
        float64 (...); infinite where a frame is the true one.
    """
    errors = np.square(frames.astype(np.float64) - truth).mean(axis=(-3, -2, -1))
    with np.errstate(divide="ignore"):
        ratios: np.ndarray = 10 * np.log10(255**2 / errors)
    return ratios


def ego_place(frame: np.ndarray) -> np.ndarray | None:
    """Where a frame shows the ego vehicle, which is green.

    Args:
        frame: uint8 (height, width, 3).

    Returns:
        float64 (2,), (x, y) in metres from the middle of the view; None where it shows none.
    """
    red, green, blue = np.moveaxis(frame.astype(int), -1, 0)
    excess = np.clip(green - np.maximum(red, blue) - EGO_GREEN, 0, None)
    rows, cols = np.nonzero(excess)
    if len(rows) < EGO_PIXELS:
        return None
    weights = excess[rows, cols]
    middle = np.array([np.average(cols, weights=weights), np.average(rows, weights=weights)]) + 0.5
    return middle * METRES_PER_PIXEL - VIEW_METRES / 2


def ego_distance(frame: np.ndarray, place: np.ndarray) -> float:
    """How far from a place a frame shows the ego vehicle, in metres; infinite where it shows none.

    Args:
        frame: uint8 (height, width, 3).
        place: float (2,), (x, y) in metres from the middle of the view.
    """
    seen = ego_place(frame)
    return math.inf if seen is None else float(np.linalg.norm(seen - place))
