"""The soak in small: a server stands malformed requests of every kind beside good clients."""

import pytest

from mmkit.serve.process import Server
from tests.night.malformed import EITHER, KINDS, REFUSED, STOCK, TAKEN, case
from tests.night.soak import soak

pytestmark = pytest.mark.timeout(600)

SEED, NUMBERS = 3, range(3 * len(KINDS))


def test_cases_are_reproducible() -> None:
    """By number, and one of each kind comes first."""
    cases = [case(SEED, number) for number in NUMBERS]
    assert {this.kind for this in cases[: len(KINDS)]} == set(KINDS)
    assert [this.shown for this in cases] == [case(SEED, number).shown for number in NUMBERS]
    assert {getattr(this.request, "expects", TAKEN) for this in cases} == {REFUSED, TAKEN, EITHER, STOCK}


def test_soak(server: Server) -> None:
    report = soak(server, NUMBERS, SEED)
    assert report["violations"] == []
    assert len(report["good_answers"]) == 4
    assert report["gauges"]
