"""The soak, on a server of its own, with other requests each night; `make soak` has 10,000."""

import os
import random
from pathlib import Path

import pytest

from tests.night.malformed import KINDS
from tests.night.soak import soak, terra_server


@pytest.mark.timeout(7200)
def test_soak(tmp_path: Path) -> None:
    """Of the bodies that fit the published schema, some are answered."""
    with terra_server(tmp_path / "log") as server:
        report = soak(server, int(os.environ.get("MMKIT_SOAK", "4000")), random.SystemRandom().randrange(10**6))
    print(report)
    assert report["violations"] == [], f"seed {report['seed']}: {report['violations'][:5]}"
    assert {*report["kinds"]} == {kind.__name__ for kind in KINDS}
    statuses = report["kinds"]["written"]
    assert statuses["200"] > statuses.total() / 50
