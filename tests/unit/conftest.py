"""A server in place of vLLM's, for the tests of its clients. Nothing here imports vLLM."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.fake_server import FakeServer


@pytest.fixture(scope="session", autouse=True)
def no_vllm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Looked at where these tests run alone, as `make test-fast` runs them; tools/mutants.py imports vLLM before."""
    imported_before = "vllm" in sys.modules
    yield
    if not imported_before and all(item.path.is_relative_to(Path(__file__).parent) for item in request.session.items):
        assert "vllm" not in sys.modules


@pytest.fixture(scope="module")
def running() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


@pytest.fixture
def fake_server(running: FakeServer) -> FakeServer:
    running.reset()
    return running
