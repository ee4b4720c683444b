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

from examples.server import find_free_port
from mmkit.serve.client import build_request
from mmkit.serve.protocol import GenerateRequest

from . import measure

KINDS = ("direct", "door")
NEW_TOKENS = 64
"""Of each request."""

COLUMNS = ("clients", "directly", "through the routes", "ratio (least to most of a pair of rounds)")
SAMPLING = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True}

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
    """Measure requests per second and latencies of N clients, through the door and directly."""
    import uvloop

    figures = uvloop.run(measure_all(clients or [1, 4, 16, 64], requests, rounds, stream))
    report = {"requests": requests, "rounds": rounds, "stream": stream, "rows": figures}
    name = "serve_load_stream" if stream else "serve_load"
    rows = [format_row(figure) for figure in figures]
    measure.store(name, report, [*COLUMNS, "p50", "p99"], rows)


async def measure_all(counts: list[int], requests: int, rounds: int, stream: bool) -> list[Any]:
    """Return the figures of each number of clients."""
    figures = []
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        async with serve() as (engine, url):
            for count in counts:
                number = max(requests, 3 * count)
                direct: list[Round] = []
                door: list[Round] = []
                for turn in range(rounds + 1):
                    # each kind is as often the first as the second
                    if turn % 2:
                        direct.append(await run_direct(engine, count, number, stream))
                        door.append(await run_door(url, process, count, number, stream))
                    else:
                        door.append(await run_door(url, process, count, number, stream))
                        direct.append(await run_direct(engine, count, number, stream))
                # the first round warms up
                figure = summarise(count, {"direct": direct[1:], "door": door[1:]})
                figures.append(figure)
                print(f"{count} clients: {figure['ratio']:.3f}", file=sys.stderr, flush=True)
    return figures


@asynccontextmanager
async def serve() -> AsyncIterator[tuple[Any, str]]:
    """Yield an engine in this process, and the address of the routes."""
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
    app = FastAPI()
    plugin = MmkitEndpoints()
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
    port = find_free_port()
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


def summarise(count: int, rounds: dict[str, list[Round]]) -> dict[str, Any]:
    """Return the figures of one number of clients.

    These are medians over the rounds, and the ratio of each pair of rounds.
    """
    ratios = []
    for door, direct in zip(rounds["door"], rounds["direct"], strict=True):
        ratios.append(door["rate"] / direct["rate"])
    figures: dict[str, Any] = {
        "clients": count,
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }
    for kind in KINDS:
        seconds: list[float] = []
        for each in rounds[kind]:
            seconds.extend(each["seconds"])
        p50, p90, p99 = np.percentile(np.array(seconds) * 1000, [50, 90, 99])
        figures[kind] = {
            "requests_per_second": find_median(rounds[kind], "rate"),
            "p50_ms": p50,
            "p90_ms": p90,
            "p99_ms": p99,
            "cpu_ms_of_the_caller": find_median(rounds[kind], "cpu") * 1000,
        }
    last = rounds["door"][-1]
    figures["door"] |= {
        "server_cpu_ms": find_median(rounds["door"], "server_cpu") * 1000,
        "bytes_sent": last["sent"],
        "bytes_received": last["received"],
    }
    return figures


def find_median(rounds: Sequence[Round], key: str) -> float:
    """Return the median of a figure over rounds."""
    return statistics.median(each[key] for each in rounds)


def format_row(figures: dict[str, Any]) -> list[str]:
    """Return the line of the table for one number of clients."""
    least, most = figures["ratio_range"]
    door = figures["door"]
    return [
        str(figures["clients"]),
        f"{figures['direct']['requests_per_second']:.1f} requests/s",
        f"{door['requests_per_second']:.1f}",
        f"{figures['ratio']:.2f} ({least:.2f} to {most:.2f})",
        f"{door['p50_ms']:,.0f} ms",
        f"{door['p99_ms']:,.0f} ms",
    ]


