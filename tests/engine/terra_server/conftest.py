"""One server of Terra for all tests of this folder, and what it should answer."""

from collections.abc import Iterator

import numpy as np
import pytest

from examples.server import Server
from mmkit.serve import Client
from tests.night.malformed import KEY
from tests.night.soak import generate_by_reference, terra_server


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Patient with clients on a busy machine. The last test of the last file, test_vanishing.py, ends it."""
    with terra_server(tmp_path_factory.mktemp("server") / "log", "--enforce-eager", IDLE_SECONDS=600) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, api_key=KEY, timeout=240) as client:
        yield client


@pytest.fixture(scope="package")
def frames() -> np.ndarray:
    """The 22 frames that the reference generates after three of the first episode, (22, num_image_patches)."""
    return generate_by_reference(3, 22, episodes=1)[0]
