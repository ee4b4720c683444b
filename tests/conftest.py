"""What all tests share: the variables of a small machine, Hypothesis profiles, and which tests run in one process."""

import os
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Small tensors wait for threads longer than they are worked on, and engines side by side for the same cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# What `make` exports, for a plain pytest: small engines, no hub.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests import profiles

profiles.register()

FOLDERS = ("engine", "night", "path", "unit")
"""In the order in which they start: what takes longest does not come last."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ours = [item for item in items if item.path.is_relative_to(here)]
    ours.sort(key=lambda item: FOLDERS.index(item.path.relative_to(here).parts[0]))
    items[:] = [*ours, *(item for item in items if not item.path.is_relative_to(here))]
    for item in ours:
        if item.path.is_relative_to(here / "engine"):
            item.add_marker(pytest.mark.engine)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return ByCheckpoint(config, log)


class ByCheckpoint(LoadScopeScheduling):
    """Tests of a file run in one process; those of a folder of tests/engine do, too, and share its engine."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        folder, _, _ = file.rpartition("/")
        return file if folder in ("tests/engine", "tests/night", "tests/path", "tests/unit") else folder
