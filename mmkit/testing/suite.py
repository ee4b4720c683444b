"""The tests that the pytest plugin runs: one per law."""

from __future__ import annotations

from typing import Any

import pytest

import mmkit.testing
from mmkit.testing.plugin import spec_of


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> mmkit.testing.Subject:
    name, folder = request.config.getoption("--mmkit"), request.config.getoption("--mmkit-model")
    if name == "registered":
        return mmkit.testing.of_registered(folder)
    return mmkit.testing.of_spec(spec_of(name), folder)


def pytest_generate_tests(metafunc: Any) -> None:
    load = metafunc.config.getoption("--mmkit-load")
    laws = [law for law in mmkit.testing.LAWS.values() if load or not law.needs_model]
    metafunc.parametrize("law", laws, ids=[law.name for law in laws])


def test_law(law: mmkit.testing.Law, subject: mmkit.testing.Subject, request: pytest.FixtureRequest) -> None:
    try:
        mmkit.testing.check_law(law, subject, examples=request.config.getoption("--mmkit-examples"))
    except mmkit.testing.NotApplicable as reason:
        pytest.skip(str(reason))
