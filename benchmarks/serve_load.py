"""What the HTTP door costs: ``python -m benchmarks.serve_load --help``.

One engine, in this process. It is called directly (`AsyncLLM.generate`, as an in-process user does)
and through the routes of mmkit on a loopback socket (clients in a process of their own, since a
server's clients are elsewhere), in turns. Each request is one frame of Terra: 210 prompt tokens
with three actions, 64 new tokens.

Everything shares the cores of this machine, so the door's share holds the clients' work too.
"""

import asyncio
import random
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from multiprocessing import get_context
from typing import Annotated, Any
from uuid import uuid4

import numpy as np
import typer

from examples.server import free_port
from mmkit.serve.client import build_request
from mmkit.serve.protocol import GenerateRequest

from . import measure

KINDS = ("direct", "door")
COLUMNS = ("clients", "directly", "through the routes", "ratio (least to most of a pair of rounds)")
SAMPLING = {"temperature": 0.0, "max_tokens": 64, "ignore_eos": True}

Round = dict[str, Any]
"""Requests per second (`rate`), the `seconds` of each, and processor time per request (`cpu`)."""

_bodies: list[bytes] = []
"""The requests of the next round, in the clients' process."""


def main(
    clients: Annotated[
        list[int] | None, typer.Option(help="Clients at once; may be given several times.")
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, help="Requests of each round, at least three of each client.")
    ] = 64,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each kind, in turns.")] = 6,
    stream: Annotated[bool, typer.Option(help="Stream tokens, one event each.")] = False,
) -> None:
    """Requests per second and latencies of N clients, through the door and directly."""
    import uvloop

    rows = uvloop.run(measured(clients or [1, 4, 16, 64], requests, rounds, stream))
    report = {"requests": requests, "rounds": rounds, "stream": stream, "rows": rows}
    name = "serve_load_stream" if stream else "serve_load"
    measure.store(name, report, [*COLUMNS, "p50", "p99"], [*map(shown, rows)])


async def measured(counts: list[int], requests: int, rounds: int, stream: bool) -> list[Any]:
    """The figures of each number of clients."""
    rows = []
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        async with served() as (engine, url):
            for count in counts:
                number = max(requests, 3 * count)
                runs = {
                    "direct": lambda n=number, c=count: direct(engine, c, n, stream),
                    "door": lambda n=number, c=count: door(url, process, c, n, stream),
                }
                taken: dict[str, list[Round]] = {kind: [] for kind in KINDS}
                for turn in range(rounds + 1):
                    for kind in KINDS if turn % 2 else reversed(KINDS):
                        taken[kind].append(await runs[kind]())
                # the first round warms up
                rows.append(row(count, {kind: those[1:] for kind, those in taken.items()}))
                print(f"{count} clients: {rows[-1]['ratio']:.3f}", file=sys.stderr, flush=True)
    return rows


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Any, str]]:
    """An engine in this process, and the address of the routes."""
    import uvicorn
    from fastapi import FastAPI
    from vllm import AsyncEngineArgs
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.v1.engine.async_llm import AsyncLLM

    from examples.terra import CHECKPOINT, register
    from examples.terra.rollout import BLOCK_SIZE
    from mmkit.serve.plugin import MmkitEndpoints

    register()
    options = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": BLOCK_SIZE}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(CHECKPOINT), **options))
    app, plugin = FastAPI(), MmkitEndpoints()
    plugin.attach_router(app)
    app.state.online_renderer = OnlineRenderer(
        engine.model_config,
        engine.renderer,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
    )
    names = Namespace(model="terra", served_model_name=["terra"])
    await plugin.init_state(engine, app.state, names)
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    serving = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.05)
    try:
        yield engine, f"http://127.0.0.1:{port}/v1/mm/generate"
    finally:
        server.should_exit = True
        await serving
        engine.shutdown()


def row(count: int, taken: dict[str, list[Round]]) -> dict[str, Any]:
    """The figures of one number of clients: medians over the rounds, and the ratio of each pair of
    rounds."""
    rates = {kind: [one["rate"] for one in taken[kind]] for kind in KINDS}
    ratios = [a / b for a, b in zip(rates["door"], rates["direct"], strict=True)]
    figures: dict[str, Any] = {"clients": count, "ratio": statistics.median(ratios)}
    figures["ratio_range"] = [min(ratios), max(ratios)]
    for kind in KINDS:
        seconds = np.array([second for one in taken[kind] for second in one["seconds"]]) * 1000
        p50, p90, p99 = np.percentile(seconds, [50, 90, 99])
        figures[kind] = {
            "requests_per_second": statistics.median(rates[kind]),
            "p50_ms": p50,
            "p90_ms": p90,
            "p99_ms": p99,
            "cpu_ms_of_the_caller": statistics.median(one["cpu"] for one in taken[kind]) * 1000,
        }
    last = taken["door"][-1]
    figures["door"] |= {
        "server_cpu_ms": statistics.median(one["server_cpu"] for one in taken["door"]) * 1000,
        "bytes_sent": last["sent"],
        "bytes_received": last["received"],
    }
    return figures


