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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with the same checkpoint run in one process, which starts its engine once; else those of a file do."""
    items.sort(key=lambda item: FOLDERS.index(_folders(item)[0]))
    for item in items:
        folder, *rest = _folders(item)
        if folder == "engine":
            item.add_marker(pytest.mark.engine)
        item.add_marker(pytest.mark.xdist_group("/".join([folder, *rest] if rest else [folder, item.path.stem])))


def _folders(item: pytest.Item) -> tuple[str, ...]:
    return item.path.relative_to(Path(__file__).parent).parts[:-1]
