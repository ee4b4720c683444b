"""Pictures of the stored results: ``python -m benchmarks.plots`` writes docs/images/bench-*.png."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import ScalarFormatter

from .terra_cpu import KINDS

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
COLOURS = ["#3264a8", "#d1732a", "#4a9a5d", "#8a5aa3", "#777777", "#b04a5a", "#2a9d9d"]


def main(folder: Path = IMAGES) -> None:
    """Draw every result that there is."""
    plt.rcParams.update(
        {"figure.dpi": 110, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    )
    for name, draw in {"overhead": overhead, "growth": growth, "terra_cpu": terra_cpu}.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            figure = draw(json.loads(path.read_text()))
            path = folder / f"bench-{name.replace('_', '-')}.png"
            figure.savefig(path, bbox_inches="tight", metadata={"Software": ""})
            plt.close(figure)


def overhead(report: dict[str, Any]) -> Any:
    """Time of the generated processor, as a ratio to that of the hand-written one."""
    parts = {"uncached": "uncached", "uncached_own": "uncached, without HF", "cached": "cached"}
    names = list(report["systems"])
    figure, axes = plt.subplots(figsize=(8, 3.4))
    width = 0.8 / len(parts)
    for index, (part, label) in enumerate(parts.items()):
        ratios = [report["systems"][name][part] for name in names]
        heights = [f["ratio"] for f in ratios]
        errors = [[f["ratio"] - f["p10"] for f in ratios], [f["p90"] - f["ratio"] for f in ratios]]
        at = [i + (index - (len(parts) - 1) / 2) * width for i in range(len(names))]
        axes.bar(
            at,
            heights,
            width * 0.92,
            yerr=errors,
            label=label,
            color=COLOURS[index],
            ecolor="#444444",
            capsize=2,
        )
    axes.axhline(1, color="#444444", linewidth=1)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("generated / hand-written")
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.15))
    return figure


def growth(report: dict[str, Any]) -> Any:
    """Time of one request over its size, with vLLM's floor."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    for title, axes in zip(("items", "prompt tokens"), panels, strict=True):
        lines = {
            n: f
            for n, f in report["lines"].items()
            if f["exponent"] and n.startswith("prompt") == (title != "items")
        }
        for colour, (name, line) in zip(COLOURS, lines.items(), strict=False):
            sizes = [point["size"] for point in line["points"]]
            axes.plot(sizes, [p["ms"] for p in line["points"]], "o-", color=colour, ms=4,
                label=f"{name} ({line['exponent']:.2f})")  # fmt: skip
            axes.plot(
                sizes, [p["floor_ms"] for p in line["points"]], ":", color=colour, linewidth=1
            )
        axes.set(xscale="log", yscale="log", xlabel=title)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.legend(frameon=False, fontsize=8)
        axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    panels[0].set_ylabel("ms per request (dotted: hashing and copying)")
    return figure


def terra_cpu(report: dict[str, Any]) -> Any:
    """Milliseconds per frame in vLLM and in the reference."""
    figure, axes = plt.subplots(figsize=(6, 2.6))
    bars = [
        (f"{name}, {row['streams']} stream{'s' * (row['streams'] > 1)}", row["ms"][kind])
        for row in reversed(report["rows"])
        for kind, name in KINDS.items()
    ]
    colours = [COLOURS[kind == "hf"] for _ in report["rows"] for kind in KINDS]
    axes.barh(*zip(*bars, strict=True), color=colours)
    for index, (_, value) in enumerate(bars):
        axes.text(value, index, f" {value:.0f} ms", va="center", fontsize=9)
    axes.set_xlabel("ms per frame of all streams")
    return figure


if __name__ == "__main__":
    main()
