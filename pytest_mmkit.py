"""The pytest plugin of mmkit: the laws of a spec, without any test file.

``pytest --mmkit package.module:SPEC --mmkit-model DIR``

A module of its own beside the package, because pytest imports the plugins of an environment at
every start, and a module inside `mmkit` would bring torch with it.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("mmkit", "laws of multimodal processors on vLLM")
    group.addoption(
        "--mmkit",
        metavar="MODULE:SPEC",
        help="check the laws on this spec; `registered`: on vLLM's own",
    )
    group.addoption(
        "--mmkit-model",
        metavar="DIR",
        help="checkpoint folder: config, tokenizer and processor files",
    )
    group.addoption(
        "--mmkit-load",
        action="store_true",
        help="load the model too, with dummy weights, for the laws about rows",
    )
    group.addoption(
        "--mmkit-samples",
        metavar="MODULE:FUNCTION",
        help="a function that returns strategies for items, by modality",
    )
    group.addoption(
        "--mmkit-expected",
        metavar="FILE",
        help='known violations, TOML: independence = "a reason or a link"',
    )
    group.addoption(
        "--mmkit-trust-remote-code", action="store_true", help="run code that the checkpoint brings"
    )
    group.addoption("--mmkit-examples", type=int, metavar="N", help="Hypothesis examples per law")


def pytest_configure(config: Any) -> None:
    if not config.getoption("--mmkit"):
        return
    folder = config.getoption("--mmkit-model")
    if not folder:
        raise pytest.UsageError("--mmkit: expected --mmkit-model DIR beside it, got none.")
    file = Path(folder, "config.json")
    if not file.is_file():
        expected = "expected a folder with a config.json, got none"
        raise pytest.UsageError(f"--mmkit-model {folder}: {expected}.")
    config.args[:] = [str(file)]


def pytest_collect_file(file_path: Path, parent: Any) -> Any:
    if not parent.config.getoption("--mmkit"):
        return None
    from mmkit.testing.plugin import Laws

    return Laws.from_parent(parent, path=file_path)


def pytest_sessionfinish(session: Any) -> None:
    """End with the status of a run without tests if no law was checked, for example all skipped.

    That a run found no violation says nothing then.
    """
    options = session.config.option
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not options.mmkit or options.collectonly or reporter is None:
        return
    was_checked = any(reporter.stats.get(outcome) for outcome in ("passed", "failed", "xfailed"))
    if session.exitstatus == pytest.ExitCode.OK and not was_checked:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        reporter.write_line("")
        reporter.write_line("no law was checked", red=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(call: Any) -> Generator[None, Any, Any]:
    """Report a failure of the kit itself as an error.

    No expected failure covers it, since it says nothing about what is tested.
    """
    report = yield
    kit = sys.modules.get("mmkit.testing")
    if kit is not None and call.excinfo is not None and call.excinfo.errisinstance(kit.KitError):
        report.outcome, report.when = "failed", "setup"
        vars(report).pop("wasxfail", None)
    return report
