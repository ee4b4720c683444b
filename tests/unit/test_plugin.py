"""Modules that processes which start later import."""

import os

import pytest

from mmkit import plugin


def test_announce_names_a_module_once_and_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMKIT_MODULES", "")
    for name in ("json", "json", "__main__", "csv"):
        plugin.announce(name)
    assert os.environ["MMKIT_MODULES"] == "json,csv"
    plugin.load()
