"""Servers of several processes, with Terra: what a client sees of one, it sees of all."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from psutil import CONN_ESTABLISHED

from benchmarks.vllm_bench import draw_requests
from examples.server import Server
from examples.terra import CHECKPOINT
from examples.terra.spec import TERRA
from mmkit.serve import Client, RequestError, ServerGone
from mmkit.testing import of_spec
from tests.engine.processes import run_python
from tests.engine.terra import rollouts
from tests.engine.terra_server.clients import WAIT, assert_ends, scrape_metrics
from tests.night.malformed import ACTIONS, FRAMES, GENERATE, GREEDY, HEADERS, KEY, STEP, make_prompt
from tests.night.soak import (
    generate_by_reference,
    parse_metrics,
    request_frame,
    request_frames_in_session,
    terra_server,
)

pytestmark = pytest.mark.timeout(1800)

FRAME = {"max_tokens": 64, **GREEDY}
LAID_OUT = 64 + STEP
"""Tokens of a frame and of the action after it."""
COPIES = 2
MOST = 2 * COPIES
"""Sessions."""
OPTIONS = ("--data-parallel-size", str(COPIES), "--num-gpu-blocks-override", "256", "--enforce-eager")
VARIABLES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}


def context(episode: int) -> tuple[list[int], Any]:
    """Three frames and actions."""
    return make_prompt(episode, 3), {"actions": ACTIONS[episode, :3]}


def step(session: Any, episode: int, number: int) -> Any:
    return session.next({"actions": ACTIONS[episode, number : number + 1]})


def frame(client: Client, episode: int, **options: Any) -> list[int]:
    """The frame after three of an episode."""
    return request_frame(client, episode, 3, False, **options)[0]


def open_client(server: Server) -> Client:
    return Client(server.url, api_key=KEY, timeout=WAIT)


# -- two API servers and two copies of the model behind one address ---------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with terra_server(log, *OPTIONS, environment=VARIABLES, SESSIONS=MOST // COPIES, IDLE_SECONDS=600) as server:
        yield server


def connections(server: Server) -> Counter[int]:
    """How many clients each API server has, by process id."""
    return Counter(
        process.pid
        for process in psutil.Process(server.process.pid).children()
        if "APIServer" in "".join(process.cmdline())
        for connection in process.net_connections("tcp")
        if connection.laddr.port == server.port and connection.status == CONN_ESTABLISHED
    )


@pytest.fixture(scope="module")
def doors(server: Server) -> Iterator[list[httpx.Client]]:
    """A client of each API server, which stays connected."""
    clients: dict[int, httpx.Client] = {}
    with ExitStack() as stack:
        while len(clients) < COPIES:
            before = connections(server)
            client = stack.enter_context(httpx.Client(base_url=server.url, headers=HEADERS, timeout=WAIT))
            client.get("/health").raise_for_status()
            for pid in connections(server) - before:
                clients.setdefault(pid, client)
        yield list(clients.values())


def ask(door: httpx.Client, action: Any, name: str | None = None, salt: str = "", **headers: str) -> list[int] | str:
    """The ids that follow a frame and an action, or why there are none."""
    items = {"actions": [action]}
    uuids = {"actions": [name]}
    sampling = {"max_tokens": 8, **GREEDY}
    body = {
        "prompt": make_prompt(0, 1),
        "items": items,
        "uuids": uuids,
        "sampling_params": sampling,
        "cache_salt": salt,
    }
    answer = door.post(GENERATE, json={key: value for key, value in body.items() if value}, headers=headers).json()
    return answer["error"]["message"] if "error" in answer else answer["choices"][0]["token_ids"]


def get_metric_of_copies(server: Server, name: str) -> list[float]:
    """Return a metric of vLLM for each copy."""
    lines = httpx.get(f"{server.url}/metrics", timeout=WAIT).text.splitlines()
    values = []
    for copy in range(COPIES):
        lines_of_copy = [line for line in lines if f'engine="{copy}"' in line]
        values.append(parse_metrics("\n".join(lines_of_copy))[name])
    return values


def test_a_server_that_has_not_processed_an_item_does_not_know_it_by_its_name(doors: list[httpx.Client]) -> None:
    """Nor does another tenant."""
    first_door, second_door = doors
    first = ACTIONS[0, 0].tolist()
    ids = ask(first_door, first)
    unknown = (
        "terra.actions[0]: expected a (6, 3) float32 tensor, got None, and no such item in the cache. "
        "Send the item itself."
    )
    assert ask(first_door, first, "a name") == ask(first_door, None, "a name") == ids
    assert ask(second_door, None, "a name") == unknown
    assert ask(second_door, first, "a name") == ask(second_door, None, "a name") == ids
    assert [ask(door, None, "a name", salt="another tenant") for door in doors] == [unknown, unknown]


def test_a_request_may_ask_for_the_copy_that_has_its_prefix(server: Server, doors: list[httpx.Client]) -> None:
    action = ACTIONS[5, 5].tolist()
    for copy in range(COPIES):
        before = get_metric_of_copies(server, "vllm:prefix_cache_queries_total")
        for door in doors:
            ask(door, action, **{"X-data-parallel-rank": str(copy)})
        queries = np.subtract(get_metric_of_copies(server, "vllm:prefix_cache_queries_total"), before)
        assert queries.tolist() == [len(doors) * LAID_OUT * (other == copy) for other in range(COPIES)]
    assert "data_parallel_rank 2 is out of range" in ask(doors[0], action, **{"X-data-parallel-rank": "2"})


def open_session(client: Client, stack: ExitStack, episode: int, options: dict[str, Any]) -> Any:
    """Return a session at the API server, among several, that has a place left."""
    while True:
        with suppress(RequestError):
            return stack.enter_context(client.session(*context(episode), **options))


def test_sessions_stay_with_the_copy_that_has_their_prefix(server: Server) -> None:
    expected = generate_by_reference(3, 4, episodes=MOST).tolist()
    with open_client(server) as client, ExitStack() as stack:
        sessions = [open_session(client, stack, episode, FRAME) for episode in range(MOST)]
        assert scrape_metrics(server)["mmkit:sessions_open"] == MOST
        with pytest.raises(
            RequestError, match=f"session: expected at most {MOST // COPIES} open at once, got one more."
        ):
            stack.enter_context(client.session(*context(0), **FRAME))
        for episode, session in enumerate(sessions):
            assert session.first.token_ids == expected[episode][0]
        for number in range(3, 6):
            for episode, session in enumerate(sessions):
                chunk = step(session, episode, number)
                assert chunk.token_ids == expected[episode][number - 2]
                # the copy that has the session's prefix computes it
                assert chunk.usage.prompt_tokens_details.cached_tokens > (number - 1) * LAID_OUT


def test_vllms_benchmark_sends_items_of_any_modality(server: Server) -> None:
    """Requests that are drawn from the spec: of one seed the same ones."""
    few = ("--num-prompts", "5", "--output-len", "3", "--host", "127.0.0.1", "--port", str(server.port))
    command = ("-m", "benchmarks.vllm_bench", "serve", "--model", str(CHECKPOINT), "--skip-tokenizer-init", *few)
    printed = run_python(*command, MMKIT_MODULES="examples.terra.model", OPENAI_API_KEY=KEY)
    assert [line.split()[-1] for line in printed.splitlines() if " requests:" in line][:2] == ["5", "0"]  # failed: 0
    subject = of_spec(TERRA, CHECKPOINT)
    first, again, other = (list(map(repr, draw_requests(subject, 8, seed, 500))) for seed in (1, 1, 2))
    assert first == again != other
    assert len({*first}) > 4


# -- servers of their own ---------------------------------------------------------------------------------------------


def test_an_encoder_apart(tmp_path: Path) -> None:
    """A request goes to the server that encodes, then to the one that generates, which reads the rows of the first."""
    encoded = tmp_path / "encoded"

    def transfer(role: str) -> tuple[str, str]:
        extra = {"shared_storage_path": str(encoded)}
        connector = {"ec_connector": "ECExampleConnector", "ec_role": role, "ec_connector_extra_config": extra}
        return "--ec-transfer-config", json.dumps(connector)

    with ExitStack() as stack:
        servers = [terra_server(tmp_path / role, *transfer(role)) for role in ("ec_producer", "ec_consumer")]
        with ThreadPoolExecutor() as pool:
            list(pool.map(stack.enter_context, servers))
        encoder, generator = (stack.enter_context(open_client(server)) for server in servers)
        expected = generate_by_reference(3, 4).tolist()
        for episode in range(4):
            assert frame(encoder, episode, max_tokens=1) == []
            assert frame(generator, episode) == expected[episode][0]
        with pytest.raises(RequestError, match="expected a server that runs the language model"):
            request_frames_in_session(encoder, 0, 3, False)
        assert len(list(encoded.rglob("*.safetensors"))) == len({tuple(row) for row in ACTIONS[:4, :3].reshape(12, -1)})
        # what nobody has encoded, and what comes in a session, it encodes itself
        assert frame(generator, 4, uuids={"actions": ["a", "b", "c"]}) == expected[4][0]
        assert request_frames_in_session(generator, 0, 3, False) == expected[0]
        # rows of other actions in the place of those that it asks for
        prompt, files = context(2)[0], []
        for change in (0.001, -3):
            files.append({*encoded.rglob("*.safetensors")})
            changed = {"actions": ACTIONS[2, :3] * (change > 0) + np.float32(change)}
            encoder.generate(prompt, changed, **{**FRAME, "max_tokens": 1})
        (other,) = {*encoded.rglob("*.safetensors")} - files[1]
        for path in files[1] - files[0]:
            shutil.copy(other, path)
        answer = generator.generate(prompt, {"actions": ACTIONS[2, :3] + np.float32(0.001)}, **FRAME)
        expected_tokens = rollouts.generate_by_reference(FRAMES[2:3], np.full_like(ACTIONS[2:3], -3), 1)[0, 0].tolist()
        assert answer.choices[0].token_ids == expected_tokens != expected[2][0]


@pytest.mark.parametrize("killed", ["APIServer_1", "EngineCore_DP1", "DPCoordinator"])
def test_all_ends_when_a_process_is_killed(tmp_path: Path, killed: str) -> None:
    """No client waits for ever, and nothing is left that would keep a new server from the devices. The end of the one
    that started all is the supervisor's, which kills the group."""
    with terra_server(tmp_path / "log", "--data-parallel-size", "2") as server, open_client(server) as client:
        head = psutil.Process(server.process.pid)
        tree = [head, *head.children(recursive=True)]
        victim = next(process for process in tree if killed in "".join(process.cmdline()))
        with client.session(*context(0), max_tokens=1, **GREEDY) as session:
            victim.kill()
            assert_ends(server, tree)
            assert server.process.returncode == 1
            with pytest.raises(ServerGone):
                step(session, 0, 3)
