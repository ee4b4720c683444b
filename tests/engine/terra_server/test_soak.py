"""The soak in small: a server stands one malformed request of each kind beside good clients."""

import pytest

from mmkit.serve.process import Server
from tests.night.malformed import EITHER, KINDS, REFUSED, STOCK, TAKEN, case
from tests.night.soak import soak

pytestmark = pytest.mark.timeout(600)

SEED = 3
CASES = [case(SEED, number) for number in range(len(KINDS))]


def test_cases_are_reproducible() -> None:
    """By number, and one of each kind comes first."""
    assert {this.kind.name for this in CASES} == set(KINDS)
    assert [this.shown for this in CASES] == [case(SEED, this.number).shown for this in CASES]
    assert {kind.expects for kind in KINDS.values()} == {REFUSED, TAKEN, EITHER, STOCK}


def test_soak(server: Server) -> None:
    report = soak(server, range(len(KINDS)), SEED)
    assert report["violations"] == []
    assert set(report["kinds"]) == set(KINDS)
    assert len(report["good_answers"]) == 4
    assert report["gauges"]
