"""One server of the road world for all tests of this folder, and what it should answer."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from mmkit.serve import Client
from mmkit.serve.process import Server
from tests.night.malformed import KEY
from tests.night.soak import rollout, terra_server


@pytest.fixture(scope="package")
def living_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Server]]:
    """Gives the server, or another one after a test that ended it. It is patient with clients on a busy machine."""
    with ExitStack() as stack:
        servers: list[Server] = []

        def living() -> Server:
            if not servers or servers[-1].process is None or servers[-1].process.poll() is not None:
                log = tmp_path_factory.mktemp("server") / "log"
                servers.append(stack.enter_context(terra_server(log, "--enforce-eager", IDLE_SECONDS=600)))
            return servers[-1]

        yield living


@pytest.fixture
def server(living_server: Callable[[], Server]) -> Server:
    return living_server()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, api_key=KEY, timeout=240) as client:
        yield client


@pytest.fixture(scope="package")
def frames() -> np.ndarray:
    """The 22 frames that the reference generates after three of the first episode, (22, num_image_patches)."""
    return rollout(3, 22, episodes=1)[0]
