"""The world of the model: noisy waves of four shapes and eight periods, and the sentences about them."""

from dataclasses import dataclass

import numpy as np

SHAPES = ("sine", "square", "saw", "pulse")
PERIODS = range(5, 13)
STEPS = range(32, 65)
"""Lengths of a series."""
PROMPT = "<series> is a"
ANSWER_WORDS = 5
FIRST_TRAINING_SEED = 1_000_000
"""Waves of smaller seeds are held out."""
FIRST_TEST_SEED = 1_000
"""Figures are taken from waves of these seeds on: smaller ones were looked at while task and training were chosen."""


@dataclass(frozen=True)
class Wave:
    """A series, and what is true of it."""

    series: np.ndarray
    """float32 (steps, 1)."""
    answer: str
    """As ``square wave of period 12``."""


def make_wave(seed: int) -> Wave:
    """Return a wave of random shape, period, length, phase, height, scale and noise, equal for equal seeds."""
    rng = np.random.default_rng(seed)
    shape, period = rng.choice(SHAPES), int(rng.choice(PERIODS))
    phase = (np.arange(rng.choice(STEPS)) / period + rng.random()) % 1.0
    values = {
        "sine": np.sin(2 * np.pi * phase),
        "square": np.where(phase < 0.5, 1.0, -1.0),
        "saw": 2 * phase - 1,
        "pulse": np.where(phase < 1 / period, 2.0, 0.0),
    }[shape]
    noisy = values + rng.normal(0.0, 0.05, len(values))
    series = rng.uniform(-100, 100) + rng.uniform(1, 30) * noisy
    return Wave(series[:, None].astype(np.float32), f"{shape} wave of period {period}")
