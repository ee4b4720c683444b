"""Modules that processes which start later import."""

import os

import pytest

from mmkit import MmkitError, plugin

from .common import expect_refusal


def test_announce_names_a_module_once_and_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMKIT_MODULES", "")
    for name in ("json", "json", "__main__", "csv"):
        plugin.announce(name)
    assert os.environ["MMKIT_MODULES"] == "json,csv"
    plugin.load()
    monkeypatch.setenv("MMKIT_MODULES", "json,no_such_package.model")
    where = "MMKIT_MODULES, no_such_package.model: expected a module that every process can import"
    got = "got No module named 'no_such_package'. Install its package, or set PYTHONPATH."
    expect_refusal(MmkitError, f"{where}, {got}", plugin.load)
