"""Malformed requests at a server of Terra, beside good clients that check every answer.

The requests and what may come back are those of tests/night/malformed.py. The limits of the server are reached cheaply,
and its caches are full soon: what grows after that is a leak. At vLLM's own routes, only hangs and the death of the
engine count as violations.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
import hypothesis
import numpy as np
import psutil
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import UnsatisfiedAssumption

from examples.server import Server
from examples.terra import CHECKPOINT
from mmkit.serve import Client, RequestError
from tests.engine.terra import rollouts
from tests.night import malformed
from tests.night.malformed import (
    ACTIONS,
    BOUND_SECONDS,
    FRAMES,
    GREEDY,
    KEY,
    LIMITS,
    MAX_CHARACTERS_SHOWN,
    Body,
    Kind,
)

MIB = 2**20
TOKENS_OF_FRAME = FRAMES.shape[-1]
OPTIONS = [
    "--dtype=float32",
    "--skip-tokenizer-init",
    "--block-size=32",
    "--served-model-name=terra",
    "--enable-scale-out",
    # 3,000 actions: vLLM counts an action in this cache as the 72 bytes of its tensor
    "--mm-processor-cache-gb=0.0002",
    # 32,768 tokens
    "--num-gpu-blocks-override=1024",
    f"--api-key={KEY}",
]
GAUGES = ("mmkit:sessions_open", "vllm:num_requests_running", "vllm:num_requests_waiting")
"""Metrics of what is open or running in a server."""
CONCURRENCY = 12
"""Clients that send malformed requests at once."""
WAIT = 240
"""Seconds that a test waits for an answer."""


def terra_server(log: Path, *options: str, environment: Body | None = None, **limits: int) -> Server:
    """Return a server of Terra that is not started yet. `limits` replace those of LIMITS."""
    variables = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        # by default, oneDNN caches what it compiled for the last 1024 shapes: 150 MiB, which look like a leak
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
    }
    for name, value in (LIMITS | limits).items():
        variables[f"MMKIT_SERVE_{name}"] = str(value)
    variables |= environment or {}
    return Server(CHECKPOINT, *OPTIONS, *options, environment=variables, log=log)


@functools.cache
def generate_by_reference(context: int, count: int, episodes: int = len(FRAMES)) -> np.ndarray:
    """Return the frames of the reference after the first `context` of each episode, (episodes, count, 64)."""
    return rollouts.generate_by_reference(FRAMES[:episodes], ACTIONS[:episodes], count, context)


def parse_metrics(text: str) -> dict[str, float]:
    """Return the sum of Prometheus' samples by name."""
    totals: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if not line.startswith("#"):
            sample, _, value = line.rpartition(" ")
            totals[sample.partition("{")[0]] += float(value)
    return totals


def wait_until(condition: Callable[[], Any]) -> bool:
    """Return whether a condition becomes true in time."""
    deadline = time.monotonic() + WAIT
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def scrape_metrics(server: Server) -> dict[str, float]:
    return parse_metrics(httpx.get(f"{server.url}/metrics", timeout=WAIT).text)


def wait_until_idle(server: Server) -> bool:
    """Return whether all sessions end in time, and the engine has nothing to do."""

    def is_idle() -> bool:
        metrics = scrape_metrics(server)
        return not any(metrics[name] for name in GAUGES)

    return wait_until(is_idle)


def measure_memory(server: Server, name: str = "VmRSS") -> int:
    """Return the bytes of a server's front process, by a name of /proc/PID/status."""
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            _, kibibytes, _ = line.split()
            return 1024 * int(kibibytes)
    raise ValueError(name)


@contextmanager
def watch_peak(server: Server) -> Iterator[Callable[[], int]]:
    """Yield a function that returns by how many bytes the front process has grown at most since the block began."""
    # makes the peak of the process, VmHWM, what it takes now
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")
    bytes_before = measure_memory(server)

    def measure_growth() -> int:
        return measure_memory(server, "VmHWM") - bytes_before

    yield measure_growth


# -- good clients ------------------------------------------------------------------------------------------------------


