"""Two API servers and two copies of the model behind one address: what a client sees of one, it sees of all."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from psutil import CONN_ESTABLISHED

from mmkit.serve import Client, RequestError, ServerGone
from mmkit.serve.process import Server
from tests.night.malformed import ACTIONS, GENERATE, GREEDY, HEADERS, KEY, STEP, prompt_of
from tests.night.soak import metrics, rollout, terra_server

pytestmark = pytest.mark.timeout(600)

COPIES = 2
OPTIONS = ("--data-parallel-size", str(COPIES), "--num-gpu-blocks-override", "256", "--enforce-eager")
"""As many API servers as copies. 256 blocks are 8,192 tokens: half of them are two sessions of 1,750."""
VARIABLES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}
MOST = 2 * COPIES
WAIT = 240
FRAME = 64
"""Tokens of a frame; the action after it has STEP."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with terra_server(log, *OPTIONS, environment=VARIABLES, SESSIONS=0, IDLE_SECONDS=600) as server:
        yield server


def api_servers(server: Server) -> list[psutil.Process]:
    assert server.process is not None
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if "APIServer" in "".join(child.cmdline())]


def connections(server: Server) -> Counter[int]:
    """How many clients each API server has, by process id."""
    return Counter(
        process.pid
        for process in api_servers(server)
        for connection in process.net_connections("tcp")
        if connection.laddr.port == server.port and connection.status == CONN_ESTABLISHED
    )


@pytest.fixture(scope="module")
def doors(server: Server) -> Iterator[list[httpx.Client]]:
    """A client of each API server, which stays connected."""
    found: dict[int, httpx.Client] = {}
    with ExitStack() as stack:
        while len(found) < COPIES:
            before = connections(server)
            client = stack.enter_context(httpx.Client(base_url=server.url, headers=HEADERS, timeout=WAIT))
            client.get("/health").raise_for_status()
            for pid in connections(server) - before:
                found.setdefault(pid, client)
        yield list(found.values())


def ask(door: httpx.Client, action: Any, name: str | None = None, salt: str = "", **headers: str) -> list[int] | str:
    """The ids that follow a frame and an action, or why there are none."""
    items, uuids = {"actions": [action]}, {"actions": [name]}
    body = {"prompt": prompt_of(0, 1), "items": items, "uuids": uuids, "max_tokens": 8, "cache_salt": salt, **GREEDY}
    answer = door.post(GENERATE, json={key: value for key, value in body.items() if value}, headers=headers).json()
    return answer["error"]["message"] if "error" in answer else answer["choices"][0]["token_ids"]


def by_copy(server: Server, name: str) -> list[float]:
    """A metric of vLLM of each copy."""
    lines = httpx.get(f"{server.url}/metrics", timeout=WAIT).text.splitlines()
    own = [[line for line in lines if f'engine="{copy}"' in line] for copy in range(COPIES)]
    return [metrics("\n".join(of_copy))[name] for of_copy in own]


def until(condition: Callable[[], bool]) -> None:
    for _ in range(WAIT * 4):
        if condition():
            return
        time.sleep(0.25)
    raise TimeoutError


def test_the_ids_are_those_of_the_reference_at_each_server(doors: list[httpx.Client]) -> None:
    expected = rollout(3, 1, episodes=4)[:, 0].tolist()
    for door in doors:
        for episode in range(4):
            items = {"actions": ACTIONS[episode, :3].tolist()}
            body = {"prompt": prompt_of(episode, 3), "items": items, "max_tokens": FRAME, **GREEDY}
            assert door.post(GENERATE, json=body).json()["choices"][0]["token_ids"] == expected[episode]


def test_a_name_is_what_was_last_named_so_at_any_server(doors: list[httpx.Client]) -> None:
    """A server that has not processed an item does not know it by its name; no server takes it for an older one."""
    one, two = doors
    first, second = ACTIONS[0, 0].tolist(), ACTIONS[3, 4].tolist()
    first_ids, second_ids = ask(one, first), ask(one, second)
    assert first_ids != second_ids
    unknown = (
        "terra.actions[0]: expected a (6, 3) float32 tensor, got None, and no such item in the cache. "
        "Send the item itself."
    )
    assert ask(one, first, "a name") == ask(one, None, "a name") == first_ids
    assert ask(two, None, "a name") == unknown
    assert ask(two, first, "a name") == ask(two, None, "a name") == ask(one, None, "a name") == first_ids
    assert ask(two, second, "a name") == ask(two, None, "a name") == second_ids
    assert ask(one, None, "a name") == unknown
    assert ask(one, second, "a name") == ask(one, None, "a name") == second_ids
    assert [ask(door, None, "a name", salt="another tenant") for door in doors] == [unknown, unknown]