def shown(row: dict[str, Any]) -> list[str]:
    """The line of a table."""
    least, most = row["ratio_range"]
    direct, door = (row[kind]["requests_per_second"] for kind in KINDS)
    return [
        str(row["clients"]),
        f"{direct:.1f} requests/s",
        f"{door:.1f}",
        f"{row['ratio']:.2f} ({least:.2f} to {most:.2f})",
        *(f"{row['door'][name]:,.0f} ms" for name in ("p50_ms", "p99_ms")),
    ]


async def loop(count: int, requests: Sequence[Any], one: Callable[[Any], Awaitable[None]]) -> Round:
    """So many clients, one request after the other each."""
    waiting = iter(requests)
    seconds: list[float] = []

    async def drive() -> None:
        for request in waiting:
            start = time.perf_counter()
            await one(request)
            seconds.append(time.perf_counter() - start)

    start, used = time.perf_counter(), time.process_time()
    await asyncio.gather(*(drive() for _ in range(count)))
    rate = len(requests) / (time.perf_counter() - start)
    return {
        "rate": rate,
        "seconds": seconds,
        "cpu": (time.process_time() - used) / len(requests),
    }


async def direct(engine: Any, count: int, requests: int, stream: bool) -> Round:
    """One round in this process."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    sampling = SamplingParams(**SAMPLING, detokenize=False, output_kind=kind)

    async def one(inputs: tuple[list[int], np.ndarray]) -> None:
        prompt, actions = inputs
        data = {"prompt_token_ids": prompt, "multi_modal_data": {"actions": list(actions)}}
        tokens = 0
        async for output in engine.generate(data, sampling, uuid4().hex):
            tokens += len(output.outputs[0].token_ids)
        assert tokens == 64

    return await loop(count, drawn(requests), one)


async def door(
    url: str, process: ProcessPoolExecutor, count: int, requests: int, stream: bool
) -> Round:
    """One round of clients in another process; the server runs in this one."""
    there = asyncio.get_running_loop().run_in_executor
    await there(process, write, requests, stream)
    used = time.process_time()
    outcome = await there(process, send, url, count)
    return {**outcome, "server_cpu": (time.process_time() - used) / requests}


def drawn(count: int) -> list[tuple[list[int], np.ndarray]]:
    """So many requests that no cache knows."""
    return [request(random.randrange(2**31)) for _ in range(count)]


def request(seed: int) -> tuple[list[int], np.ndarray]:
    """Prompt ids (210,) and actions (3, 6, 3) of one request, distinct for each seed."""
    from examples.terra.configuration import LlamaActionConfig
    from examples.terra.worlds import CHECKPOINT, CONTEXT_FRAMES, make_episode

    episode = make_episode(seed % 500)
    frames = episode.frames[:CONTEXT_FRAMES].copy()
    pad = LlamaActionConfig.from_pretrained(CHECKPOINT).pad_token_id
    frames[0, : 1 + seed % 7] = seed % pad  # no request is another one's cached prefix
    prompt = [token for frame in frames.tolist() for token in [*frame, *[pad] * 6]]
    return prompt, episode.actions[:CONTEXT_FRAMES]


# -- in the clients' process -----------------------------------------------------------------------


def write(requests: int, stream: bool) -> None:
    """The requests of a round: none of the time is the door's."""
    options = {"sampling_params": SAMPLING, "stream": stream}
    _bodies[:] = [
        build_request(GenerateRequest, prompt, {"actions": actions}, options)
        for prompt, actions in drawn(requests)
    ]


def send(url: str, count: int) -> Round:
    """Send what was written; answers are read as bytes, as load generators do."""
    return asyncio.run(sent(url, count))


async def sent(url: str, count: int) -> Round:
    import aiohttp

    sizes: list[int] = []
    connections = aiohttp.TCPConnector(limit=count)
    async with aiohttp.ClientSession(connector=connections, raise_for_status=True) as session:

        async def one(body: bytes) -> None:
            async with session.post(url, data=body) as response:
                answer = await response.read()
            assert answer.endswith(b"data: [DONE]\n\n") or b'"completion_tokens":64' in answer
            sizes.append(len(answer))

        outcome = await loop(count, _bodies, one)
    return {**outcome, "sent": statistics.mean(map(len, _bodies)), "received": np.mean(sizes)}


if __name__ == "__main__":
    measure.quiet()
    typer.run(main)
