"""Rendering on several cores: ``python -m benchmarks.render --help``.

Requests with one photograph of 1 to 4 megapixels each, as a JPEG in a data URL, from the message to
what the engine would get: decoded, processed, placed. There is no engine. The same requests go
through the renderer of vLLM's server, eight at a time, with vLLM's hand-written class, with the
generated one, and with the generated one and render processes, in turns. The server decodes in
threads beside the one that processes, so that two cores have work without render processes, too.

The models have the sizes of published ones: LLaVA's images of 336 x 336 pixels, InternVL's up to 13
tiles of 448 x 448.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import io
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer

from . import measure

SYSTEMS = ("llava", "internvl2")
SIZES = ((1152, 896), (1600, 1280), (2304, 1728))
AT_ONCE = 8
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
BASE = "hand_written"


def main(
    requests: Annotated[int, typer.Option(min=3, help="Requests of each round.")] = 24,
    rounds: Annotated[int, typer.Option(min=3, help="Rounds of each kind, in turns.")] = 5,
    processes: Annotated[
        list[int] | None, typer.Option(help="Render processes; may be given several times.")
    ] = None,
) -> None:
    """Requests per second of a renderer, as ratios to vLLM's hand-written class."""
    counts = processes or [1, 2]
    report: dict[str, Any] = {"requests": requests, "rounds": rounds, "rows": []}
    with tempfile.TemporaryDirectory(prefix="mmkit-bench-") as folder:
        for name in SYSTEMS:
            report["rows"] += system(name, Path(folder) / name, requests, rounds, counts)
    columns = ["model", "by", "requests/s", "times hand-written"]
    rows = [
        [row["model"], row["what"].replace("_", "-"), f"{row['per_second']:.1f}",
         measure.shown(row), f"{row['mib']} MiB" if row["mib"] else ""]
        for row in report["rows"]
    ]  # fmt: skip
    measure.store("render", report, [*columns, "memory of each process"], rows)


def system(
    name: str, folder: Path, requests: int, rounds: int, counts: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """The rows of one model."""
    from mmkit.rendering.pool import RenderProcesses
    from mmkit.vllm_api import offload
    from tools.survey.doors import Doors

    oracles = importlib.import_module("tests.oracles")
    checkpoint = str(enlarged(name, oracles.SYSTEMS[name].checkpoint, folder))
    doors = {BASE: Doors(oracles.hand_written(name, checkpoint))}
    doors["generated"] = Doors(oracles.processor(name, checkpoint))
    with ExitStack() as stack:
        pids: dict[str, list[int]] = {}
        for count in counts:
            what = f"{count} render process(es)"
            doors[what] = Doors(oracles.processor(name, checkpoint))
            renderer = doors[what].llm.renderer
            recipe = offload.make_recipe(renderer.mm_processor)
            processes = stack.enter_context(closing(RenderProcesses(recipe, count)))
            processes.wait()
            theirs = renderer._process_tokens_async
            renderer._process_tokens_async = offload.wrap_process_tokens(theirs, processes)
            pids[what] = processes.pids
        chats = [message(seed) for seed in range(requests)]
        seconds: dict[str, list[float]] = {what: [] for what in doors}
        for number in measure.progress(range(rounds + 1), name):
            for what, door in doors.items():
                start = time.perf_counter()
                online(door, chats)
                if number:  # the first one warms up
                    seconds[what].append(time.perf_counter() - start)
        for what, own in seconds.items():
            memory = [
                psutil.Process(pid).memory_full_info().uss >> 20 for pid in pids.get(what, ())
            ]
            ratio = measure.ratio({"base": seconds[BASE], "own": own}, "base", "own")
            rate = requests / statistics.median(own)
            row = {"model": name, "what": what, "per_second": rate, **ratio}
            yield {**row, "mib": max(memory, default=None)}


def online(door: Any, chats: Sequence[Any]) -> None:
    """Eight requests at a time, as they reach the renderer of vLLM's server."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.online_renderer import OnlineRenderer

    renderer = OnlineRenderer(
        door.llm.model_config,
        door.llm.renderer,
        request_logger=None,
        chat_template=TEMPLATE,
        chat_template_content_format="string",
    )

    async def all_of() -> None:
        places = asyncio.Semaphore(AT_ONCE)

        async def one(chat: Any) -> None:
            async with places:
                request = ChatCompletionRequest(model="", messages=chat)
                rendered = await renderer.render_chat(request)
                assert isinstance(rendered, tuple), rendered

        await asyncio.gather(*map(one, chats))

    with door.use_model_class():
        asyncio.run(all_of())


def message(seed: int) -> list[dict[str, Any]]:
    """A conversation about a photograph: large shapes, and noise as of a camera."""
    from PIL import Image

    random = np.random.default_rng(seed)
    width, height = SIZES[seed % len(SIZES)]
    shapes = random.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(shapes).resize((width, height), Image.Resampling.BICUBIC))
    noisy = smooth + random.integers(-6, 7, smooth.shape)
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [image, {"type": "text", "text": "<image>\nWhat is it?"}]}]


LARGE: dict[str, dict[str, dict[str, Any]]] = {
    "llava": {
        "config.json": {"image_seq_length": 576, "vision_config": {"image_size": 336}},
        "processor_config.json": {
            "image_processor": {
                "crop_size": {"height": 336, "width": 336},
                "size": {"shortest_edge": 336},
            }
        },
    },
    "internvl2": {
        "config.json": {
            "force_image_size": 448,
            "max_dynamic_patch": 12,
            "vision_config": {"image_size": 448},
        },
        "preprocessor_config.json": {"crop_size": 448, "size": 448},
    },
}
"""What the tiny checkpoints have in common with published ones here."""


def enlarged(name: str, checkpoint: str, folder: Path) -> Path:
    """A checkpoint with the sizes of a published one."""
    shutil.copytree(checkpoint, folder)
    for file, changes in LARGE[name].items():
        path = folder / file
        path.write_text(json.dumps(_merged(json.loads(path.read_text()), changes)))
    return folder


def _merged(whole: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    parts = {
        key: _merged(whole[key], value) if isinstance(value, dict) and key in whole else value
        for key, value in changes.items()
    }
    return {**whole, **parts}


if __name__ == "__main__":
    measure.quiet()
    typer.run(main)
