"""A Ray cluster of several nodes on this machine, which listens on 127.0.0.1 alone."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pyarrow.parquet as pq

from tests import ROOT

# read when Ray is imported, here and in the programs that tests start: a driver's own address is 127.0.0.1
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
from ray.cluster_utils import Cluster

STORE = 200_000_000
"""Bytes of a node's object store."""

LIMIT = 240
"""Seconds that a test waits for a condition."""


@contextmanager
def nodes(count: int, **resources: Any) -> Iterator[Cluster]:
    """A cluster whose nodes know nothing of models: drivers bring the variables.

    Args:
        count: nodes.
        resources: of a node.
    """
    node = {"node_ip_address": "127.0.0.1", "object_store_memory": STORE, "include_dashboard": False, **resources}
    with TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # the paths of sockets are short
        cluster = Cluster(initialize_head=True, head_node_args={**node, "temp_dir": folder})
        try:
            for _ in range(count - 1):
                cluster.add_node(**node)
            started = psutil.Process().children(recursive=True)
            yield cluster
        finally:
            cluster.shutdown()
            # workers end when their raylet has gone
            _, alive = psutil.wait_procs(started, timeout=20)
            for process in alive:
                process.kill()


def parts(outputs: Path) -> list[Path]:
    """The part files of a run."""
    return sorted(outputs.glob("part-*.parquet"))


def start_batch(address: str, worker: str, inputs: Path, outputs: Path, **options: Any) -> subprocess.Popen[str]:
    """A run of tests/engine/scripts_batch.py. A model is known by the module that MMKIT_MODULES names alone."""
    environment = {
        **os.environ,
        "RAY_ADDRESS": address,
        "MMKIT_MODULES": "tests.engine.scripts_announce",
        "VLLM_PLUGINS": "mmkit",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [sys.executable, "-m", "tests.engine.scripts_batch", worker, inputs, outputs, json.dumps(options)]
    return subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_parts(outputs: Path, count: int, process: subprocess.Popen[str]) -> list[Path]:
    until = time.monotonic() + LIMIT
    while len(found := parts(outputs)) < count:
        assert process.poll() is None, process.communicate()[0][-5000:]
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


def end_batch(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output[-5000:]
    return output


def rows(outputs: Path) -> list[dict[str, Any]]:
    return [row for part in parts(outputs) for row in pq.read_table(part).to_pylist()]