def request_frame(client: Client, episode: int, context: int, stream: bool, **options: Any) -> list[list[int]]:
    """Return the ids of one frame, by one request."""
    prompt = malformed.make_prompt(episode, context)
    items = {"actions": ACTIONS[episode, :context]}
    options = {"max_tokens": TOKENS_OF_FRAME, **GREEDY, **options}
    if not stream:
        return [client.generate(prompt, items, **options).choices[0].token_ids]
    ids: list[int] = []
    for event in client.stream(prompt, items, **options):
        for choice in event.choices:
            ids += choice.token_ids
    return [ids]


def request_frames_in_session(
    client: Client, episode: int, context: int, stream: bool, **options: Any
) -> list[list[int]]:
    """Return the ids of four frames, by a session."""
    prompt = malformed.make_prompt(episode, context)
    items = {"actions": ACTIONS[episode, :context].tolist()}
    options = {"max_tokens": TOKENS_OF_FRAME, "stream": stream, **GREEDY, **options}
    with client.session(prompt, items, **options) as session:
        frames = [session.first.token_ids]
        for step in range(context, context + 3):
            chunk = session.next({"actions": ACTIONS[episode, step : step + 1]})
            frames.append(chunk.token_ids)
        return frames


class GoodClient(NamedTuple):
    name: str
    request: Callable[..., list[list[int]]]
    stream: bool


GOOD_CLIENTS = (
    GoodClient("whole request", request_frame, stream=False),
    GoodClient("streamed request", request_frame, stream=True),
    GoodClient("whole session", request_frames_in_session, stream=False),
    GoodClient("streamed session", request_frames_in_session, stream=True),
)


class GoodClients:
    """Good clients of a server, which run while this is open. Each has had an answer before the block begins.

    They request frames again and again, compare them with those of the reference, and check the server's health.

    Args:
        server: the server, whose memory is measured.
        url: where they send requests, by default to the server itself.
        is_crowded: whether the server may have no place for one more session.

    Attributes:
        violations: all that was wrong.
        answers: the number of answers by the name of the client.
        memory: MiB of the API server and of its largest child, each second.
        suspects: the messages that each malformed client has sent in its current attempt.
        over: set when the clients have to end.
        dead: set when the server answers no more.
    """

    def __init__(self, server: Server, url: str = "", is_crowded: bool = False) -> None:
        self.url = url or server.url
        self.is_crowded = is_crowded
        self.over = threading.Event()
        self.dead = threading.Event()
        self.process = psutil.Process(server.process.pid)
        self.violations: list[Body] = []
        self.answers: Counter[str] = Counter()
        self.memory: list[tuple[float, float]] = []
        self.suspects: dict[int, list[str]] = {}
        # fill the cache of the reference before the clients start
        generate_by_reference(1, 4)
        generate_by_reference(3, 4)

    def __enter__(self) -> GoodClients:
        self.pool = ThreadPoolExecutor()
        self.tasks: list[Future[None]] = [self.pool.submit(self._watch)]
        for client in GOOD_CLIENTS:
            self.tasks.append(self.pool.submit(self._run_client, client))
        while len(self.answers) < len(GOOD_CLIENTS):
            if self.over.wait(0.1):
                break
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.pool.shutdown()
        for task in self.tasks:
            task.result()

    def add_violation(self, kind: str, what: str, **details: Any) -> None:
        self.violations.append({"kind": kind, "what": what[:MAX_CHARACTERS_SHOWN], **details})

    def _run_client(self, good_client: GoodClient) -> None:
        rng = Random(good_client.name)
        with Client(self.url, api_key=KEY, timeout=BOUND_SECONDS) as client:
            while not self.over.is_set():
                self._request_and_compare(good_client, client, rng)

    def _request_and_compare(self, good_client: GoodClient, client: Client, rng: Random) -> None:
        episode = rng.randrange(len(FRAMES))
        context = rng.choice((1, 3))
        salt = rng.choice((None, f"{rng.random()}"))
        try:
            frames = good_client.request(client, episode, context, good_client.stream, cache_salt=salt)
            self.answers[good_client.name] += 1
            if frames != generate_by_reference(context, 4)[episode, : len(frames)].tolist():
                what = f"wrong answer to episode {episode} after {context} frame(s): {frames}"
                self.add_violation(good_client.name, what)
        except Exception as error:
            is_without_place = self.is_crowded and isinstance(error, RequestError) and error.code == 429
            if not (self.dead.is_set() or is_without_place):
                self.add_violation(good_client.name, f"{type(error).__name__}: {error}")
            time.sleep(0.3)

    def _watch(self) -> None:
        """Measure memory and health each second, until the server is dead or the clients end."""
        failures = 0
        while not self.over.wait(1):
            with suppress(psutil.Error):
                self._measure_memory()
            if self._is_healthy():
                failures = 0
            else:
                failures += 1
            if failures == 2:
                self.dead.set()
                last_messages = [messages[-1:] for messages in self.suspects.values()]
                self.add_violation("engine", "died", suspects=last_messages)
                self.over.set()

    def _measure_memory(self) -> None:
        sizes = [process.memory_info().rss / MIB for process in self.process.children(recursive=True)]
        size_of_server = self.process.memory_info().rss / MIB
        self.memory.append((size_of_server, max(sizes, default=0)))

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=BOUND_SECONDS).status_code == 200
        except httpx.HTTPError:
            return False

    def check_growth(self) -> None:
        """Add a violation if either process grows after its caches are full.

        It grows if the median of the last two tenths of the time is higher than that of the third to fifth tenth, by
        10 % and 100 MiB.
        """
        if len(self.memory) < 10:
            return
        tenths = [np.median(part, axis=0) for part in np.array_split(np.array(self.memory), 10)]
        before = np.median(tenths[2:5], axis=0)
        after = np.median(tenths[8:], axis=0)
        grows = (after > before * 1.1) & (after > before + 100)
        if grows.any():
            self.add_violation("memory", f"grew from {before.round()} to {after.round()} MiB")


# -- the soak ----------------------------------------------------------------------------------------------------------


def soak(server: Server, requests: int, seed: int = 0, kinds: Sequence[Kind] = malformed.KINDS) -> Body:
    """Send so many malformed requests to a server of `terra_server`, and return a report."""
    cases = {}
    if not set(kinds) <= set(malformed.BY_DAY):
        cases = malformed.build_cases(server.url)
    statuses: defaultdict[str, Counter[str]] = defaultdict(Counter)
    lock_of_draws = threading.Lock()
    draws = settings(
        max_examples=math.ceil(requests / CONCURRENCY),
        phases=[Phase.generate],
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )

    def run_malformed_client(number: int) -> None:
        @hypothesis.seed(f"{seed}-{number}")
        @draws
        @hypothesis.given(st.data())
        def attempt_once(data: Any) -> None:
            """Send messages of a kind, and note what is wrong with the answers."""
            if good_clients.dead.is_set():
                # the attempts that the others are in are the suspects
                return

            def draw(strategy: st.SearchStrategy[Any]) -> Any:
                # Python 3.11 parses in one thread at a time
                with lock_of_draws:
                    return data.draw(strategy)

            kind = draw(st.sampled_from(kinds))
            attempt = malformed.Attempt(server.url, draw, cases)
            good_clients.suspects[number] = attempt.messages
            try:
                kind(attempt)
            except UnsatisfiedAssumption:
                raise
            except Exception as error:
                # within this time, the good clients notice that the server is dead
                time.sleep(2)
                if not good_clients.dead.is_set():
                    what = f"{type(error).__name__}: {error}"
                    good_clients.add_violation(kind.__name__, what, messages=attempt.messages)
            statuses[kind.__name__][attempt.status] += 1

        attempt_once()

    with GoodClients(server, is_crowded=True) as good_clients, ThreadPoolExecutor(CONCURRENCY) as pool:
        # the list raises what a client raises
        list(pool.map(run_malformed_client, range(CONCURRENCY)))
    if not (good_clients.dead.is_set() or wait_until_idle(server)):
        good_clients.add_violation("metrics", "after all requests, some are still running")
    good_clients.check_growth()
    return {
        "seed": seed,
        "good": dict(good_clients.answers),
        "kinds": dict(statuses),
        "violations": good_clients.violations,
    }
