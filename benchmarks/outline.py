"""The cost of an outline against vLLM's path: ``python -m benchmarks.outline --help``.

One request of a 1280 x 720 image and 200 tokens of text, in turns in one process: its outline from
the size of the image, from its file, and the whole path of vLLM with the decoded image, as vLLM's
renderer takes it. Checkpoints are those of `tests/data/oracles`, with the geometry of real ones.
Times are those of the one thread on its core.
"""

from __future__ import annotations

import io
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from time import thread_time as clock
from typing import Annotated, Any

import numpy as np
import typer

from . import measure

SIZE = (1280, 720)
TEXT_TOKENS = 200

GRID = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
REAL: Mapping[str, Mapping[str, Any]] = {
    "qwen2_vl": {
        "config": {"text_config": {"max_position_embeddings": 32768}},
        "processor": {
            "image_processor": {"size": {"shortest_edge": 3136, "longest_edge": 12845056}}
        },
    },
    "llava_next": {
        "config": {
            "text_config": {"max_position_embeddings": 32768},
            "vision_config": {"image_size": 336},
            "image_grid_pinpoints": GRID,
            "image_seq_length": 576,
        },
        "processor": {
            "image_processor": {
                "size": {"shortest_edge": 336},
                "crop_size": {"height": 336, "width": 336},
                "image_grid_pinpoints": GRID,
            }
        },
    },
}
"""What real checkpoints have in place of the stored, smaller geometry."""

CALLS = {
    "outline": "outline",
    "outline_file": "outline and hash of the file",
    "vllm": "vLLM's path",
}
"""What is measured, with the heads of the table's columns."""


def main(
    rounds: Annotated[int, typer.Option(min=3, help="How often each is called.")] = 200,
) -> None:
    """Measure requests per second of outlines and of vLLM's path."""
    systems = {}
    rows = []
    for name in measure.show_progress(REAL, "outline"):
        figures = measure_system(name, rounds)
        systems[name] = figures
        row = [name, f"{figures['rows']:,}"]
        row += [f"{figures[kind]['per_second']:,.0f}" for kind in CALLS]
        row += [f"{figures['ratio']:,.0f}", f"{figures['ratio_file']:,.0f}"]
        rows.append(row)
    columns = ["model", "encoder rows"]
    columns += [f"{words}, requests/s" for words in CALLS.values()]
    columns += ["outline: times as many", "with the file: times as many"]
    measure.store("outline", {"rounds": rounds, "systems": systems}, columns, rows)


def measure_system(name: str, rounds: int) -> dict[str, Any]:
    """Return the figures of one model."""
    from mmkit.plan.outline import ImageFacts, ItemHasher, inspect_image_file
    from mmkit.testing import vllm_path
    from tests import oracles

    with tempfile.TemporaryDirectory(prefix="mmkit-benchmark-") as folder:
        processor = oracles.processor(name, copy_with_geometry(name, Path(folder)))
        plan = processor.plan
        picture = make_picture()
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=85)
        facts = {"image": [ImageFacts(width=SIZE[0], height=SIZE[1])]}
        targets = plan.shortest_prompt(plan.parse_facts(facts))
        text = [20] * (TEXT_TOKENS // 2)
        prompt = text + targets + text
        hasher = ItemHasher("blake3", processor.info.model_id)

        def outline() -> Any:
            return plan.outline(prompt, facts)

        def outline_file() -> Any:
            return plan.outline(
                prompt, {"image": [inspect_image_file(file.getvalue())]}, hasher=hasher
            )

        def run_vllm() -> Any:
            return vllm_path.render(processor, prompt, {"image": [picture]}, {}, None)

        calls = {"outline": outline, "outline_file": outline_file, "vllm": run_vllm}
        if outline().prompt_token_ids != run_vllm()["prompt_token_ids"]:
            raise RuntimeError(f"{name}: the outline has other ids than vLLM's path")
        seconds = measure_in_turns(calls, rounds)
        figures: dict[str, Any] = {"rows": outline().rows["image"][0]}
    for kind, times in seconds.items():
        median = statistics.median(times)
        figures[kind] = {"us": median * 1e6, "per_second": 1 / median}
    figures["ratio"] = figures["vllm"]["us"] / figures["outline"]["us"]
    figures["ratio_file"] = figures["vllm"]["us"] / figures["outline_file"]["us"]
    return figures


def copy_with_geometry(name: str, folder: Path) -> str:
    """Copy a stored checkpoint with the geometry of a real one, and return its folder."""
    from tests import oracles

    shutil.copytree(oracles.SYSTEMS[name].checkpoint, folder, dirs_exist_ok=True)
    for part, changes in REAL[name].items():
        path = folder / ("config.json" if part == "config" else "processor_config.json")
        values = json.loads(path.read_text())
        merge(values, changes)
        path.write_text(json.dumps(values))
    return str(folder)


def merge(values: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Change values of a config, those of nested ones in place."""
    for key, change in changes.items():
        if isinstance(change, Mapping) and isinstance(values.get(key), dict) and key != "size":
            merge(values[key], change)
        else:
            values[key] = change


def make_picture() -> Any:
    """Return a picture of coarse noise, of which a JPEG is as large as one of a camera."""
    from PIL import Image

    pixels = np.random.RandomState(0).randint(0, 256, (45, 80, 3), np.uint8)
    return Image.fromarray(pixels).resize(SIZE, Image.Resampling.BICUBIC)


def measure_in_turns(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call in each round; short calls are repeated in a round."""
    seconds: dict[str, list[float]] = {kind: [] for kind in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for kind, call in calls.items():
            repeats = 1 if kind == "vllm" else 20
            start = clock()
            for _ in range(repeats):
                call()
            seconds[kind].append((clock() - start) / repeats)
    return seconds


if __name__ == "__main__":
    measure.quiet_libraries()
    typer.run(main)
