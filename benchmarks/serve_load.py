"""What the HTTP door costs: ``python -m benchmarks.serve_load --help``.

One engine, in this process. It is called directly (`AsyncLLM.generate`, as an in-process user does)
and through the routes of mmkit on a loopback socket (clients in a process of their own, since a
server's clients are elsewhere), in turns. Each request is one frame of Terra: 210 prompt tokens
with three actions, 64 new tokens.

Everything shares the cores of this machine, so the door's share holds the clients' work too.
"""

import asyncio
import json
import os
import random
import re
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit
from uuid import uuid4

import numpy as np
import typer

from mmkit.serve.process import free_port
from mmkit.serve.wire import encode

RESULTS = Path(__file__).parent / "results"
KINDS = ("direct", "door")


def main(
    clients: Annotated[
        list[int] | None, typer.Option(help="Clients at once; may be given several times.")
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, help="Requests of each round, at least three of each client.")
    ] = 64,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each kind, in turns.")] = 6,
    stream: Annotated[bool, typer.Option(help="Stream tokens, one event each.")] = False,
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = RESULTS,
    client: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Requests per second and latencies of N clients, through the door and directly."""
    import uvloop

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    counts = clients or [1, 4, 16, 64]
    if client is not None:
        uvloop.run(clients_of(client, counts[0], requests, stream))
        return
    report = uvloop.run(measure(counts, requests, rounds, stream))
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"serve_load{'_stream' if stream else ''}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    for row in report["rows"]:
        rates = " and ".join(f"{row[kind]['requests_per_second']:.1f} ({kind})" for kind in KINDS)
        print(f"{row['clients']} clients: {rates} requests/s, ratio {row['ratio']:.3f}")


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


async def measure(counts: list[int], requests: int, rounds: int, stream: bool) -> dict[str, Any]:
    """All rounds."""
    import uvicorn
    from fastapi import FastAPI
    from vllm import AsyncEngineArgs
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.v1.engine.async_llm import AsyncLLM

    from examples.terra import CHECKPOINT, register
    from examples.terra.rollout import BLOCK_SIZE
    from mmkit.serve.plugin import MmkitEndpoints

    register()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(CHECKPOINT), dtype="float32", skip_tokenizer_init=True, block_size=BLOCK_SIZE
        )
    )
    app, plugin = FastAPI(), MmkitEndpoints()
    plugin.attach_router(app)
    app.state.online_renderer = OnlineRenderer(
        engine.model_config,
        engine.renderer,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
    )
    await plugin.init_state(
        engine, app.state, Namespace(model="terra", served_model_name=["terra"])
    )
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    serving = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.05)
    url = f"http://127.0.0.1:{port}"
    rows = []
    try:
        for count in counts:
            number = max(requests, 3 * count)
            await direct(engine, count, number, stream)  # both are warm then
            await door(url, count, number, stream)
            taken: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
            for turn in range(rounds):
                for kind in KINDS if turn % 2 else reversed(KINDS):
                    run = (
                        direct(engine, count, number, stream)
                        if kind == "direct"
                        else door(url, count, number, stream)
                    )
                    taken[kind].append(await run)
            rows.append(row(count, taken))
            print(f"{count} clients: {rows[-1]['ratio']:.3f}", file=sys.stderr, flush=True)
    finally:
        server.should_exit = True
        await serving
        engine.shutdown()
    return {
        "requests": requests,
        "rounds": rounds,
        "stream": stream,
        "cores": os.cpu_count(),
        "rows": rows,
    }


def row(count: int, taken: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The figures of one number of clients: medians over the rounds, and the ratio of each pair of
    rounds."""
    rates = {kind: [one["rate"] for one in taken[kind]] for kind in KINDS}
    ratios = [a / b for a, b in zip(rates["door"], rates["direct"], strict=True)]
    figures = {}
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
    return {
        "clients": count,
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        **figures,
    }


async def loop(
    count: int, requests: Sequence[Any], one: Callable[[int, Any], Awaitable[None]]
) -> dict[str, Any]:
    """So many clients, one request after the other each."""
    waiting = iter(requests)
    seconds: list[float] = []

    async def drive(client: int) -> None:
        for request in waiting:
            start = time.perf_counter()
            await one(client, request)
            seconds.append(time.perf_counter() - start)

    start, used = time.perf_counter(), time.process_time()
    await asyncio.gather(*map(drive, range(count)))
    taken = time.perf_counter() - start
    return {
        "rate": len(requests) / taken,
        "seconds": seconds,
        "cpu": (time.process_time() - used) / len(requests),
    }


async def direct(engine: Any, count: int, requests: int, stream: bool) -> dict[str, Any]:
    """One round in this process."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    sampling = SamplingParams(
        temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False, output_kind=kind
    )

    async def one(_: int, inputs: tuple[list[int], np.ndarray]) -> None:
        prompt, actions = inputs
        data = {"prompt_token_ids": prompt, "multi_modal_data": {"actions": list(actions)}}
        tokens = 0
        async for output in engine.generate(data, sampling, uuid4().hex):
            tokens += len(output.outputs[0].token_ids)
        assert tokens == 64

    return await loop(count, drawn(requests), one)


async def door(url: str, count: int, requests: int, stream: bool) -> dict[str, Any]:
    """One round of clients in another process, which waits for a line before it begins."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.serve_load",
        "--client",
        url,
        "--clients",
        str(count),
    ]
    command += ["--requests", str(requests), *(["--stream"] if stream else [])]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=2**24)
    assert process.stdin is not None
    assert process.stdout is not None
    assert (await process.stdout.readline()).strip() == b"ready"
    used = time.process_time()  # of the server, which runs in this process
    process.stdin.write(b"go\n")
    line = await process.stdout.readline()
    used = time.process_time() - used
    await process.wait()
    return {**json.loads(line), "server_cpu": used / requests}


async def clients_of(url: str, count: int, requests: int, stream: bool) -> None:
    """The other process: requests are encoded before the round, and read as bytes, as load
    generators do."""
    address = urlsplit(url)
    connections = [
        await asyncio.open_connection(address.hostname, address.port) for _ in range(count)
    ]
    sampling = {"temperature": 0.0, "max_tokens": 64, "ignore_eos": True}
    options = {"sampling_params": sampling, "stream": stream}
    encoded = []
    for prompt, actions in drawn(requests):
        body = json.dumps(
            {"prompt": prompt, "items": encode({"actions": actions}), **options}
        ).encode()
        head = f"POST /v1/mm/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        encoded.append(head.encode() + body)

    sizes: list[int] = []

    async def one(client: int, request: bytes) -> None:
        reader, writer = connections[client]
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        if stream:
            events = await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            sizes.append(len(head) + len(events))
        else:
            found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            assert found is not None
            length = int(found[1])
            sizes.append(len(head) + length)
            answer = json.loads(await reader.readexactly(length))
            assert answer["usage"]["completion_tokens"] == 64

    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    outcome = await loop(count, encoded, one)
    outcome |= {"sent": statistics.mean(map(len, encoded)), "received": statistics.mean(sizes)}
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    typer.run(main)
