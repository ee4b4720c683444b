"""A server in place of vLLM's, for the tests of its clients. Nothing here imports vLLM."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.fake_server import FakeServer


@pytest.fixture(scope="session", autouse=True)
def no_vllm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that no test imports vLLM, where only these tests run, as by `make test-fast`.

    tools/mutants.py imports vLLM before them.
    """
    folder = Path(__file__).parent
    was_imported_before = "vllm" in sys.modules
    yield
    only_these_tests = all(item.path.is_relative_to(folder) for item in request.session.items)
    if only_these_tests and not was_imported_before:
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
