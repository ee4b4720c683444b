"""The pytest plugin: laws without any test file.

``pytest -p mmkit.testing.plugin --mmkit package.module:SPEC --mmkit-model DIR``

With ``--mmkit registered`` the processor that vLLM has for the checkpoint is checked, whoever wrote it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("mmkit", "laws of multimodal processors on vLLM")
    group.addoption("--mmkit", metavar="MODULE:SPEC", help="check the laws on this spec; `registered`: on vLLM's own")
    group.addoption("--mmkit-model", metavar="DIR", help="checkpoint folder: config, tokenizer and processor files")
    group.addoption("--mmkit-load", action="store_true", help="load the model too, with dummy weights, for L1 and L13")
    group.addoption("--mmkit-examples", type=int, metavar="N", help="Hypothesis examples per law")


def pytest_configure(config: Any) -> None:
    if config.getoption("--mmkit"):
        import pytest

        if not config.getoption("--mmkit-model"):
            raise pytest.UsageError("--mmkit: expected --mmkit-model DIR beside it, got none.")
        config.args[:] = [str(Path(__file__).with_name("suite.py"))]


def spec_of(name: str) -> Any:
    """The spec that ``package.module:SPEC`` names."""
    module, _, variable = name.partition(":")
    return getattr(importlib.import_module(module), variable)
