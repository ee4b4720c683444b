"""The soak in small: a server stands malformed requests of each kind beside good clients."""

from pathlib import Path

import pytest

from tests.night.soak import CHANGES, EITHER, KINDS, REFUSED, STOCK, TAKEN, case, soak

REQUESTS, SEED = 600, 3


def test_cases_are_reproducible() -> None:
    """By number, and one of each kind comes first."""
    first = [case(SEED, number) for number in range(len(KINDS))]
    assert {this.kind.name for this in first} == set(KINDS)
    for this in first:
        again = case(SEED, this.number)
        assert (again.kind.name, str(again.request)[:200]) == (this.kind.name, str(this.request)[:200]) or callable(
            getattr(this.request, "play", None)
        )


def test_kinds() -> None:
    assert {kind.expects for kind in KINDS.values()} == {REFUSED, TAKEN, EITHER, STOCK}
    assert len(CHANGES) > 100


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_soak(tmp_path: Path) -> None:
    report = soak(REQUESTS, seed=SEED, log=tmp_path / "log")
    assert report["violations"] == []
    assert report["requests"] == REQUESTS
    assert set(report["kinds"]) == set(KINDS)
    assert min(report["good_answers"].values()) > 0
    assert len(report["good_answers"]) == 4
    assert not any(report["gauges"].values())
