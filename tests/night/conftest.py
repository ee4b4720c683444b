"""Engines of one file, in its process; those that end take down what all of them share."""

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
