"""Engines of one file, in its process; those that end take down what all of them share."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from examples import llava_like, series, terra, terratorch_like, vla
from tests.engine.processes import engines_in_this_process


@pytest.fixture(scope="module")
def engines() -> Iterator[ExitStack]:
    for package in (llava_like, series, terra, terratorch_like, vla):
        package.register()
    with engines_in_this_process() as stack:
        yield stack


@pytest.fixture(autouse=True)
def nothing_imports_numba() -> Iterator[None]:
    """Find the test that imports numba, after which vLLM 0.32 starts no engine in this process.

    It would be another test that fails, in whichever file this process comes to next.
    """
    imported_before = "numba" in sys.modules
    yield
    assert imported_before or "numba" not in sys.modules, "start that engine by run_engines_in_their_processes"
