"""A picture of series and what the model says about them, as SVG."""

from collections.abc import Sequence
from html import escape
from math import ceil

import numpy as np

WIDTH = 320
HEIGHT = 90
MARGIN = 16
TITLE = 24
COLUMNS = 2
STYLE = (
    "text{font:14px ui-monospace,monospace;fill:#24292f}polyline{fill:none;stroke:#0969da;stroke-width:1.5}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}polyline{stroke:#58a6ff}}"
)


def draw(series: Sequence[np.ndarray], answers: Sequence[str]) -> str:
    """Return an SVG with one panel per series (steps, 1), its answer above it."""
    rows = ceil(len(series) / COLUMNS)
    panel_width = WIDTH + MARGIN
    panel_height = HEIGHT + TITLE + MARGIN
    width = COLUMNS * panel_width + MARGIN
    height = rows * panel_height + MARGIN
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">']
    lines.append(f"<style>{STYLE}</style>")
    for i, (values, answer) in enumerate(zip(series, answers, strict=True)):
        left = MARGIN + i % COLUMNS * panel_width
        top = MARGIN + i // COLUMNS * panel_height
        lines.append(f'<text x="{left}" y="{top + 12}">{escape(answer)}</text>{_draw_line(values, left, top + TITLE)}')
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def _draw_line(values: np.ndarray, left: int, top: int) -> str:
    """Return the line of a series (steps, 1) in a box of WIDTH x HEIGHT."""
    flat = values[:, 0].astype(float)
    heights = top + HEIGHT * (flat.max() - flat) / (np.ptp(flat) or 1.0)
    across = np.linspace(left, left + WIDTH, len(flat))
    points = [f"{x:.1f},{y:.1f}" for x, y in zip(across, heights, strict=True)]
    return f'<polyline points="{" ".join(points)}"/>'
