"""Servers of several processes, with Terra: what tests/engine/test_several_servers.py has no server for."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmkit.serve import Client, RequestError, ServerGone
from mmkit.serve.process import Server
from tests.night.malformed import ACTIONS, GREEDY, KEY, prompt_of
from tests.night.soak import rollout, terra_server

pytestmark = pytest.mark.timeout(1800)

WAIT = 240
FRAME = 64


def asking(server: Server) -> Client:
    return Client(server.url, api_key=KEY, timeout=WAIT)


def frame(client: Client, episode: int, **options: Any) -> list[int]:
    """The frame after three of an episode."""
    options = {"max_tokens": FRAME, **GREEDY, **options}
    return client.generate(prompt_of(episode, 3), {"actions": ACTIONS[episode, :3]}, **options).choices[0].token_ids


def frames(client: Client, episode: int) -> list[list[int]]:
    """The four frames after three of an episode, by a session."""
    items = {"actions": ACTIONS[episode, :3]}
    with client.session(prompt_of(episode, 3), items, max_tokens=FRAME, **GREEDY) as session:
        steps = [session.next({"actions": ACTIONS[episode, step : step + 1]}) for step in range(3, 6)]
        return [chunk.token_ids for chunk in (session.first, *steps)]


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
        encoder, generator = (stack.enter_context(asking(server)) for server in servers)
        expected = rollout(3, 4).tolist()
        for episode in range(4):
            assert frame(encoder, episode, max_tokens=1) == []
            assert frame(generator, episode) == expected[episode][0]
        assert len(list(encoded.rglob("*.safetensors"))) == len({tuple(row) for row in ACTIONS[:4, :3].reshape(12, -1)})
        # what nobody has encoded, and what comes in a session, it encodes itself
        assert frame(generator, 4, uuids={"actions": ["a", "b", "c"]}) == expected[4][0]
        assert frames(generator, 0) == expected[0]
        sentence = "session: expected a server that generates, got one that encodes. Open it at the consumer of what is"
        with pytest.raises(RequestError, match=sentence):
            frames(encoder, 0)
        frame(encoder, 5, max_tokens=1)
        for path in encoded.rglob("*.safetensors"):
            save_file({name: torch.zeros_like(rows) for name, rows in load_file(path).items()}, path)
        assert frame(generator, 5) != expected[5][0]


def test_two_processes_of_one_copy(tmp_path: Path) -> None:
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    options = ("--tensor-parallel-size", "2", "--api-server-count", "2")
    with terra_server(tmp_path / "log", *options, environment=variables) as server, asking(server) as client:
        expected = rollout(3, 4).tolist()
        assert [frame(client, episode) for episode in range(6)] == [frames[0] for frames in expected]
        assert frames(client, 1) == expected[1]


@pytest.mark.parametrize("killed", ["APIServer_1", "EngineCore_DP1", "DPCoordinator"])
def test_all_ends_when_a_process_is_killed(tmp_path: Path, killed: str) -> None:
    """No client waits for ever, and nothing is left that would keep a new server from the devices."""
    with terra_server(tmp_path / "log", "--data-parallel-size", "2") as server, asking(server) as client:
        assert server.process is not None
        head = psutil.Process(server.process.pid)
        tree = [head, *head.children(recursive=True)]
        victim = next(process for process in tree if killed in "".join(process.cmdline()))
        with ExitStack() as stack:
            items = {"actions": ACTIONS[0, :3]}
            session = stack.enter_context(client.session(prompt_of(0, 3), items, max_tokens=1, **GREEDY))
            victim.kill()
            assert server.process.wait(WAIT) == 1
            assert psutil.wait_procs(tree, WAIT)[1] == []
            with pytest.raises(ServerGone):
                session.next({"actions": ACTIONS[0, 3:4]})
