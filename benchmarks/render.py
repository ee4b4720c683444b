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
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer

from . import measure

SYSTEMS = ("llava", "internvl2")

SIZES = ((1152, 896), (1600, 1280), (2304, 1728))
"""Widths and heights of the photographs."""

AT_ONCE = 8
"""Requests that are rendered at a time."""

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

BASE = "hand_written"
"""What the others are compared with."""

PUBLISHED_SIZES: dict[str, dict[str, dict[str, Any]]] = {
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
"""The sizes of published checkpoints, which the tiny ones get here, by model and file."""


def main(
    requests: Annotated[int, typer.Option(min=3, help="Requests of each round.")] = 24,
    rounds: Annotated[int, typer.Option(min=3, help="Rounds of each kind, in turns.")] = 5,
    processes: Annotated[
        list[int] | None, typer.Option(help="Render processes; may be given several times.")
    ] = None,
) -> None:
    """Measure the requests per second of a renderer, as ratios to vLLM's hand-written class."""
    counts = processes or [1, 2]
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mmkit-bench-") as folder:
        for name in SYSTEMS:
            figures.extend(measure_system(name, Path(folder) / name, requests, rounds, counts))
    rows = []
    for figure in figures:
        memory = f"{figure['mib']} MiB" if figure["mib"] else ""
        row = [figure["model"], figure["what"].replace("_", "-"), f"{figure['per_second']:.1f}"]
        times = [f"{figure['server_ms']:.1f} ms", ""]
        if figure["mib"]:
            times[1] = f"{figure['render_processes_ms']:.1f} ms"
        rows.append([*row, measure.format_ratio(figure), *times, memory])
    report = {"requests": requests, "rounds": rounds, "rows": figures}
    columns = ["model", "by", "requests/s", "times hand-written"]
    columns += ["processor time of the server", "of render processes", "memory of each process"]
    measure.store("render", report, columns, rows)


def measure_system(
    name: str, folder: Path, requests: int, rounds: int, counts: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield the figures of one model: by hand, generated, and with numbers of processes."""
    from tools.survey.doors import Doors

    oracles = importlib.import_module("tests.oracles")
    checkpoint = str(copy_with_published_sizes(name, oracles.SYSTEMS[name].checkpoint, folder))
    doors = {
        BASE: Doors(oracles.hand_written(name, checkpoint)),
        "generated": Doors(oracles.processor(name, checkpoint)),
    }
    with ExitStack() as stack:
        pids: dict[str, list[int]] = {}
        for count in counts:
            what = f"{count} render process(es)"
            doors[what] = Doors(oracles.processor(name, checkpoint))
            pids[what] = stack.enter_context(render_in_processes(doors[what], count))
        chats = [make_chat(seed) for seed in range(requests)]
        seconds: dict[str, list[float]] = {what: [] for what in doors}
        in_server: dict[str, list[float]] = {what: [] for what in doors}
        in_processes: dict[str, list[float]] = {what: [] for what in doors}
        for number in measure.show_progress(range(rounds + 1), name):
            for what, door in doors.items():
                others_before = read_processor_seconds(pids.get(what, ()))
                server_before = time.process_time()
                start = time.perf_counter()
                render(door, chats, has_render_processes=what in pids)
                if number:  # the first one warms up
                    seconds[what].append(time.perf_counter() - start)
                    in_server[what].append(time.process_time() - server_before)
                    others = read_processor_seconds(pids.get(what, ()))
                    in_processes[what].append(others - others_before)
        for what in doors:
            memory = []
            for pid in pids.get(what, ()):
                memory.append(psutil.Process(pid).memory_full_info().uss >> 20)
            # "own" is the column's key in the stored results
            series = {"base": seconds[BASE], "own": seconds[what]}
            yield {
                "model": name,
                "what": what,
                "per_second": requests / statistics.median(seconds[what]),
                **measure.compare(series, "base", "own"),
                "server_ms": 1000 * statistics.median(in_server[what]) / requests,
                "render_processes_ms": 1000 * statistics.median(in_processes[what]) / requests,
                "mib": max(memory, default=None),
            }


def read_processor_seconds(pids: Sequence[int]) -> float:
    """Return the processor time that processes have taken together."""
    seconds = 0.0
    for pid in pids:
        times = psutil.Process(pid).cpu_times()
        seconds += times.user + times.system
    return seconds


@contextmanager
def render_in_processes(door: Any, count: int) -> Iterator[list[int]]:
    """Let a door's renderer work in so many processes, and yield their ids."""
    from mmkit.rendering.pool import RenderProcesses
    from mmkit.vllm_api import offload

    renderer = door.llm.renderer
    recipe = offload.make_recipe(renderer.mm_processor)
    with closing(RenderProcesses(recipe, count)) as processes:
        processes.wait()
        process_tokens = renderer._process_tokens_async
        renderer._process_tokens_async = offload.wrap_process_tokens_async(
            process_tokens, processes
        )
        yield processes.pids


def render(door: Any, chats: Sequence[Any], *, has_render_processes: bool) -> None:
    """Render chats, `AT_ONCE` at a time, as they reach the renderer of vLLM's server."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.online_renderer import OnlineRenderer

    from mmkit.vllm_api.server_request import SERVER_REQUEST, ServerRequest
    from mmkit.wire.limits import Limits

    renderer = OnlineRenderer(
        door.llm.model_config,
        door.llm.renderer,
        request_logger=None,
        chat_template=TEMPLATE,
        chat_template_content_format="string",
    )

    most_pixels = Limits().pixels

    async def render_all() -> None:
        places = asyncio.Semaphore(AT_ONCE)

        async def render_chat(chat: Any) -> None:
            async with places:
                if has_render_processes:
                    SERVER_REQUEST.set(
                        ServerRequest(most_pixels, AssertionError, has_render_processes=True)
                    )
                request = ChatCompletionRequest(model="", messages=chat)
                result = await renderer.render_chat(request)
                # a refusal is no tuple
                assert isinstance(result, tuple), result

        await asyncio.gather(*[render_chat(chat) for chat in chats])

    with door.use_model_class():
        asyncio.run(render_all())


def make_chat(seed: int) -> list[dict[str, Any]]:
    """Return a conversation about a photograph: large shapes, and noise as of a camera."""
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


def copy_with_published_sizes(name: str, checkpoint: str, folder: Path) -> Path:
    """Copy a checkpoint, with the sizes of a published one."""
    shutil.copytree(checkpoint, folder)
    for file, changes in PUBLISHED_SIZES[name].items():
        path = folder / file
        path.write_text(json.dumps(merge(json.loads(path.read_text()), changes)))
    return folder


def merge(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return nested mappings with changes at some keys."""
    merged = dict(values)
    for key, value in changes.items():
        if isinstance(value, dict) and key in values:
            merged[key] = merge(values[key], value)
        else:
            merged[key] = value
    return merged


if __name__ == "__main__":
    measure.quiet_libraries()
    typer.run(main)
