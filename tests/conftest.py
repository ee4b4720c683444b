"""What all tests share: the variables of a small machine, a folder for what they leave, Hypothesis profiles, and which
tests run in one process, in which order."""

import json
import logging
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
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
"""Seconds of each slow scope; ``--store-seconds`` writes them."""

SLOW_SECONDS = 5
"""Seconds from which a scope is slow."""

FOLDERS_OF_SCOPES = ("tests/engine", "tests/night", "tests/path", "tests/unit")
"""Folders of which each file is a scope of its own."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store-seconds", action="store_true", help=f"record what each scope takes in {SECONDS.name}")


def pytest_configure(config: pytest.Config) -> None:
    """Make one folder for all temporary files of a run, also those of killed processes, in its first process."""
    if TEMPORARY not in os.environ:
        # multiprocessing makes its folder outside of ours, since it removes that when ours is gone already
        get_temp_dir()
        config.stash[OURS] = tempfile.mkdtemp(prefix="mmkit-")
        os.environ[TEMPORARY] = config.stash[OURS]

    folder = os.environ[TEMPORARY]
    tempfile.tempdir = folder
    os.environ["TMPDIR"] = folder
    os.environ["VLLM_RPC_BASE_PATH"] = folder

    is_worker = hasattr(config, "workerinput")
    if config.getoption("store_seconds") and not is_worker:
        config.pluginmanager.register(Stopwatch())


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    folder = config.stash.get(OURS, None)
    if exitstatus and folder:
        terminalreporter.write_line(f"temporary files are left in {folder}")
        del config.stash[OURS]


def pytest_unconfigure(config: pytest.Config) -> None:
    folder = config.stash.get(OURS, None)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(name="caplog")
def capture_log_of_mmkit(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """pytest's fixture, for what mmkit logs, also where vLLM or a library of its server has set up logging before."""
    logger = logging.getLogger("mmkit")
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, logger=logger.name):
        patch.setattr(logger, "handlers", [])
        patch.setattr(logger, "propagate", True)
        yield caplog


def get_scope(nodeid: str) -> str:
    """Return the scope of a test: the file or folder whose tests run in one process.

    It is a file, or a folder in tests/engine, whose tests share an engine.
    """
    file, _, _ = nodeid.partition("::")
    folder, _, _ = file.rpartition("/")
    if folder in FOLDERS_OF_SCOPES:
        return file
    return folder


class Stopwatch:
    """Adds up the seconds of the tests of each scope, fixtures included."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[get_scope(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the seconds of slow scopes, the longest first; scopes that did not run keep theirs."""
        seconds = json.loads(SECONDS.read_text()) | self.seconds
        rounded = {}
        for scope in sorted(seconds, key=seconds.__getitem__, reverse=True):
            if seconds[scope] >= SLOW_SECONDS:
                rounded[scope] = round(seconds[scope])
        SECONDS.write_text(json.dumps(rounded, indent=2) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest scopes first, so that no worker waits for another at the end.

    The sort keeps the order of the others as it is collected, with tests/engine first. Tests outside of this folder,
    those of the documentation, come last.
    """
    seconds = json.loads(SECONDS.read_text())
    here = Path(__file__).parent

    def get_seconds(item: pytest.Item) -> int:
        return seconds.get(get_scope(item.nodeid), 0)

    tests_here = []
    tests_elsewhere = []
    for item in items:
        if item.path.is_relative_to(here):
            tests_here.append(item)
        else:
            tests_elsewhere.append(item)

    tests_here.sort(key=get_seconds, reverse=True)
    items[:] = tests_here + tests_elsewhere
    for item in tests_here:
        if item.path.is_relative_to(here / "engine"):
            item.add_marker(pytest.mark.engine)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return ByCheckpoint(config, log)


class ByCheckpoint(LoadScopeScheduling):
    """Runs the tests of a scope in one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return get_scope(nodeid)
