"""The data set, which is finite: 270 recordings for training and 370 for the test."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

FILE = Path(__file__).with_name("recordings.npz")
NUM_SPEAKERS = 9
QUESTION = "Who speaks?"
ANSWER_TOKENS = 3
"""Tokens of an answer, as ``speaker 3``, with the end."""

Split = Literal["train", "test"]


@dataclass(frozen=True, eq=False)
class Recording:
    """One utterance, and who it is from.

    Attributes:
        frames: float32 (frames, 12), a frame every 6.4 ms.
        speaker: from 1 to 9.
    """

    frames: np.ndarray
    speaker: int

    @property
    def answer(self) -> str:
        """What the model is to say."""
        return f"speaker {self.speaker}"


@cache
def load_recordings(split: Split) -> list[Recording]:
    """Return the recordings of a split, in the order of the data set: by speaker."""
    with np.load(FILE) as arrays:
        frames = arrays[f"{split}_frames"].astype(np.float32) / arrays["scale"]
        ends = np.cumsum(arrays[f"{split}_lengths"])
        speakers = arrays[f"{split}_speakers"].tolist()
    parts = np.split(frames, ends[:-1])
    return [Recording(part, speaker) for part, speaker in zip(parts, speakers, strict=True)]


def augment(frames: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a recording (frames, 12) as the same speaker might have said it: faster or slower, cut, and with noise.

    The 270 recordings are read many times in training. Without this, the model learns them by heart.
    """
    first = int(rng.integers(0, 3))
    last = len(frames) - 1 - int(rng.integers(0, 3))
    length = max(5, round((last - first + 1) * rng.uniform(0.75, 1.3)))
    places = np.linspace(first, last, min(length, 32))
    whole = np.arange(len(frames))
    channels = [np.interp(places, whole, channel) for channel in frames.T]
    stretched = np.stack(channels, axis=1)
    noise = rng.normal(0.0, 0.05, stretched.shape)
    shift = rng.normal(0.0, 0.03, stretched.shape[1])  # another microphone, for all frames
    return (stretched + noise + shift).astype(np.float32)


def count_right(answers: Sequence[str], recordings: Sequence[Recording]) -> int:
    """Return how many answers are those about the recordings at their places."""
    right = 0
    for answer, recording in zip(answers, recordings, strict=True):
        right += answer == recording.answer
    return right
