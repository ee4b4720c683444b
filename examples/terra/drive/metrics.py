"""What generated frames show, beside what happened."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from .drives import CELL_METRES, METRES_PER_PIXEL, VIEW_METRES
from .simulator import CELL_PIXELS, CLOCK, COLOURS, EGO, HOURS, UNITS, Town, Vehicle, render, vehicles_at

DIFFERENCE = 40
"""A pixel shows a vehicle if one of its values differs so much from the empty scene's."""
LEAST_PIXELS = 4
"""A smaller spot is no vehicle."""
VEHICLE_METRES = 3.5
"""Length of a vehicle."""
METRES_NEAR = 2.0
"""The ego vehicle is in place if it is at most so far from there: about half of its length."""
MOST_DB = 60.0
"""PSNR of frames without an error."""


@dataclass(frozen=True)
class Blob:
    """Pixels that touch each other, if only at corners, and show a vehicle.

    Attributes:
        colour: that of most of them, a key of `simulator.COLOURS`.
        area: how many.
        place: float64 (2,), their middle, (x, y) in metres from the middle of the view.
    """

    colour: str
    area: int
    place: np.ndarray


def _clock(frames: np.ndarray) -> np.ndarray:
    top, left = (place * CELL_PIXELS for place in CLOCK)
    return frames[..., top : top + CELL_PIXELS, left : left + CELL_PIXELS, :]


def without_clock(frames: np.ndarray) -> np.ndarray:
    """Frames (..., height, width, 3) whose clock, which always goes on, is black."""
    frames = frames.copy()
    _clock(frames)[:] = 0
    return frames


@cache
def _faces() -> np.ndarray:
    """The clock at every hour: integers (HOURS, CELL_PIXELS, CELL_PIXELS, 3)."""
    return np.stack([_clock(render([], hour)) for hour in range(HOURS)]).astype(int)


@cache
def _empty() -> np.ndarray:
    """The scene without vehicles, its clock black."""
    return without_clock(render([]))


def hour(frame: np.ndarray) -> int:
    """What the clock of a frame shows."""
    return int(np.abs(_faces() - _clock(frame)).sum((1, 2, 3)).argmin())


def blobs(frame: np.ndarray) -> list[Blob]:
    """The vehicles that a frame shows.

    Args:
        frame: uint8 (height, width, 3).
    """
    shows = np.abs(without_clock(frame).astype(int) - _empty()).max(-1) > DIFFERENCE
    return [_blob(frame, pixels) for pixels in _touching(shows) if len(pixels) >= LEAST_PIXELS]


def _touching(mask: np.ndarray) -> list[np.ndarray]:
    """The connected parts of a mask: integers (pixels, 2), row and column."""
    left = set(zip(*(places.tolist() for places in mask.nonzero()), strict=True))
    parts = []
    while left:
        part = [left.pop()]
        for row, col in part:  # grows while it is read
            near = {(row + down, col + right) for down in (-1, 0, 1) for right in (-1, 0, 1)} & left
            left -= near
            part.extend(near)
        parts.append(np.array(part))
    return parts


def _blob(frame: np.ndarray, pixels: np.ndarray) -> Blob:
    colours = frame[tuple(pixels.T)].astype(int)
    distances = np.abs(colours[:, None] - np.array(list(COLOURS.values()))).sum(-1)
    votes = np.bincount(distances.argmin(1), distances.min(1) < 3 * DIFFERENCE, len(COLOURS))
    middle = (pixels[:, ::-1].mean(0) + 0.5) * METRES_PER_PIXEL - VIEW_METRES / 2
    return Blob(list(COLOURS)[int(votes.argmax())], len(pixels), middle)


def vehicles(frame: np.ndarray) -> list[Vehicle]:
    """The vehicles of the town that a frame shows, the ego vehicle first; a spot off the streets is none."""
    found = []
    for blob in blobs(frame):
        row, col = np.round(((blob.place[::-1] + VIEW_METRES / 2) / CELL_METRES - 0.5) * UNITS).astype(int).tolist()
        ways = vehicles_at(blob.colour, (row, col))
        found += sorted(ways, key=lambda vehicle: np.abs(render([vehicle]).astype(int) - frame).sum())[:1]
    return sorted(found, key=lambda vehicle: vehicle.colour != EGO)


