"""The tests that ``pytest --mmkit MODULE:SPEC --mmkit-model DIR`` runs: one per law."""

from __future__ import annotations

from typing import Any

import pytest

import mmkit.testing

from .common import REGISTERED, UsageError, checkpoint, load_spec


def check_options(name: str, folder: str) -> None:
    """Refuse what is not the name of a spec and the folder of a checkpoint."""
    try:
        if name != REGISTERED:
            load_spec(name)
        checkpoint(folder, "--mmkit-model")
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> mmkit.testing.Subject:
    name, folder = request.config.getoption("--mmkit"), request.config.getoption("--mmkit-model")
    trust = request.config.getoption("--mmkit-trust-remote-code")
    if name == REGISTERED:
        return mmkit.testing.of_registered(folder, trust_remote_code=trust)
    return mmkit.testing.of_spec(load_spec(name), folder, trust_remote_code=trust)


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
