"""Malformed requests by the thousand at a server of the road world, beside good clients that check every answer.

    python -m tests.night.soak --requests 10000 --seed 0 --store soak.json

The requests and what may come back are those of tests/night/malformed.py. The server is started here, with limits that
are reached cheaply and caches that are full soon: what grows after that is a leak. Of vLLM's own routes only hangs and
the engine's death count, and their 5xx are listed. The exit status is 1 if anything was violated.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import psutil
import torch
import typer
from tqdm import tqdm
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from examples.terra import CHECKPOINT
from examples.terra.reference import LlamaActionForCausalLM
from mmkit.serve import AsyncClient, RequestError
from mmkit.serve.process import Server
from tests.night.malformed import (
    ACTIONS,
    BOUND_SECONDS,
    EITHER,
    EPISODES,
    FRAMES,
    GREEDY,
    HEADERS,
    KEY,
    KINDS,
    LIMITS,
    REFUSED,
    SESSION,
    SHOWN,
    STOCK,
    TAKEN,
    Body,
    Busy,
    Case,
    Post,
    Script,
    Talk,
    Wrong,
    case,
    prompt_of,
    wrong_error,
)

OPTIONS = ("--dtype", "float32", "--skip-tokenizer-init", "--block-size", "32", "--served-model-name", "terra",
    "--enable-scale-out", "--mm-processor-cache-gb", "0.0002", "--num-gpu-blocks-override", "1024",
    "--api-key", KEY)  # fmt: skip
"""vLLM counts an action in its processor cache as the 72 bytes of its tensor, so these are 3,000 actions; 1,024 blocks
are 32,768 tokens."""
GAUGES = ("mmkit:sessions_open", "vllm:num_requests_running", "vllm:num_requests_waiting")
"""What the server says is open or running."""
CONCURRENCY, MOST_SOCKETS = 12, 4


def terra_server(log: Path, *options: str, environment: Body | None = None, **limits: int) -> Server:
    """A server of the road world, not started yet; `limits` replace those of LIMITS."""
    variables = {
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        # oneDNN keeps what it compiled for the last 1024 shapes: 150 MiB, which look like a leak
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
    } | {f"MMKIT_SERVE_{name}": str(value) for name, value in {**LIMITS, **limits}.items()}  # fmt: skip
    return Server(CHECKPOINT, *OPTIONS, *options, environment={**variables, **(environment or {})}, log=log)


def rollout(context: int, count: int, episodes: int = len(EPISODES)) -> np.ndarray:
    """Frames that the reference generates after so many of each episode, (episodes, count, num_image_patches)."""
    reference = LlamaActionForCausalLM.from_pretrained(CHECKPOINT).eval()
    frames, actions = torch.from_numpy(FRAMES[:episodes, :context]), torch.from_numpy(ACTIONS[:episodes])
    return torch.stack(list(reference.rollout(frames, actions, count)), dim=1).numpy()


def metrics(text: str) -> dict[str, float]:
    """Prometheus' samples, those of one name added up."""
    totals: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if not line.startswith("#"):
            sample, _, value = line.rpartition(" ")
            totals[sample.partition("{")[0]] += float(value)
    return totals


