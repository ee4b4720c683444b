"""Engines in this process, and programs in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests import ROOT

LIMIT = 500
"""Seconds for a program."""


@contextmanager
def engines_in_this_process() -> Iterator[ExitStack]:
    """Holds engines until the block ends: the first that ends takes down what all of this process share, and one that
    the garbage collector ends takes it down in the middle of another's start.
    """
    with pytest.MonkeyPatch.context() as env, ExitStack() as engines:
        env.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        env.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        yield engines
        env.setattr("gc.collect", lambda *_: 0)  # each engine that ends looks at all objects of this process


def run(*arguments: str, cwd: Path = ROOT, **variables: str) -> str:
    """Standard output of a Python program that knows models by their entry points alone, and has to end well."""
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "MMKIT_MODULES": "", **variables}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout
