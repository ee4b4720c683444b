"""What a recorded drive is."""

from dataclasses import dataclass

import numpy as np

FRAME_PIXELS = 128
"""Side of a frame, in pixels."""
VIEW_METRES = 32.0
"""Side of what the camera sees."""
CELL_METRES = 4.0
"""Side of a cell of the town, which is a patch of the image tokenizer."""
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


@dataclass(frozen=True)
class Drive:
    """One drive.

    Attributes:
        frames: uint8 (frames, FRAME_PIXELS, FRAME_PIXELS, 3), RGB.
        actions: float32 (frames - 1, NUM_WAYPOINTS, 3); action i leads from frame i to frame i + 1. Its rows are
            the ego vehicle's waypoints (x, y, t): metres ahead and to the left of where it is in frame i, along the
            heading in which it came there, and seconds from frame i.
    """

    frames: np.ndarray
    actions: np.ndarray