class Soak:
    """One run against one server."""

    def __init__(self, server: Server, seed: int) -> None:
        assert server.process is not None
        self.url, self.seed = server.url, seed
        self.ws = f"ws{server.url.removeprefix('http')}{SESSION}"
        self.process = psutil.Process(server.process.pid)
        # no connection is used twice: what a malformed request does to one is the server's to choose
        limits = httpx.Limits(max_keepalive_connections=0)
        options = {"base_url": self.url, "headers": HEADERS, "timeout": BOUND_SECONDS, "trust_env": False}
        self.http = httpx.AsyncClient(limits=limits, **options)
        self.client = AsyncClient(self.url, api_key=KEY, timeout=BOUND_SECONDS)
        self.sockets = asyncio.Semaphore(MOST_SOCKETS)
        self.answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.violations: list[Body] = []
        self.stock_errors: dict[str, Body] = {}
        self.in_flight: dict[int, Case] = {}
        self.seconds: list[float] = []
        self.good: Counter[str] = Counter()
        self.memory: list[tuple[float, float]] = []
        self.dead = self.done = False

    def violate(self, kind: str, what: str, this: Case | None = None) -> None:
        request = {"number": this.number, "request": this.shown} if this else {}
        self.violations.append({"kind": kind, "what": what[:SHOWN], **request})

    # -- malformed requests

    async def one(self, number: int) -> None:
        """Ask one request, and judge the answer."""
        this = self.in_flight[number] = case(self.seed, number)
        name, begun, status, body = this.kind.name, time.monotonic(), "cut", b""
        try:
            async with asyncio.timeout(BOUND_SECONDS):
                status, body = await self._ask(number, this.request)
        except TimeoutError:
            self.violate(name, f"no answer within {BOUND_SECONDS:g} s", this)
        except Wrong as error:
            self.violate(name, str(error), this)
        except (httpx.HTTPError, WebSocketException, OSError, ValueError) as error:
            if not (isinstance(this.request, Post) and len(this.request.content) > LIMITS["BODY_BYTES"]):
                self.violate(name, f"{type(error).__name__}: {error}", this)
            await asyncio.sleep(2)  # if the server is dead, that is known then
        if self.dead:
            return  # those in flight are suspects
        del self.in_flight[number]
        self.seconds.append(time.monotonic() - begun)
        self.answers[name][status] += 1
        if status.isdigit():
            self._judge(this, int(status), body)

    async def _ask(self, number: int, request: Post | Script) -> tuple[str, bytes]:
        """Status, or a word, and body."""
        if isinstance(request, Script):
            return await self._talk(number, request)
        asking = self.http.request(request.method, request.path, content=request.content, headers=request.headers)
        if request.leave is None:
            response = await asking
        else:
            try:
                response = await asyncio.wait_for(asking, request.leave)
            except TimeoutError:
                return "left", b""
        return str(response.status_code), response.content

    async def _talk(self, number: int, script: Script) -> tuple[str, bytes]:
        options = {"additional_headers": HEADERS, "max_size": None, "proxy": None, "ping_interval": None}
        while True:
            async with self.sockets, connect(self.ws, open_timeout=BOUND_SECONDS, **options) as socket:
                talk = Talk(socket, random.Random(f"{self.seed}-{number}"))
                with suppress(Busy):
                    await talk.hear("ready")
                    await script.play(talk)
                    return "200", b""
            await asyncio.sleep(0.2)

    def _judge(self, this: Case, status: int, body: bytes) -> None:
        name, expects = this.kind.name, this.kind.expects
        if expects is STOCK:
            if status >= 500:
                known = self.stock_errors.setdefault(name, {"count": 0, "status": status, "request": this.shown})
                known["count"] += 1
            return
        if status // 100 not in {REFUSED: (4,), TAKEN: (2,), EITHER: (2, 4)}[expects]:
            self.violate(name, f"answered {status}: {body[:300].decode(errors='replace')}", this)
        elif isinstance(this.request, Post):
            problem = ""
            if status >= 400:
                problem = wrong_error(json.loads(body))
            elif b'"error":{' in body:  # an event of a stream
                problem = f"an error in a stream: {body[:300]!r}"
            if problem:
                self.violate(name, f"{status}, {problem}", this)

    # -- good clients

    def _good_clients(self) -> dict[str, Callable[[random.Random], Awaitable[tuple[Any, Any]]]]:
        """By name, what each asks: the answer, and what it should be."""
        after_one, after_three = rollout(1, 1).tolist(), rollout(3, 4).tolist()

        async def single(rng: random.Random, stream: bool) -> tuple[Any, Any]:
            episode, frames = rng.randrange(len(EPISODES)), rng.choice((1, 3))
            items = {"actions": ACTIONS[episode, :frames].tolist() if stream else ACTIONS[episode, :frames]}
            salt = f"{rng.random()}" if rng.random() < 0.5 else None  # else the prefix cache may answer
            options = {"max_tokens": FRAMES.shape[-1], "cache_salt": salt, **GREEDY}
            prompt = prompt_of(episode, frames)
            if stream:
                events = self.client.stream(prompt, items, **options)
                ids = [token async for event in events for choice in event.choices for token in choice.token_ids]
            else:
                ids = (await self.client.generate(prompt, items, **options)).choices[0].token_ids
            return ids, (after_one if frames == 1 else after_three)[episode][0]

        async def loop(rng: random.Random) -> tuple[Any, Any]:
            episode = rng.randrange(len(EPISODES))
            options = {"max_tokens": FRAMES.shape[-1], "stream": rng.random() < 0.5, **GREEDY}
            async with self.client.session(prompt_of(episode, 3), {"actions": ACTIONS[episode, :3]}, **options) as talk:
                frames = [talk.first.token_ids]
                for step in range(3, 6):
                    frames.append((await talk.next({"actions": ACTIONS[episode, step : step + 1]})).token_ids)
            return frames, after_three[episode]

        return {
            "json": lambda rng: single(rng, False),
            "stream": lambda rng: single(rng, True),
            "session": loop,
            "another session": loop,
        }

    async def _good(self, name: str, ask: Callable[[random.Random], Awaitable[tuple[Any, Any]]]) -> None:
        rng = random.Random(f"{self.seed}-{name}")
        while not (self.done or self.dead):
            try:
                async with asyncio.timeout(BOUND_SECONDS):
                    answer, expected = await ask(rng)
                self.good[name] += 1
                if answer != expected:
                    self.violate(f"good.{name}", f"wrong answer: {answer}, not {expected}")
            except RequestError as error:
                if error.code != 429:
                    self.violate(f"good.{name}", str(error))
                await asyncio.sleep(0.3)
            except Exception as error:
                if not self.dead:
                    self.violate(f"good.{name}", f"{type(error).__name__}: {error}")
                    await asyncio.sleep(0.5)

    # -- the server

    async def _watch(self) -> None:
        failed = 0
        while not self.done and failed < 2:
            await asyncio.sleep(1)
            self._weigh()
            with suppress(httpx.HTTPError):
                failed = 0 if (await self.http.get("/health")).status_code == 200 else failed + 1
                continue
            failed += 1
        if not self.done:
            self.dead = True
            suspects = [f"{this.kind.name} #{number} {this.shown[:300]}" for number, this in self.in_flight.items()]
            self.violations.append({"kind": "engine", "what": "died", "suspects": suspects})

    def _weigh(self) -> None:
        """Resident memory of the API server and of the engine, in MiB."""
        with suppress(psutil.Error):
            sizes = [process.memory_info().rss / 2**20 for process in self.process.children(recursive=True)]
            self.memory.append((self.process.memory_info().rss / 2**20, max(sizes, default=0)))

    async def _settled(self) -> dict[str, float]:
        """The gauges, when they are 0 or some time has passed."""
        for _ in range(120):
            totals = metrics((await self.http.get("/metrics")).text)
            gauges = {name: totals[name] for name in GAUGES if name in totals}
            if gauges == dict.fromkeys(GAUGES, 0.0):
                return gauges
            await asyncio.sleep(0.5)
        self.violate("metrics", f"after all requests: {gauges}")
        return gauges

    # -- all together

    async def run(self, numbers: Sequence[int]) -> Body:
        """Ask, and report."""
        begun = time.monotonic()
        waiting = iter(tqdm(numbers, unit="request", smoothing=0, disable=None))

        async def work() -> None:
            for number in waiting:
                if self.dead:
                    return
                await self.one(number)

        beside = [asyncio.create_task(self._good(*client)) for client in self._good_clients().items()]
        beside.append(asyncio.create_task(self._watch()))
        workers = [asyncio.create_task(work()) for _ in range(CONCURRENCY)]
        while (pending := [task for task in workers if not task.done()]) and not self.dead:
            await asyncio.wait(pending, timeout=1)
        for task in workers:
            task.cancel()  # some of them may wait for a dead engine
        outcomes = await asyncio.gather(*workers, return_exceptions=True)
        self.done = True
        await asyncio.gather(*beside)
        if errors := [outcome for outcome in outcomes if isinstance(outcome, Exception)]:
            raise errors[0]
        gauges = {} if self.dead else await self._settled()
        await self.http.aclose()
        await self.client.close()
        return {
            "seed": self.seed,
            "requests": len(self.seconds),
            "seconds": round(time.monotonic() - begun, 1),
            "answer_seconds": [round(statistics.median(self.seconds), 3), round(max(self.seconds), 3)],
            "good_answers": dict(self.good),
            "statuses": dict(sum(self.answers.values(), Counter())),
            "memory_mib_in_each_tenth": self._growth(),
            "gauges": gauges,
            "stock_5xx": self.stock_errors,
            "kinds": {name: dict(counts) for name, counts in sorted(self.answers.items())},
            "violations": self.violations,
        }

    def _growth(self) -> list[list[float]]:
        """Memory of both processes over the run; growth after the caches are full is a violation."""
        if len(self.memory) < 10:
            return []
        tenths = [np.median(part, axis=0) for part in np.array_split(np.array(self.memory), 10)]
        before, after = np.median(tenths[2:5], axis=0), np.median(tenths[8:], axis=0)
        if ((after > before * 1.1) & (after > before + 100)).any():
            self.violate("memory", f"grew from {before.round()} to {after.round()} MiB")
        return np.round(tenths, 1).tolist()


def soak(server: Server, numbers: Sequence[int], seed: int = 0) -> Body:
    """The report on requests of a seed, sent to a server of `terra_server`."""
    return asyncio.run(Soak(server, seed).run(numbers))


def main(
    requests: int = 10_000,
    seed: int = 0,
    only: Annotated[int | None, typer.Option(help="Number of one request of the seed.")] = None,
    store: Annotated[Path | None, typer.Option(help="File for the report, in JSON.")] = None,
    log: Annotated[Path, typer.Option(help="File for what the server writes.")] = Path("out/soak.log"),
) -> None:
    """Malformed requests at a server, beside good clients."""
    numbers = range(requests) if only is None else [only]
    log.parent.mkdir(parents=True, exist_ok=True)
    with terra_server(log) as server:
        report = soak(server, numbers, seed)
    if store:
        store.parent.mkdir(parents=True, exist_ok=True)
        store.write_text(json.dumps(report, indent=1) + "\n")
    for name, counts in report.pop("kinds").items():
        print(f"{name:36} {KINDS[name].expects:8} {counts}")
    print(json.dumps(report, indent=1))
    raise typer.Exit(bool(report["violations"]))


if __name__ == "__main__":
    typer.run(main)
