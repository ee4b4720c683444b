"""A Ray cluster of several nodes on this machine, which listens on 127.0.0.1 alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

# read when Ray is imported, here and in the programs that tests start: a driver's own address is 127.0.0.1
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
from ray.cluster_utils import Cluster

STORE = 200_000_000
"""Bytes of a node's object store."""


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
