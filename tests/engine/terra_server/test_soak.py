"""The soak in small: a server stands conversations that are none, beside good clients."""

import pytest

from examples.server import Server
from tests.night.malformed import BY_DAY
from tests.night.soak import soak

pytestmark = pytest.mark.timeout(600)


def test_soak(server: Server) -> None:
    report = soak(server, 24, kinds=BY_DAY)
    assert report["violations"] == []
    assert len(report["good"]) == 4
