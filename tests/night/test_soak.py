"""The soak, on its own server, with other requests each night. `make soak` sends 10,000."""

import os
import random
from pathlib import Path

import pytest

from tests.night.malformed import KINDS, send_request
from tests.night.soak import soak, terra_server


@pytest.mark.timeout(7200)
def test_malformed_requests_disturb_no_good_client(tmp_path: Path) -> None:
    """All kinds of requests are sent, and some of the bodies that fit the published schema are answered."""
    requests = int(os.environ.get("MMKIT_SOAK", "4000"))
    seed = random.SystemRandom().randrange(10**6)

    with terra_server(tmp_path / "log") as server:
        report = soak(server, requests, seed)
    print(report)

    assert report["violations"] == [], f"seed {seed}: {report['violations'][:5]}"
    assert report["kinds"].keys() == {kind.__name__ for kind in KINDS}
    statuses = report["kinds"][send_request.__name__]
    assert statuses["200"] > statuses.total() / 50
