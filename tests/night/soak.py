"""Malformed requests at a server of Terra, beside good clients that check every answer.

The requests and what may come back are those of tests/night/malformed.py. The server has limits that are reached
cheaply and caches that are full soon: what grows after that is a leak. Of vLLM's own routes only hangs and the engine's
death count.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

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
from tests.night.malformed import ACTIONS, BOUND_SECONDS, FRAMES, GREEDY, KEY, LIMITS, SHOWN, Body, Kind

MIB = 2**20
OPTIONS = ("--dtype", "float32", "--skip-tokenizer-init", "--block-size", "32", "--served-model-name", "terra",
    "--enable-scale-out", "--mm-processor-cache-gb", "0.0002", "--num-gpu-blocks-override", "1024",
    "--api-key", KEY)  # fmt: skip
"""vLLM counts an action in its processor cache as the 72 bytes of its tensor, so these are 3,000 actions; 1,024 blocks
are 32,768 tokens."""
GAUGES = ("mmkit:sessions_open", "vllm:num_requests_running", "vllm:num_requests_waiting")
"""What the server says is open or running."""
CONCURRENCY = 12
WAIT = 240  # seconds after which an answer does not come any more


def terra_server(log: Path, *options: str, environment: Body | None = None, **limits: int) -> Server:
    """A server of Terra, not started yet; `limits` replace those of LIMITS."""
    # oneDNN keeps what it compiled for the last 1024 shapes: 150 MiB, which look like a leak
    variables = {"VLLM_LOGGING_LEVEL": "ERROR", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
    variables |= {f"MMKIT_SERVE_{name}": str(value) for name, value in {**LIMITS, **limits}.items()}
    return Server(CHECKPOINT, *OPTIONS, *options, environment={**variables, **(environment or {})}, log=log)


@functools.cache
def rollout(context: int, count: int, episodes: int = len(FRAMES)) -> np.ndarray:
    """Frames that the reference generates after so many of each episode, (episodes, count, num_image_patches)."""
    return rollouts.generate_by_reference(FRAMES[:episodes], ACTIONS[:episodes], count, context)


def metrics(text: str) -> dict[str, float]:
    """Prometheus' samples, those of one name added up."""
    totals: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if not line.startswith("#"):
            sample, _, value = line.rpartition(" ")
            totals[sample.partition("{")[0]] += float(value)
    return totals


def until(condition: Callable[[], Any]) -> bool:
    """Whether something comes true in time."""
    end = time.monotonic() + WAIT
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def scraped(server: Server) -> dict[str, float]:
    return metrics(httpx.get(f"{server.url}/metrics", timeout=WAIT).text)


def empties(server: Server) -> bool:
    """Whether no session stays open, and the engine has nothing to do."""
    return until(lambda: not any(scraped(server)[name] for name in GAUGES))


