"""A photograph in a chat, through a server: ``python -m benchmarks.pixels_served --help``.

`vllm serve` runs vLLM's own LLaVA, `python -m mmkit.serve` the LLaVA-like model, both with random
weights of the same sizes and images of 336 x 336 pixels. Each request is one photograph of 1, 2 or
4 megapixels that no cache has, a JPEG in a data URL, and asks for one token. One client sends to
the two servers in turns; the time is that of its wall clock, the model's step with it. Beside it
stands the processor time of all processes of a server, which other work on the machine changes
least.
"""

from __future__ import annotations

import base64
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer

from examples.llava_like import ARCHITECTURE
from examples.server import Server

from . import measure, render
from .pixels import BASE, SIZES, make_photograph

OPTIONS = (
    *("--served-model-name", "llava", "--load-format", "dummy", "--dtype", "float32"),
    *("--block-size", "32", "--enforce-eager", "--chat-template", render.TEMPLATE),
)
OVERRIDES = f'{{"architectures": ["{ARCHITECTURE}"]}}'


class VllmServer(Server):
    """``vllm serve`` on this machine."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        module = self._command.index("mmkit.serve")
        self._command[module : module + 1] = ["vllm.entrypoints.cli.main", "serve"]


def main(
    rounds: Annotated[int, typer.Option(min=3, help="Requests of each size and server.")] = 20,
) -> None:
    """Measure the time of a request with a photograph, as a client sees it."""
    from tests.oracles import SYSTEMS

    with tempfile.TemporaryDirectory(prefix="mmkit-bench-") as folder:
        checkpoint = render.copy_with_published_sizes(
            "llava", SYSTEMS["llava"].checkpoint, Path(folder, "llava")
        )
        ours = Server(checkpoint, *OPTIONS, "--hf-overrides", OVERRIDES, log=Path(folder, "ours"))
        theirs = VllmServer(checkpoint, *OPTIONS, log=Path(folder, "theirs"))
        with theirs, ours:
            servers = {BASE: theirs, "spec, bytes": ours}
            rows = []
            for size in measure.show_progress(SIZES, "sizes"):
                rows.append(measure_size(size, servers, rounds))
    columns = ["photograph", *servers, "times as long"]
    columns += [f"{by}, of the processors" for by in servers]
    table = []
    for row in rows:
        times = [f"{row[f'{by}_ms']:.1f} ms" for by in servers]
        of_processors = [f"{row['processor_ms'][by]:.1f} ms" for by in servers]
        table.append([row["size"], *times, measure.format_ratio(row), *of_processors])
    measure.store("pixels_served", {"rounds": rounds, "rows": rows}, columns, table)


def measure_size(size: str, servers: dict[str, Server], rounds: int) -> dict[str, Any]:
    """Return the times of one size of photograph at each server."""
    seconds: dict[str, list[float]] = {by: [] for by in servers}
    of_processors = dict.fromkeys(servers, 0.0)
    with httpx.Client(timeout=300) as client:
        for number in range(rounds + 1):
            data = base64.b64encode(make_photograph(*SIZES[size], seed=number)).decode()
            image = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}
            messages = [{"role": "user", "content": [image]}]
            body = {"model": "llava", "messages": messages, "max_tokens": 1, "temperature": 0}
            for by in sorted(servers, reverse=bool(number % 2)):
                begin = count_processor_seconds(servers[by])
                start = time.perf_counter()
                url = f"{servers[by].url}/v1/chat/completions"
                client.post(url, json=body).raise_for_status()
                if number:  # the first one warms up
                    seconds[by].append(time.perf_counter() - start)
                    of_processors[by] += count_processor_seconds(servers[by]) - begin
    processor_ms = {by: 1000 * total / rounds for by, total in of_processors.items()}
    (other,) = set(servers) - {BASE}
    ratios = measure.compare(seconds, other, BASE)
    return {"size": size, **ratios, "processor_ms": processor_ms}


def count_processor_seconds(server: Server) -> float:
    """Return the processor time of all processes of a server so far."""
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        times = each.cpu_times()
        total += times.user + times.system
    return total


if __name__ == "__main__":
    measure.quiet_libraries()
    typer.run(main)