def town_of(frame: np.ndarray) -> Town:
    """The town that a frame shows, whose driver has seed 0.

    Raises:
        ValueError: a frame without the ego vehicle.
    """
    shown = vehicles(frame)
    egos = [vehicle for vehicle in shown if vehicle.colour == EGO]
    if not egos:
        raise ValueError("frame: expected the ego vehicle, got none.")
    # a second one is none
    return Town(0, [egos[0], *shown[len(egos) :]], hour(frame))


def kept(shown: Sequence[Blob], truth: Sequence[Blob]) -> float:
    """Which share of the true vehicles is shown: within a vehicle's length, of its colour, with half of its area. What
    is shown counts for one vehicle only."""
    left, count = list(shown), 0
    for vehicle in truth:
        near = [
            blob
            for blob in left
            if blob.colour == vehicle.colour
            and blob.area >= vehicle.area / 2
            and np.linalg.norm(blob.place - vehicle.place) <= VEHICLE_METRES
        ]
        if near:
            nearest = min(near, key=lambda blob: float(np.linalg.norm(blob.place - vehicle.place)))
            left = [blob for blob in left if blob is not nearest]
            count += 1
    return count / len(truth)


def mass(shown: Sequence[Blob], truth: Sequence[Blob]) -> float:
    """Area of the vehicles shown, over that of the true ones."""
    return sum(blob.area for blob in shown) / sum(blob.area for blob in truth)


def unity(shown: Sequence[Blob], truth: Sequence[Blob]) -> float:
    """Which share of what is shown lies in as many parts, the largest of each colour, as there are vehicles of it."""
    whole = 0
    for colour in COLOURS:
        areas = sorted((blob.area for blob in shown if blob.colour == colour), reverse=True)
        whole += sum(areas[: sum(vehicle.colour == colour for vehicle in truth)])
    return whole / max(1, sum(blob.area for blob in shown))


def ego_distance(shown: Sequence[Blob], truth: Sequence[Blob]) -> float:
    """How far from its true place the ego vehicle is shown, in metres; infinite where it is not."""
    there, place = (
        max((blob for blob in frame if blob.colour == EGO), key=lambda blob: blob.area, default=None)
        for frame in (shown, truth)
    )
    return float(np.linalg.norm(there.place - place.place)) if there and place else np.inf


def psnr(frames: np.ndarray, truth: np.ndarray) -> float:
    """Peak signal to noise ratio in dB, at most MOST_DB, of all frames together.

    Args:
        frames, truth: uint8 (frames, height, width, 3).
    """
    error = np.square(frames.astype(np.float64) - truth).mean()
    return float(min(MOST_DB, 10 * np.log10(255**2 / error))) if error else MOST_DB


def ssim(frame: np.ndarray, truth: np.ndarray, window: int = 7) -> float:
    """Structural similarity of two pictures, over square windows, mean over colours.

    Wang, Bovik, Sheikh, Simoncelli, "Image Quality Assessment: From Error Visibility to Structural Similarity", 2004.

    Args:
        frame, truth: uint8 (height, width, 3).
        window: side of the windows, in pixels.
    """
    x, y = frame.astype(np.float64), truth.astype(np.float64)

    def mean(values: np.ndarray) -> np.ndarray:
        sums = np.pad(values.cumsum(0).cumsum(1), ((1, 0), (1, 0), (0, 0)))
        corners = sums[window:, window:] - sums[:-window, window:] - sums[window:, :-window] + sums[:-window, :-window]
        return corners / window**2

    mean_x, mean_y = mean(x), mean(y)
    variances = mean(x * x) - mean_x**2 + mean(y * y) - mean_y**2
    covariance = mean(x * y) - mean_x * mean_y
    small, smaller = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    similar = (2 * mean_x * mean_y + small) * (2 * covariance + smaller)
    return float((similar / ((mean_x**2 + mean_y**2 + small) * (variances + smaller))).mean())
