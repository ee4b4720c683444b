"""What a recorded drive is, and where recorded drives lie. Needs no simulator."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

FRAME_PIXELS = 80
"""Side of a frame, in pixels."""
VIEW_METRES = 64.0
"""Side of what the camera sees."""
METRES_PER_PIXEL = VIEW_METRES / FRAME_PIXELS
NUM_FRAMES = 25
CONTEXT_FRAMES = 3
"""Frames a rollout is given; the others are generated."""
NUM_WAYPOINTS = 6
FRAME_SECONDS = 0.4
"""Time from one frame to the next."""

HELD_OUT_DRIVES = 10_000
"""Seeds below this are for judging."""
FIRST_TRAINING_SEED = 1_000_000
"""Seeds from here on are for training."""

DATA = Path("out/drive")
"""Folder of recordings, by default."""
PER_FILE = 100
"""Drives in a file."""
HELD_OUT = Path(__file__).parent / "held_out.npz"
"""Drives that no model was trained on, from seed 0 on: for judging, and for contexts."""
METRES_NEAR = 2.0
"""The ego vehicle is where an action says if it is at most so far from there: less than half of its length, 5 m."""


@dataclass(frozen=True)
class Drive:
    """One drive.

    Attributes:
        frames: uint8 (NUM_FRAMES, FRAME_PIXELS, FRAME_PIXELS, 3), RGB.
        actions: float32 (NUM_FRAMES - 1, NUM_WAYPOINTS, 3); action i leads from frame i to frame i + 1. Its rows are
            the ego vehicle's waypoints (x, y, t): metres to the east and to the south of the middle of the view, and
            seconds from frame i.
        start: float32 (2,), the ego vehicle in the first frame, (x, y).
        driver: who drove, a name of `simulator.DRIVERS`.
    """

    frames: np.ndarray
    actions: np.ndarray
    start: np.ndarray
    driver: str

    @property
    def places(self) -> np.ndarray:
        """The ego vehicle in every frame: float32 (NUM_FRAMES, 2), (x, y) in metres."""
        return np.concatenate([self.start[None], self.actions[:, -1, :2]])


def save(drives: list[Drive], path: Path) -> None:
    """Write drives of equal length to an NPZ file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part.npz")
    np.savez_compressed(
        unfinished,
        frames=np.stack([drive.frames for drive in drives]),
        actions=np.stack([drive.actions for drive in drives]),
        starts=np.stack([drive.start for drive in drives]),
        drivers=np.array([drive.driver for drive in drives]),
    )
    unfinished.rename(path)


def load(path: Path) -> list[Drive]:
    """The drives of an NPZ file."""
    with np.load(path) as arrays:
        columns = [arrays[name] for name in ("frames", "actions", "starts", "drivers")]
    return [Drive(*row, str(driver)) for *row, driver in zip(*columns, strict=True)]
