"""One Terra engine for all tests of this folder."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from examples.terra import register
from tests.engine.processes import engines_in_this_process

from .rollouts import start_engine


@pytest.fixture(scope="package")
def engines() -> Iterator[ExitStack]:
    register()
    with engines_in_this_process() as stack:
        yield stack


@pytest.fixture(scope="package")
def terra(engines: ExitStack) -> Any:
    return start_engine(engines)
