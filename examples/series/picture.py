"""A picture of series and what the model says about them, as SVG."""

from collections.abc import Sequence
from html import escape

import numpy as np

WIDTH, HEIGHT, MARGIN, TITLE, COLUMNS = 320, 90, 16, 24, 2
STYLE = (
    "text{font:14px ui-monospace,monospace;fill:#24292f}polyline{fill:none;stroke:#0969da;stroke-width:1.5}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}polyline{stroke:#58a6ff}}"
)


def draw(series: Sequence[np.ndarray], answers: Sequence[str]) -> str:
    """An SVG with one panel per series (steps, 1), its answer above it."""
    rows = -(-len(series) // COLUMNS)
    step_x, step_y = WIDTH + MARGIN, HEIGHT + TITLE + MARGIN
    size = COLUMNS * step_x + MARGIN, rows * step_y + MARGIN
    panels = []
    for i, (values, answer) in enumerate(zip(series, answers, strict=True)):
        left, top = MARGIN + i % COLUMNS * step_x, MARGIN + i // COLUMNS * step_y
        flat = values[:, 0].astype(float)
        heights = top + TITLE + HEIGHT * (flat.max() - flat) / (np.ptp(flat) or 1.0)
        across = np.linspace(left, left + WIDTH, len(flat))
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, heights, strict=True))
        panels.append(f'<text x="{left}" y="{top + 12}">{escape(answer)}</text><polyline points="{points}"/>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *panels, "</svg>"]) + "\n"