def test_a_request_may_ask_for_the_copy_that_has_its_prefix(server: Server, doors: list[httpx.Client]) -> None:
    action = ACTIONS[5, 5].tolist()
    for copy in range(COPIES):
        before = by_copy(server, "vllm:prefix_cache_queries_total")
        for door in doors:
            ask(door, action, **{"X-data-parallel-rank": str(copy)})
        asked = np.subtract(by_copy(server, "vllm:prefix_cache_queries_total"), before)
        assert asked.tolist() == [len(doors) * (FRAME + STEP) * (other == copy) for other in range(COPIES)]
    refusal = "X-data-parallel-rank: expected a copy from 0 to 1, got '2'."
    assert ask(doors[0], action, **{"X-data-parallel-rank": "2"}) == refusal


def test_sessions_are_as_many_as_the_copies_hold_and_each_stays_with_one(server: Server) -> None:
    expected = rollout(3, 7, episodes=MOST).tolist()
    window = {"items": 6, "keep": 3, "prefix": FRAME + STEP}
    with Client(server.url, api_key=KEY, timeout=WAIT) as client, ExitStack() as stack:
        assert client.modalities().limits.sessions == MOST
        options = {"max_tokens": FRAME, "window": window, **GREEDY}
        sessions = []
        for episode in range(MOST):
            items = {"actions": ACTIONS[episode, :3]}
            sessions.append(stack.enter_context(client.session(prompt_of(episode, 3), items, **options)))
            open_at = [len(sessions[copy::COPIES]) for copy in range(COPIES)]
            until(lambda: by_copy(server, "vllm:num_requests_waiting") == open_at)  # noqa: B023
        assert metrics(httpx.get(f"{server.url}/metrics").text)["mmkit:sessions_open"] == MOST
        with pytest.raises(RequestError, match=f"session: expected at most {MOST} open at once, got one more."):
            stack.enter_context(client.session(prompt_of(0, 1), {"actions": ACTIONS[0, :1]}, **options))
        for episode, session in enumerate(sessions):
            assert session.first.token_ids == expected[episode][0]
        for step in range(3, 6):
            for episode, session in enumerate(sessions):
                chunk = session.next({"actions": ACTIONS[episode, step : step + 1]})
                assert (chunk.token_ids, chunk.slid) == (expected[episode][step - 2], None)
                assert chunk.usage.prompt_tokens == STEP
        # a slide is another request of vLLM's, which would send it to the copy that has less to do
        body = {"prompt": prompt_of(0, 1), "items": {"actions": ACTIONS[0, :1].tolist()}, **GREEDY}
        with ExitStack() as busy:
            for _ in range(3):
                body.update(max_tokens=1600, stream=True)
                headers = {**HEADERS, "X-data-parallel-rank": "0"}
                stream = httpx.stream("POST", server.url + GENERATE, json=body, headers=headers, timeout=WAIT)
                next(busy.enter_context(stream).iter_lines())
            for episode in range(0, MOST, COPIES):  # of copy 0
                chunk = sessions[episode].next({"actions": ACTIONS[episode, 6:7]})
                assert chunk.slid is not None
                # what stays is at other positions, but for the prefix: two blocks of 32
                assert chunk.usage.prompt_tokens_details.cached_tokens == 64


def test_all_ends_with_the_process_that_started_all(server: Server) -> None:
    """The last test of the file. Nothing goes on behind the port, nor keeps the devices from a server in its place."""
    assert server.process is not None
    head = psutil.Process(server.process.pid)
    tree = head.children(recursive=True)
    with Client(server.url, api_key=KEY, timeout=WAIT) as client, ExitStack() as stack:
        items = {"actions": ACTIONS[0, :3]}
        session = stack.enter_context(client.session(prompt_of(0, 3), items, max_tokens=1, **GREEDY))
        head.kill()
        assert psutil.wait_procs(tree, WAIT)[1] == []
        with pytest.raises(ServerGone):
            session.next({"actions": ACTIONS[0, 3:4]})
