"""Text requests beside image requests: ``python -m benchmarks.text_latency --help``.

A server without render processes and one with two, both of a LLaVA with a published model's image
sizes and dummy weights. Each in turn answers short text requests of one client: alone, and beside
clients whose requests have a photograph of 1 to 4 megapixels each (those of `benchmarks.render`).
"""

from __future__ import annotations

import importlib
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from . import measure
from .render import TEMPLATE, enlarged, message

PROCESSES = (0, 2)
MODEL = "llava"
PHOTOGRAPHS = 12
SECONDS = 6.0
"""Of each look."""


def main(
    rounds: Annotated[int, typer.Option(min=3, help="Rounds of each server, in turns.")] = 5,
    clients: Annotated[int, typer.Option(min=1, help="Clients that send images.")] = 2,
) -> None:
    """Latency of text requests, as a ratio of beside images to alone."""
    taken: dict[int, list[dict[str, float]]] = {number: [] for number in PROCESSES}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mmkit-bench-")))
        urls = {number: stack.enter_context(server(folder, number)) for number in PROCESSES}
        for turn in measure.progress(range(rounds), "text latency"):
            for number in PROCESSES if turn % 2 else reversed(PROCESSES):
                taken[number].append(look(urls[number], clients))
    rows = [row(number, looks) for number, looks in taken.items()]
    report = {"clients": clients, "rounds": rounds, "rows": rows}
    measure.store("text_latency", report)
    measure.table(*lines(report))


def lines(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table: its head and its rows."""
    head = ["render processes", "alone", "beside images", "ratio", "images/s"]
    return head, [
        [str(r["processes"]), f"{r['alone_ms']:.0f} ms", f"{r['beside_ms']:.0f} ms",
         measure.shown(r), f"{r['images']:.1f}"]
        for r in report["rows"]
    ]  # fmt: skip


@contextmanager
def server(folder: Path, processes: int) -> Iterator[str]:
    """The address of a server with so many render processes."""
    from examples.llava_like import ARCHITECTURE
    from mmkit.serve.process import Server

    oracles = importlib.import_module("tests.oracles")
    name = str(processes)
    checkpoint = enlarged(MODEL, oracles.SYSTEMS[MODEL].checkpoint, folder / name)
    overrides = json.dumps({"architectures": [ARCHITECTURE]})
    options = ["--load-format", "dummy", "--dtype", "float32", "--enforce-eager"]
    options += ["--max-model-len", "2048", "--served-model-name", MODEL]
    options += ["--hf-overrides", overrides, "--mm-processor-cache-gb", "0"]
    options += ["--chat-template", TEMPLATE, "--chat-template-content-format", "string"]
    if processes:
        options += ["--render-processes", name]
    with Server(checkpoint, *options, log=folder / f"{name}.log") as running:
        ask(httpx.Client(), running.url, message(0))
        yield running.url


def ask(client: httpx.Client, url: str, messages: list[dict[str, Any]]) -> None:
    """One request of 8 new tokens."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 8, "ignore_eos": True}
    client.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()


def look(url: str, clients: int) -> dict[str, float]:
    """Medians of the latency alone and beside images, and images per second."""
    alone = texts(url)
    photographs = [message(seed) for seed in range(PHOTOGRAPHS)]
    stop, answered = threading.Event(), count()

    def images(first: int) -> None:
        with httpx.Client() as client:
            for number in count(first):
                if stop.is_set():
                    return
                ask(client, url, photographs[number % PHOTOGRAPHS])
                next(answered)

    threads = [threading.Thread(target=images, args=(number,)) for number in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    try:
        beside = texts(url)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    rate = next(answered) / (time.perf_counter() - start)
    return {"alone": alone, "beside": beside, "images": rate}


def texts(url: str) -> float:
    """The median latency of one client's text requests, in seconds."""
    seconds = []
    end = time.perf_counter() + SECONDS
    with httpx.Client() as client:
        while (start := time.perf_counter()) < end:
            ask(client, url, [{"role": "user", "content": f"What is {len(seconds)}?"}])
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def row(processes: int, looks: list[dict[str, float]]) -> dict[str, Any]:
    """The figures of one server: medians over the rounds."""
    seconds = {side: [one[side] for one in looks] for side in ("beside", "alone")}
    images = statistics.median(one["images"] for one in looks)
    return {"processes": processes, **measure.ratio(seconds, *seconds), "images": images}


if __name__ == "__main__":
    measure.quiet()
    typer.run(main)
