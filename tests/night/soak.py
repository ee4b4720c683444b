"""Malformed requests by the thousand at a server of Terra, beside good clients that check every answer.

    python -m tests.night.soak --requests 10000 --seed 0 --store soak.json

The requests and what may come back are those of tests/night/malformed.py. The server is started here, with limits that
are reached cheaply and caches that are full soon: what grows after that is a leak. Of vLLM's own routes only hangs and
the engine's death count, and their 5xx are listed. The exit status is 1 if anything was violated.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import numpy as np
import psutil
import torch
import typer
from tqdm import tqdm
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from examples.terra import CHECKPOINT
from examples.terra.reference import LlamaActionForCausalLM
from mmkit.serve import Client, RequestError
from mmkit.serve.process import Server
from tests.night import malformed
from tests.night.malformed import ACTIONS, BOUND_SECONDS, FRAMES, GREEDY, HEADERS, KEY, LIMITS, SHOWN, Body, Case, Post

OPTIONS = ("--dtype", "float32", "--skip-tokenizer-init", "--block-size", "32", "--served-model-name", "terra",
    "--enable-scale-out", "--mm-processor-cache-gb", "0.0002", "--num-gpu-blocks-override", "1024",
    "--api-key", KEY)  # fmt: skip
"""vLLM counts an action in its processor cache as the 72 bytes of its tensor, so these are 3,000 actions; 1,024 blocks
are 32,768 tokens."""
GAUGES = ("mmkit:sessions_open", "vllm:num_requests_running", "vllm:num_requests_waiting")
"""What the server says is open or running."""
CONCURRENCY, MOST_SOCKETS = 12, 4
STATUSES = {malformed.REFUSED: "4", malformed.TAKEN: "2", malformed.EITHER: "24", malformed.STOCK: "245"}
"""The first digits of what may be answered."""


def terra_server(log: Path, *options: str, environment: Body | None = None, **limits: int) -> Server:
    """A server of Terra, not started yet; `limits` replace those of LIMITS."""
    variables = {
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        # oneDNN keeps what it compiled for the last 1024 shapes: 150 MiB, which look like a leak
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
    } | {f"MMKIT_SERVE_{name}": str(value) for name, value in {**LIMITS, **limits}.items()}  # fmt: skip
    return Server(CHECKPOINT, *OPTIONS, *options, environment={**variables, **(environment or {})}, log=log)


def rollout(context: int, count: int, episodes: int = len(FRAMES)) -> np.ndarray:
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
        self.expected = {context: rollout(context, 4).tolist() for context in (1, 3)}
        self.process = psutil.Process(server.process.pid)
        self.sockets = threading.Semaphore(MOST_SOCKETS)
        self.over, self.dead = threading.Event(), threading.Event()
        self.answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.violations: list[Body] = []
        self.stock_errors: dict[str, str] = {}
        self.in_flight: dict[int, Case] = {}
        self.seconds: list[float] = []
        self.good: Counter[str] = Counter()
        self.memory: list[tuple[float, float]] = []

    def violate(self, kind: str, what: str, **more: Any) -> None:
        self.violations.append({"kind": kind, "what": what[:SHOWN], **more})

    # -- malformed requests

    def one(self, number: int) -> None:
        """Ask one request, and judge the answer."""
        if self.dead.is_set():
            return
        this = self.in_flight[number] = malformed.case(self.seed, number)
        begun, status, problem = time.monotonic(), "cut", ""
        try:
            if isinstance(this.request, Post):
                status, problem = self._post(this, this.request)
            else:
                status = self._talk(number, this.request)
        except malformed.Wrong as error:
            problem = str(error)
        except (httpx.HTTPError, WebSocketException, OSError, ValueError) as error:
            if not (isinstance(this.request, Post) and len(this.request.content) > LIMITS["BODY_BYTES"]):
                problem = f"{type(error).__name__}: {error}"
            time.sleep(2)  # if the server is dead, that is known then
        if self.dead.is_set():
            return  # those in flight are suspects
        if problem:
            self.violate(this.kind, problem, number=number, request=this.shown)
        del self.in_flight[number]
        self.seconds.append(time.monotonic() - begun)
        self.answers[this.kind][status] += 1

    def _post(self, this: Case, request: Post) -> tuple[str, str]:
        """Status, or a word, and what is wrong with the answer."""
        url, headers = self.url + request.path, {**HEADERS, **request.headers}
        timeout = BOUND_SECONDS if request.leave is None else request.leave
        try:
            # no connection is used twice: what a malformed request does to one is the server's to choose
            answer = httpx.request(request.method, url, content=request.content, headers=headers, timeout=timeout)
        except httpx.TimeoutException:
            return "left", "no answer" if request.leave is None else ""
        status, problem = str(answer.status_code), ""
        if status[0] not in STATUSES[request.expects]:
            problem = f"{request.expects} was expected, answered {status}: {answer.text[:300]}"
        elif request.expects is malformed.STOCK:
            if status[0] == "5":
                self.stock_errors[this.kind] = this.shown
        elif status[0] == "4":
            problem = malformed.wrong_error(answer.json())
        elif '"error":{' in answer.text:
            problem = f"an error in a stream: {answer.text[:300]}"
        return status, problem

    def _talk(self, number: int, play: malformed.Play) -> str:
        url = self.url.replace("http", "ws") + malformed.SESSION
        options = {"open_timeout": BOUND_SECONDS, "max_size": None, "proxy": None, "ping_interval": None}
        while True:
            with self.sockets, connect(url, additional_headers=HEADERS, **options) as socket:
                talk = malformed.Talk(socket, Random(f"{self.seed}-{number}"))
                with suppress(malformed.Busy):
                    talk.hear("ready")
                    play(talk)
                    return "200"
            time.sleep(0.2)

    # -- good clients

    def _good(self, name: str, ask: Callable[..., Any], stream: bool) -> None:
        """Ask again and again for what the reference generates too, (context, episode, frame)."""
        rng = Random(f"{self.seed}-{name}")
        with Client(self.url, api_key=KEY, timeout=BOUND_SECONDS) as client:
            while not self.over.is_set():
                episode, context = rng.randrange(len(FRAMES)), rng.choice((1, 3))
                try:
                    frames = ask(client, episode, context, stream, cache_salt=rng.choice((None, f"{rng.random()}")))
                    self.good[name] += 1
                    if frames != self.expected[context][episode][: len(frames)]:
                        self.violate(name, f"wrong answer to episode {episode} after {context} frame(s): {frames}")
                except Exception as error:
                    if not self.dead.is_set() and not (isinstance(error, RequestError) and error.code == 429):
                        self.violate(name, f"{type(error).__name__}: {error}")
                    time.sleep(0.3)

    # -- the server

    def _watch(self) -> None:
        """Weigh the API server and the engine, in MiB, until the server is dead or all is over."""
        failed = 0
        while not self.over.wait(1):
            with suppress(psutil.Error):
                sizes = [process.memory_info().rss / 2**20 for process in self.process.children(recursive=True)]
                self.memory.append((self.process.memory_info().rss / 2**20, max(sizes, default=0)))
            try:
                failed = 0 if httpx.get(f"{self.url}/health", timeout=BOUND_SECONDS).status_code == 200 else failed + 1
            except httpx.HTTPError:
                failed += 1
            if failed == 2:
                self.dead.set()
                suspects = [f"{this.kind} #{number} {this.shown[:300]}" for number, this in self.in_flight.items()]
                self.violate("engine", "died", suspects=suspects)
                self.over.set()

    def _settled(self) -> dict[str, float]:
        """The gauges, when they are 0 or some time has passed."""
        gauges: dict[str, float] = {}
        for _ in range(0 if self.dead.is_set() else 120):
            totals = metrics(httpx.get(f"{self.url}/metrics", timeout=BOUND_SECONDS).text)
            gauges = {name: totals[name] for name in GAUGES if name in totals}
            if gauges == dict.fromkeys(GAUGES, 0.0):
                return gauges
            time.sleep(0.5)
        self.violate("metrics", f"after all requests: {gauges}")
        return gauges

    def _growth(self) -> list[list[float]]:
        """Memory of both processes over the run; growth after the caches are full is a violation."""
        if len(self.memory) < 10:
            return []
        tenths = [np.median(part, axis=0) for part in np.array_split(np.array(self.memory), 10)]
        before, after = np.median(tenths[2:5], axis=0), np.median(tenths[8:], axis=0)
        if ((after > before * 1.1) & (after > before + 100)).any():
            self.violate("memory", f"grew from {before.round()} to {after.round()} MiB")
        return np.round(tenths, 1).tolist()

    def run(self, numbers: Sequence[int]) -> Body:
        """Ask, and report."""
        with ThreadPoolExecutor() as beside:
            tasks = [beside.submit(self._watch)]
            for ask in (request, session):
                for how, stream in (("whole", False), ("streamed", True)):
                    tasks.append(beside.submit(self._good, f"good {how} {ask.__name__}", ask, stream))
            try:
                with ThreadPoolExecutor(CONCURRENCY) as workers:
                    list(tqdm(workers.map(self.one, numbers), total=len(numbers), disable=None))
            finally:
                self.over.set()
            for task in tasks:
                task.result()
        return {
            "seed": self.seed,
            "requests": len(self.seconds),
            "slowest_seconds": round(max(self.seconds), 3),
            "good_answers": dict(self.good),
            "statuses": dict(sum(self.answers.values(), Counter())),
            "memory_mib_in_each_tenth": self._growth(),
            "gauges": self._settled(),
            "stock_5xx": self.stock_errors,
            "kinds": {name: dict(counts) for name, counts in sorted(self.answers.items())},
            "violations": self.violations,
        }


def request(client: Client, episode: int, context: int, stream: bool, **options: Any) -> list[list[int]]:
    """One frame by one request."""
    prompt, options = malformed.prompt_of(episode, context), {"max_tokens": FRAMES.shape[-1], **GREEDY, **options}
    items = {"actions": ACTIONS[episode, :context]}
    if not stream:
        return [client.generate(prompt, items, **options).choices[0].token_ids]
    events = client.stream(prompt, items, **options)
    return [[token for event in events for choice in event.choices for token in choice.token_ids]]


def session(client: Client, episode: int, context: int, stream: bool, **options: Any) -> list[list[int]]:
    """Four frames by a session."""
    prompt, items = malformed.prompt_of(episode, context), {"actions": ACTIONS[episode, :context].tolist()}
    options = {"max_tokens": FRAMES.shape[-1], "stream": stream, **GREEDY, **options}
    with client.session(prompt, items, **options) as talk:
        chunks = [talk.next({"actions": ACTIONS[episode, step : step + 1]}) for step in range(context, context + 3)]
        return [chunk.token_ids for chunk in (talk.first, *chunks)]


def soak(server: Server, numbers: Sequence[int], seed: int = 0) -> Body:
    """The report on requests of a seed, sent to a server of `terra_server`."""
    return Soak(server, seed).run(numbers)


def main(
    requests: int = 10_000,
    seed: int = 0,
    only: Annotated[int | None, typer.Option(help="Number of one request of the seed.")] = None,
    store: Annotated[Path | None, typer.Option(help="File for the report, in JSON.")] = None,
    log: Annotated[Path, typer.Option(help="File for what the server writes.")] = Path("out/soak.log"),
) -> None:
    """Malformed requests at a server, beside good clients."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with terra_server(log) as server:
        report = soak(server, range(requests) if only is None else [only], seed)
    if store:
        store.parent.mkdir(parents=True, exist_ok=True)
        store.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    raise typer.Exit(bool(report["violations"]))


if __name__ == "__main__":
    typer.run(main)
