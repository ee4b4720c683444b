"""Engines in this process, and programs in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests import ROOT

MAX_SECONDS = 500
"""Seconds that a program may take."""


@contextmanager
def engines_in_this_process() -> Iterator[ExitStack]:
    """Hold engines until the block ends.

    The first engine that ends takes down what all engines of this process share. An engine that the garbage collector
    ends takes it down while another one starts.
    """
    with pytest.MonkeyPatch.context() as env, ExitStack() as engines:
        env.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        env.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        yield engines
        # each engine that ends collects garbage among all objects of this process, which takes seconds
        env.setattr("gc.collect", collect_nothing)


def collect_nothing(generation: int = 2) -> int:
    return 0


def run_engines_in_their_processes(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Let engines that start from now on run in processes of their own, which import the models of `module`.

    An engine that drafts n-grams needs it: n-grams import numba, and in a process that has imported numba vLLM 0.32 and
    later start no other engine on a CPU.
    """
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("MMKIT_MODULES", module)


def run_python(*arguments: str, cwd: Path = ROOT, **variables: str) -> str:
    """Run a Python program that finds models only by their entry points, and return its standard output.

    Raises:
        AssertionError: it exits with a status other than 0.
    """
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "MMKIT_MODULES": ""} | variables
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=MAX_SECONDS,
    )
    assert process.returncode == 0, process.stdout[-5000:] + process.stderr[-5000:]
    return process.stdout
