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
    top = CLOCK[0] * CELL_PIXELS
    left = CLOCK[1] * CELL_PIXELS
    return frames[..., top : top + CELL_PIXELS, left : left + CELL_PIXELS, :]


def without_clock(frames: np.ndarray) -> np.ndarray:
    """Return frames (..., height, width, 3) whose clock, which always goes on, is black."""
    frames = frames.copy()
    _clock(frames)[:] = 0
    return frames


@cache
def _faces() -> np.ndarray:
    """Return the clock at every hour: integers (HOURS, CELL_PIXELS, CELL_PIXELS, 3)."""
    return np.stack([_clock(render([], hour)) for hour in range(HOURS)]).astype(int)


@cache
def _empty() -> np.ndarray:
    """Return the scene without vehicles, its clock black."""
    return without_clock(render([]))


def hour(frame: np.ndarray) -> int:
    """Return the hour that the clock of a frame shows."""
    return int(np.abs(_faces() - _clock(frame)).sum((1, 2, 3)).argmin())


def blobs(frame: np.ndarray) -> list[Blob]:
    """Return the vehicles that a frame shows.

    Args:
        frame: uint8 (height, width, 3).
    """
    shows = np.abs(without_clock(frame).astype(int) - _empty()).max(-1) > DIFFERENCE
    spots = _find_connected_parts(shows)
    return [_make_blob(frame, pixels) for pixels in spots if len(pixels) >= LEAST_PIXELS]


def _find_connected_parts(mask: np.ndarray) -> list[np.ndarray]:
    """Return the parts of a mask whose pixels touch each other: integers (pixels, 2), row and column."""
    rows, cols = mask.nonzero()
    unvisited = set(zip(rows.tolist(), cols.tolist(), strict=True))
    parts = []
    while unvisited:
        part = [unvisited.pop()]
        for row, col in part:  # the list grows while the loop reads it
            neighbours = _pixel_and_neighbours(row, col) & unvisited
            unvisited -= neighbours
            part.extend(neighbours)
        parts.append(np.array(part))
    return parts


def _pixel_and_neighbours(row: int, col: int) -> set[tuple[int, int]]:
    return {(row + down, col + right) for down in (-1, 0, 1) for right in (-1, 0, 1)}


def _make_blob(frame: np.ndarray, pixels: np.ndarray) -> Blob:
    colours = frame[tuple(pixels.T)].astype(int)
    distances = np.abs(colours[:, None] - np.array(list(COLOURS.values()))).sum(-1)
    votes = np.bincount(distances.argmin(1), distances.min(1) < 3 * DIFFERENCE, len(COLOURS))
    middle = (pixels[:, ::-1].mean(0) + 0.5) * METRES_PER_PIXEL - VIEW_METRES / 2
    return Blob(list(COLOURS)[int(votes.argmax())], len(pixels), middle)


def vehicles(frame: np.ndarray) -> list[Vehicle]:
    """Return the vehicles of the town that a frame shows, the ego vehicle first; a spot off the streets is none."""

    def difference(vehicle: Vehicle) -> int:
        return int(np.abs(render([vehicle]).astype(int) - frame).sum())

    egos = []
    traffic = []
    for blob in blobs(frame):
        row, col = np.round(((blob.place[::-1] + VIEW_METRES / 2) / CELL_METRES - 0.5) * UNITS).astype(int).tolist()
        candidates = vehicles_at(blob.colour, (row, col))
        if not candidates:
            continue
        vehicle = min(candidates, key=difference)
        if vehicle.colour == EGO:
            egos.append(vehicle)
        else:
            traffic.append(vehicle)
    return egos + traffic


def town_of(frame: np.ndarray) -> Town:
    """Return the town that a frame shows, whose driver has seed 0.

    Raises:
        ValueError: a frame without the ego vehicle.
    """
    shown = vehicles(frame)
    egos = [vehicle for vehicle in shown if vehicle.colour == EGO]
    if not egos:
        raise ValueError("frame: expected the ego vehicle, got none.")
    # a second one is none
    return Town(0, egos[:1] + shown[len(egos) :], hour(frame))


def persistence(shown: Sequence[Blob], truth: Sequence[Blob]) -> float:
    """Return the share of the true vehicles that is shown: within a vehicle's length, of its colour, with half of its
    area. A spot counts for one vehicle only."""
    spots = list(shown)
    count = 0
    for vehicle in truth:
        nearest = _find_nearest(spots, vehicle)
        if nearest is not None:
            spots = [spot for spot in spots if spot is not nearest]
            count += 1
    return count / len(truth)


def _find_nearest(spots: Sequence[Blob], vehicle: Blob) -> Blob | None:
    """Return the spot that shows a vehicle, the nearest of several; None where no spot does."""
    nearest = None
    least = np.inf
    for spot in spots:
        if spot.colour != vehicle.colour or spot.area < vehicle.area / 2:
            continue
        distance = np.linalg.norm(spot.place - vehicle.place)
        if distance <= VEHICLE_METRES and distance < least:
            nearest = spot
            least = distance
    return nearest


def mass(shown: Sequence[Blob], truth: Sequence[Blob]) -> float:
    """Return the area of the vehicles shown, over that of the true ones."""
    return sum(blob.area for blob in shown) / sum(blob.area for blob in truth)


def unity(shown: Sequence[Blob], truth: Sequence[Blob]) -> float:
    """Return the share of the area shown that lies in as many spots, the largest of each colour, as there are vehicles
    of it."""
    whole = 0
    for colour in COLOURS:
        areas = [blob.area for blob in shown if blob.colour == colour]
        areas.sort(reverse=True)
        num_vehicles = sum(vehicle.colour == colour for vehicle in truth)
        whole += sum(areas[:num_vehicles])
    return whole / max(1, sum(blob.area for blob in shown))


def ego_distance(shown: Sequence[Blob], truth: Sequence[Blob]) -> float:
    """Return how far from its true place the ego vehicle is shown, in metres; infinite where it is not."""
    ego = _find_ego(shown)
    true_ego = _find_ego(truth)
    if ego is None or true_ego is None:
        return np.inf
    return float(np.linalg.norm(ego.place - true_ego.place))


def _find_ego(spots: Sequence[Blob]) -> Blob | None:
    """Return the largest spot of the ego vehicle's colour; None where there is none."""
    largest = None
    for spot in spots:
        if spot.colour == EGO and (largest is None or spot.area > largest.area):
            largest = spot
    return largest


def psnr(frames: np.ndarray, truth: np.ndarray) -> float:
    """Return the peak signal to noise ratio in dB, at most MOST_DB, of all frames together.

    Args:
        frames, truth: uint8 (frames, height, width, 3).
    """
    error = np.square(frames.astype(np.float64) - truth).mean()
    if error == 0:
        return MOST_DB
    return float(min(MOST_DB, 10 * np.log10(255**2 / error)))


def ssim(frame: np.ndarray, truth: np.ndarray, window: int = 7) -> float:
    """Return the structural similarity of two pictures, over square windows, mean over colours.

    Wang, Bovik, Sheikh, Simoncelli, "Image Quality Assessment: From Error Visibility to Structural Similarity", 2004.

    Args:
        frame, truth: uint8 (height, width, 3).
        window: side of the windows, in pixels.
    """
    x = frame.astype(np.float64)
    y = truth.astype(np.float64)

    def mean(values: np.ndarray) -> np.ndarray:
        sums = np.pad(values.cumsum(0).cumsum(1), ((1, 0), (1, 0), (0, 0)))
        corners = sums[window:, window:] - sums[:-window, window:] - sums[window:, :-window] + sums[:-window, :-window]
        return corners / window**2

    mean_x = mean(x)
    mean_y = mean(y)
    variances = mean(x * x) - mean_x**2 + mean(y * y) - mean_y**2
    covariance = mean(x * y) - mean_x * mean_y
    c1 = (0.01 * 255) ** 2
    c2 = (0.03 * 255) ** 2
    numerator = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    denominator = (mean_x**2 + mean_y**2 + c1) * (variances + c2)
    return float((numerator / denominator).mean())
