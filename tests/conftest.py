"""What all tests share: the variables of a small machine, Hypothesis profiles, and which tests run in one process."""

import os
from pathlib import Path

import pytest

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


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with the same checkpoint run in one process, which starts its engine once; else those of a file do."""
    here = Path(__file__).parent
    ours = [item for item in items if item.path.is_relative_to(here)]
    ours.sort(key=lambda item: FOLDERS.index(item.path.relative_to(here).parts[0]))
    items[:] = [*ours, *(item for item in items if not item.path.is_relative_to(here))]
    for item in ours:
        folder, *rest = item.path.relative_to(here).parts[:-1]
        if folder == "engine":
            item.add_marker(pytest.mark.engine)
        item.add_marker(pytest.mark.xdist_group("/".join([folder, *(rest or [item.path.stem])])))
