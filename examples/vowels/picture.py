"""A picture of recordings, the question, the answers of the model and of a baseline, as SVG."""

from collections.abc import Sequence
from html import escape
from math import ceil
from typing import NamedTuple

import numpy as np

WIDTH = 320
HEIGHT = 110
MARGIN = 16
TEXT_HEIGHT = 44
COLUMNS = 2
STYLE = (
    "text{font:13px ui-monospace,monospace;fill:#24292f}.wrong{fill:#cf222e}"
    "polyline{fill:none;stroke:#0969da;stroke-width:1.2;stroke-opacity:.7}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.wrong{fill:#ff7b72}polyline{stroke:#58a6ff}}"
)


class Panel(NamedTuple):
    """A recording, and what is said of it.

    Attributes:
        frames: (frames, channels).
        question: to the model.
        expected: the right answer.
        answer: of the model.
        baseline: of the nearest neighbour.
    """

    frames: np.ndarray
    question: str
    expected: str
    answer: str
    baseline: str


def draw(panels: Sequence[Panel]) -> str:
    """Return an SVG with a panel for each recording, wrong answers in red.

    The longest recording fills the width of its panel; shorter ones are shorter lines.
    """
    longest = max(len(panel.frames) for panel in panels)
    panel_width = WIDTH + MARGIN
    panel_height = HEIGHT + TEXT_HEIGHT + MARGIN
    width = COLUMNS * panel_width + MARGIN
    height = ceil(len(panels) / COLUMNS) * panel_height + MARGIN
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">']
    lines.append(f"<style>{STYLE}</style>")
    for index, panel in enumerate(panels):
        left = MARGIN + index % COLUMNS * panel_width
        top = MARGIN + index // COLUMNS * panel_height
        model = _write_answer(panel.answer, panel.expected)
        baseline = _write_answer(f"1-NN DTW: {panel.baseline}", f"1-NN DTW: {panel.expected}")
        lines.append(f'<text x="{left}" y="{top + 12}">{escape(panel.question)} {model}</text>')
        lines.append(f'<text x="{left}" y="{top + 32}">{baseline}, truth: {escape(panel.expected)}</text>')
        lines += _draw_channels(panel.frames, left, top + TEXT_HEIGHT, longest)
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def _write_answer(answer: str, expected: str) -> str:
    """Return a part of a text, red where the answer is wrong."""
    kind = "right" if answer == expected else "wrong"
    return f'<tspan class="{kind}">{escape(answer)}</tspan>'


def _draw_channels(frames: np.ndarray, left: int, top: int, longest: int) -> list[str]:
    """Return a line for each channel of a recording in a box of WIDTH x HEIGHT."""
    values = frames.astype(float)
    heights = top + HEIGHT * (values.max() - values) / (np.ptp(values) or 1.0)
    across = left + WIDTH * np.arange(len(values)) / (longest - 1)
    lines = []
    for channel in heights.T:
        points = [f"{x:.1f},{y:.1f}" for x, y in zip(across, channel, strict=True)]
        lines.append(f'<polyline points="{" ".join(points)}"/>')
    return lines