def memory(server: Server, name: str = "VmRSS") -> int:
    """Bytes of a server's front process."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])


@contextmanager
def peak(server: Server) -> Iterator[Callable[[], int]]:
    """Tells the bytes that the front process has at most taken since the block began, beside those before."""
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")
    before = memory(server)
    yield lambda: memory(server, "VmHWM") - before


# -- good clients ------------------------------------------------------------------------------------------------------


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


class Beside:
    """Good clients of a server while this is open, who have had an answer each before it begins. They ask again and
    again for what the reference generates, and for its health, and note what is wrong.

    Args:
        server: for its processes.
        url: where they ask, if not at the server itself.
        crowded: it may have no place for one more session.
    """

    def __init__(self, server: Server, url: str = "", crowded: bool = False) -> None:
        self.url, self.crowded = url or server.url, crowded
        self.over, self.dead = threading.Event(), threading.Event()
        self.process = psutil.Process(server.process.pid)
        self.violations: list[Body] = []
        self.answers: Counter[str] = Counter()
        self.memory: list[tuple[float, float]] = []
        self.suspects: dict[int, list[str]] = {}
        rollout(1, 4), rollout(3, 4)

    def __enter__(self) -> Beside:
        self.pool = ThreadPoolExecutor()
        self.tasks: list[Future[None]] = [self.pool.submit(self._watch)]
        names = [f"{how} {ask.__name__}" for ask in (request, session) for how in ("whole", "streamed")]
        self.tasks += [self.pool.submit(self._again, name) for name in names]
        while not (self.over.wait(0.1) or self.answers.keys() == {*names}):
            pass
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.pool.shutdown()
        for task in self.tasks:
            task.result()

    def violate(self, kind: str, what: str, **more: Any) -> None:
        self.violations.append({"kind": kind, "what": what[:SHOWN], **more})

    def _again(self, name: str) -> None:
        how, _, kind = name.partition(" ")
        ask, rng = {"request": request, "session": session}[kind], Random(name)
        with Client(self.url, api_key=KEY, timeout=BOUND_SECONDS) as client:
            while not self.over.is_set():
                episode, context = rng.randrange(len(FRAMES)), rng.choice((1, 3))
                salt = rng.choice((None, f"{rng.random()}"))
                try:
                    frames = ask(client, episode, context, how == "streamed", cache_salt=salt)
                    self.answers[name] += 1
                    if frames != rollout(context, 4)[episode, : len(frames)].tolist():
                        self.violate(name, f"wrong answer to episode {episode} after {context} frame(s): {frames}")
                except Exception as error:
                    busy = self.crowded and isinstance(error, RequestError) and error.code == 429
                    if not (self.dead.is_set() or busy):
                        self.violate(name, f"{type(error).__name__}: {error}")
                    time.sleep(0.3)

    def _watch(self) -> None:
        """Weigh the API server and the engine, in MiB, until the server is dead or all is over."""
        failed = 0
        while not self.over.wait(1):
            with suppress(psutil.Error):
                sizes = [process.memory_info().rss / MIB for process in self.process.children(recursive=True)]
                self.memory.append((self.process.memory_info().rss / MIB, max(sizes, default=0)))
            try:
                failed = 0 if httpx.get(f"{self.url}/health", timeout=BOUND_SECONDS).status_code == 200 else failed + 1
            except httpx.HTTPError:
                failed += 1
            if failed == 2:
                self.dead.set()
                self.violate("engine", "died", suspects=[said[-1:] for said in self.suspects.values()])
                self.over.set()

    def weigh(self) -> None:
        """Growth of either process after the caches are full is a violation."""
        if len(self.memory) < 10:
            return
        tenths = [np.median(part, axis=0) for part in np.array_split(np.array(self.memory), 10)]
        before, after = np.median(tenths[2:5], axis=0), np.median(tenths[8:], axis=0)
        if ((after > before * 1.1) & (after > before + 100)).any():
            self.violate("memory", f"grew from {before.round()} to {after.round()} MiB")


# -- the soak ----------------------------------------------------------------------------------------------------------


def soak(server: Server, requests: int, seed: int = 0, kinds: Sequence[Kind] = malformed.KINDS) -> Body:
    """The report on so many malformed requests, sent to a server of `terra_server`."""
    cases = {} if {*kinds} <= {*malformed.BY_DAY} else malformed.cases(server.url)
    statuses: defaultdict[str, Counter[str]] = defaultdict(Counter)
    drawing = threading.Lock()
    some = settings(max_examples=-(-requests // CONCURRENCY), phases=[Phase.generate], deadline=None, database=None,
        derandomize=False, suppress_health_check=list(HealthCheck))  # fmt: skip

    def many(number: int) -> None:
        """What one of the clients does, by Hypothesis' draws."""

        @hypothesis.seed(f"{seed}-{number}")
        @some
        @hypothesis.given(st.data())
        def one(data: Any) -> None:
            """Do something, and judge the answer."""
            if beside.dead.is_set():
                return  # those in flight are suspects

            def draw(strategy: st.SearchStrategy[Any]) -> Any:
                with drawing:  # Python 3.11 parses in one thread at a time
                    return data.draw(strategy)

            kind = draw(st.sampled_from(kinds))
            this = malformed.Attempt(server.url, draw, cases)
            beside.suspects[number] = this.said
            try:
                kind(this)
            except UnsatisfiedAssumption:
                raise
            except Exception as error:
                time.sleep(2)  # if the server is dead, that is known then
                if not beside.dead.is_set():
                    beside.violate(kind.__name__, f"{type(error).__name__}: {error}", said=this.said)
            statuses[kind.__name__][this.status] += 1

        one()

    with Beside(server, crowded=True) as beside, ThreadPoolExecutor(CONCURRENCY) as clients:
        list(clients.map(many, range(CONCURRENCY)))
    if not (beside.dead.is_set() or empties(server)):
        beside.violate("metrics", "after all requests, some are still running")
    beside.weigh()
    return {"seed": seed, "good": dict(beside.answers), "kinds": dict(statuses), "violations": beside.violations}