async def run_clients(
    count: int, requests: Sequence[Any], send_request: Callable[[Any], Awaitable[None]]
) -> Round:
    """Let so many clients send requests, each client one request after the other."""
    waiting = iter(requests)
    seconds: list[float] = []

    async def run_client() -> None:
        # all clients share the iterator
        for request in waiting:
            start = time.perf_counter()
            await send_request(request)
            seconds.append(time.perf_counter() - start)

    start = time.perf_counter()
    processor_start = time.process_time()
    await asyncio.gather(*[run_client() for _ in range(count)])
    rate = len(requests) / (time.perf_counter() - start)
    processor_time = time.process_time() - processor_start
    return {"rate": rate, "seconds": seconds, "cpu": processor_time / len(requests)}


async def run_direct(engine: Any, count: int, requests: int, stream: bool) -> Round:
    """Run one round of clients in this process."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    sampling = SamplingParams(**SAMPLING, detokenize=False, output_kind=kind)

    async def generate(request: tuple[list[int], np.ndarray]) -> None:
        prompt, actions = request
        data = {"prompt_token_ids": prompt, "multi_modal_data": {"actions": list(actions)}}
        tokens = 0
        async for output in engine.generate(data, sampling, uuid4().hex):
            tokens += len(output.outputs[0].token_ids)
        assert tokens == NEW_TOKENS

    return await run_clients(count, draw_requests(requests), generate)


async def run_door(
    url: str, process: ProcessPoolExecutor, count: int, requests: int, stream: bool
) -> Round:
    """Run one round of clients in another process; the server runs in this one."""
    run_there = asyncio.get_running_loop().run_in_executor
    await run_there(process, write_bodies, requests, stream)
    start = time.process_time()
    outcome = await run_there(process, send_bodies, url, count)
    return {**outcome, "server_cpu": (time.process_time() - start) / requests}


def draw_requests(count: int) -> list[tuple[list[int], np.ndarray]]:
    """Return so many requests that no cache knows."""
    return [make_request(random.randrange(2**31)) for _ in range(count)]


def make_request(seed: int) -> tuple[list[int], np.ndarray]:
    """Return prompt ids (210,) and actions (3, 6, 3) of one request, distinct for each seed."""
    from examples.terra.configuration import LlamaActionConfig
    from examples.terra.worlds import CHECKPOINT, CONTEXT_FRAMES, make_episode

    episode = make_episode(seed % 500)
    frames = episode.frames[:CONTEXT_FRAMES].copy()
    pad = LlamaActionConfig.from_pretrained(CHECKPOINT).pad_token_id
    frames[0, : 1 + seed % 7] = seed % pad  # no request is another one's cached prefix
    prompt: list[int] = []
    for frame in frames.tolist():
        prompt += frame + [pad] * 6
    return prompt, episode.actions[:CONTEXT_FRAMES]


# -- in the clients' process -----------------------------------------------------------------------


def write_bodies(requests: int, stream: bool) -> None:
    """Write the requests of a round, before its time begins."""
    options = {"sampling_params": SAMPLING, "stream": stream}
    _bodies.clear()
    for prompt, actions in draw_requests(requests):
        _bodies.append(build_request(GenerateRequest, prompt, {"actions": actions}, options))


def send_bodies(url: str, count: int) -> Round:
    """Send what was written; answers are read as bytes, as load generators do."""
    return asyncio.run(post_bodies(url, count))


async def post_bodies(url: str, count: int) -> Round:
    import aiohttp

    sizes: list[int] = []
    connections = aiohttp.TCPConnector(limit=count)
    async with aiohttp.ClientSession(connector=connections, raise_for_status=True) as session:

        async def post(body: bytes) -> None:
            async with session.post(url, data=body) as response:
                answer = await response.read()
            is_whole_stream = answer.endswith(b"data: [DONE]\n\n")
            assert is_whole_stream or b'"completion_tokens":%d' % NEW_TOKENS in answer
            sizes.append(len(answer))

        outcome = await run_clients(count, _bodies, post)
    sent_bytes = statistics.mean(len(body) for body in _bodies)
    return {**outcome, "sent": sent_bytes, "received": np.mean(sizes)}


if __name__ == "__main__":
    measure.quiet_libraries()
    typer.run(main)
