"""What all tests share: the variables of a small machine, a folder for what they leave, Hypothesis profiles, and which
tests run in one process, in which order."""

import json
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests import profiles

CACHE = Path(sys.prefix, "cache")
"""What vLLM and its libraries keep between runs, in the environment that they belong to."""

VARIABLES = {
    # small tensors wait for threads longer than they are worked on, and engines side by side for the same cores
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # what `make` exports, for a plain pytest: small engines, no hub, nothing in the home directory
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "XDG_CACHE_HOME": str(CACHE),
    "XDG_CONFIG_HOME": str(CACHE / "config"),
    "IPYTHONDIR": str(CACHE / "ipython"),
    "SE_CACHE_PATH": str(CACHE / "selenium"),
    "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "inductor"),
}
os.environ.update(VARIABLES | dict(os.environ))

profiles.register()

TEMPORARY = "MMKIT_TEST_TMPDIR"
"""Names this run's folder in the workers and programs that it starts."""

OURS = pytest.StashKey[str]()
"""The same folder, in the process that makes and removes it."""

SECONDS = Path(__file__).with_name("seconds.json")
"""Seconds of each scope of five and more; ``--store-seconds`` writes them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store-seconds", action="store_true", help=f"record what each scope takes in {SECONDS.name}")


def pytest_configure(config: pytest.Config) -> None:
    """The first process of a run makes one folder for all temporary files, also those of killed processes."""
    if TEMPORARY not in os.environ:
        get_temp_dir()  # that of multiprocessing, which it removes after this folder is gone
        os.environ[TEMPORARY] = folder = tempfile.mkdtemp(prefix="mmkit-")
        config.stash[OURS] = folder
    tempfile.tempdir = os.environ["TMPDIR"] = os.environ[TEMPORARY]
    os.environ["VLLM_RPC_BASE_PATH"] = os.environ[TEMPORARY]
    if config.getoption("store_seconds") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Stopwatch())


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    if exitstatus and (folder := config.stash.get(OURS, None)):
        terminalreporter.write_line(f"temporary files are left in {folder}")
        del config.stash[OURS]


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(OURS, None):
        shutil.rmtree(folder, ignore_errors=True)


def scope_of(nodeid: str) -> str:
    """The tests that run in one process: those of a file, or of a folder of tests/engine, which share an engine."""
    file = nodeid.partition("::")[0]
    folder, _, _ = file.rpartition("/")
    return file if folder in ("tests/engine", "tests/night", "tests/path", "tests/unit") else folder


class Stopwatch:
    """Adds up what the tests of a scope take, fixtures included."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[scope_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        longest = sorted(self.seconds, key=self.seconds.__getitem__, reverse=True)
        rounded = {scope: round(self.seconds[scope]) for scope in longest if self.seconds[scope] >= 5}
        SECONDS.write_text(json.dumps(rounded, indent=2) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest scopes start first, so that no worker waits for another at the end. Of the others, tests/engine comes
    first, as it is collected."""
    seconds = json.loads(SECONDS.read_text())
    here = Path(__file__).parent
    ours = [item for item in items if item.path.is_relative_to(here)]

    ours.sort(key=lambda item: -seconds.get(scope_of(item.nodeid), 0))
    items[:] = [*ours, *(item for item in items if not item.path.is_relative_to(here))]
    for item in ours:
        if item.path.is_relative_to(here / "engine"):
            item.add_marker(pytest.mark.engine)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return ByCheckpoint(config, log)


class ByCheckpoint(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)
