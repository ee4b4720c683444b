"""The tests that ``pytest --mmkit MODULE:SPEC --mmkit-model DIR`` runs: one per law."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import mmkit.testing
from mmkit import ModelSpec
from mmkit.errors import sentence

REGISTERED = "registered"
"""In place of a spec: the processor that vLLM has for the checkpoint, whoever wrote it."""


def spec_of(name: str) -> ModelSpec:
    """The spec that ``package.module:SPEC`` names."""
    module, _, variable = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), variable)
    except (ImportError, AttributeError, ValueError) as error:
        got = f"{type(error).__name__}: {error}".rstrip(".")
        raise pytest.UsageError(sentence(f"--mmkit {name}", "package.module:SPEC", got)) from error
    if not isinstance(found, ModelSpec):
        raise pytest.UsageError(
            sentence(f"--mmkit {name}", "a ModelSpec", f"a {type(found).__name__}")
        )
    return found


def check_options(name: str, folder: str) -> None:
    """Refuse what is not the name of a spec and the folder of a checkpoint."""
    if name != REGISTERED:
        spec_of(name)
    if not (Path(folder) / "config.json").is_file():
        remedy = "Give the folder of a checkpoint; it needs no weights."
        raise pytest.UsageError(
            sentence(f"--mmkit-model {folder}", "a folder with a config.json", "none", remedy)
        )


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> mmkit.testing.Subject:
    name, folder = request.config.getoption("--mmkit"), request.config.getoption("--mmkit-model")
    trust = request.config.getoption("--mmkit-trust-remote-code")
    if name == REGISTERED:
        return mmkit.testing.of_registered(folder, trust_remote_code=trust)
    return mmkit.testing.of_spec(spec_of(name), folder, trust_remote_code=trust)


def pytest_generate_tests(metafunc: Any) -> None:
    load = metafunc.config.getoption("--mmkit-load")
    laws = [law for law in mmkit.testing.LAWS.values() if load or not law.needs_model]
    metafunc.parametrize("law", laws, ids=[law.name for law in laws])


def test_law(
    law: mmkit.testing.Law, subject: mmkit.testing.Subject, request: pytest.FixtureRequest
) -> None:
    try:
        mmkit.testing.check_law(law, subject, examples=request.config.getoption("--mmkit-examples"))
    except mmkit.testing.NotApplicable as reason:
        pytest.skip(str(reason))
