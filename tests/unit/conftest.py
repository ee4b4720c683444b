"""A server in place of vLLM's, for the tests of its clients."""

from collections.abc import Iterator

import pytest

from tests.unit.fake_server import Fake


@pytest.fixture(scope="module")
def running() -> Iterator[Fake]:
    fake = Fake()
    yield fake
    fake.close()


@pytest.fixture
def fake(running: Fake) -> Fake:
    running.forget()
    return running
