"""The soak, on servers of its own: with other requests each night, and on two engines."""

import os
import random
from pathlib import Path

import pytest

from tests.night.malformed import KINDS
from tests.night.soak import soak, terra_server


@pytest.mark.timeout(3600)
def test_soak(tmp_path: Path) -> None:
    with terra_server(tmp_path / "log") as server:
        report = soak(server, range(2000), seed=random.SystemRandom().randrange(10**6))
    assert report["violations"] == [], f"seed {report['seed']}: {report['violations'][:5]}"
    assert set(report["kinds"]) == set(KINDS)


@pytest.mark.timeout(1200)
def test_two_engines_give_the_same_ids(tmp_path: Path) -> None:
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if len(os.sched_getaffinity(0)) > 1 else {}
    options = ("--data-parallel-size", "2")
    with terra_server(tmp_path / "log", *options, environment=cores, IDLE_SECONDS=120) as server:
        report = soak(server, range(100))
    assert report["violations"] == []
    assert len(report["good_answers"]) == 4
