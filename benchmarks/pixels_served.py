"""A photograph in a chat, through a server: ``python -m benchmarks.pixels_served --help``.

`vllm serve` runs vLLM's own class, `python -m mmkit.serve` the model with a spec, both with random
weights of the same tiny sizes, and images of the sizes of published models: LLaVA's of 336 x 336
pixels, InternVL's up to 13 tiles of 448 x 448, Qwen2-VL's up to 12.8 megapixels. Each request is
one photograph of 1, 2 or 4 megapixels that no cache has, a JPEG in a data URL, and asks for one
token. One client sends to the servers in turns; the time is that of its wall clock, the model's
step with it. Beside it stands the processor time of all processes of a server, which other work on
the machine changes least, and of these the time of the process that decodes and processes.
"""

from __future__ import annotations

import base64
import json
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer

from examples.llava_like import ARCHITECTURE
from examples.server import Server

from . import measure, render
from .pixels import BASE, MODEL_CONFIGS, SIZES, copy_checkpoint, make_photograph

ARCHITECTURES = {
    "llava": {"spec, bytes": ARCHITECTURE},
    "qwen2_vl": {"spec, bytes": "Qwen2VLOfSpec"},
    "internvl2": {"spec, floats": "InternVLOfSpec", "torchvision, bytes": "InternVLOfBytes"},
}
"""By model, and by how a spec makes its pixels, the class that is served."""

OPTIONS = (
    *("--served-model-name", "model", "--load-format", "dummy", "--dtype", "float32"),
    *("--block-size", "32", "--enforce-eager", "--chat-template", render.TEMPLATE),
    *("--limit-mm-per-prompt", '{"image": 1, "video": 0}', "--skip-mm-profiling"),
    "--trust-remote-code",
)

ENVIRONMENT = {"MMKIT_MODULES": "benchmarks.pixel_models"}
"""Makes the processes of a server register these classes."""


class VllmServer(Server):
    """``vllm serve`` on this machine."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        module = self._command.index("mmkit.serve")
        self._command[module : module + 1] = ["vllm.entrypoints.cli.main", "serve"]


def main(
    rounds: Annotated[int, typer.Option(min=3, help="Requests of each size and server.")] = 20,
    systems: Annotated[
        list[str] | None, typer.Option(help="Which models; may be given several times.")
    ] = None,
) -> None:
    """Measure the time of a request with a photograph, as a client sees it."""
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mmkit-bench-") as folder:
        for name in systems or list(ARCHITECTURES):
            figures += measure_system(name, Path(folder), rounds)
    columns = ["model", "photograph", "by", "time", "times as long"]
    columns += ["of all processors", "of the process that decodes"]
    rows = [make_row(figure) for figure in figures]
    measure.store("pixels_served", {"rounds": rounds, "rows": figures}, columns, rows)


def make_row(figure: dict[str, Any]) -> list[str]:
    row = [figure["model"], figure["size"], figure["by"], f"{figure['ms']:.1f} ms"]
    row.append(measure.format_ratio(figure))
    return [*row, f"{figure['processor_ms']:.1f} ms", f"{figure['front_ms']:.1f} ms"]


def measure_system(name: str, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Return the figures of one model, one for each size of photograph and each server."""
    checkpoint = copy_checkpoint(name, folder / name)
    config = MODEL_CONFIGS.get(name, {})
    servers: dict[str, Server] = {
        BASE: VllmServer(
            checkpoint,
            *OPTIONS,
            *("--hf-overrides", json.dumps(config)),
            log=folder / f"{name} of vLLM",
        )
    }
    for by, architecture in ARCHITECTURES[name].items():
        overrides = {"architectures": [architecture], **config}
        servers[by] = Server(
            checkpoint,
            *OPTIONS,
            *("--hf-overrides", json.dumps(overrides)),
            environment=ENVIRONMENT,
            log=folder / architecture,
        )
    figures = []
    with ExitStack() as stack:
        for server in servers.values():
            stack.enter_context(server)
        for size in measure.show_progress(SIZES, name):
            for figure in measure_size(size, servers, rounds):
                figures.append({"model": name, **figure})
    return figures


def measure_size(size: str, servers: Mapping[str, Server], rounds: int) -> list[dict[str, Any]]:
    """Return the figures of one size of photograph, one for each server."""
    seconds: dict[str, list[float]] = {by: [] for by in servers}
    processor_seconds = dict.fromkeys(servers, 0.0)
    front_seconds = dict.fromkeys(servers, 0.0)
    with httpx.Client(timeout=300) as client:
        for number in range(rounds + 1):
            body = make_request(make_photograph(*SIZES[size], seed=number))
            for by in sorted(servers, reverse=bool(number % 2)):
                server = servers[by]
                all_before, front_before = read_processor_seconds(server)
                start = time.perf_counter()
                client.post(f"{server.url}/v1/chat/completions", json=body).raise_for_status()
                end = time.perf_counter()
                all_after, front_after = read_processor_seconds(server)
                if number:  # the first one warms up
                    seconds[by].append(end - start)
                    processor_seconds[by] += all_after - all_before
                    front_seconds[by] += front_after - front_before
    figures = []
    for by in servers:
        ratios = measure.compare(seconds, by, BASE)
        figures.append(
            {
                "size": size,
                "by": by,
                "ms": ratios[f"{by}_ms"],
                "ratio": ratios["ratio"],
                "p10": ratios["p10"],
                "p90": ratios["p90"],
                "processor_ms": 1000 * processor_seconds[by] / rounds,
                "front_ms": 1000 * front_seconds[by] / rounds,
            }
        )
    return figures


def make_request(photograph: bytes) -> dict[str, Any]:
    """Return the body of a chat about a photograph."""
    data = base64.b64encode(photograph).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}
    messages = [{"role": "user", "content": [image]}]
    return {"model": "model", "messages": messages, "max_tokens": 1, "temperature": 0}


def read_processor_seconds(server: Server) -> tuple[float, float]:
    """Return the processor time of all processes of a server, and of its first, so far."""
    assert server.process is not None
    front = psutil.Process(server.process.pid)
    front_seconds = render.read_processor_seconds([front.pid])
    children = [child.pid for child in front.children(recursive=True)]
    return front_seconds + render.read_processor_seconds(children), front_seconds


if __name__ == "__main__":
    measure.quiet_libraries()
    typer.run(main)
