"""The models of examples/wild: 400 chats each, tiny models of their shapes in engines, and the laws."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.profiles import scaled
from tests.wild.compare import NAMES
from tests.wild.serve import measure

REQUESTS = 10


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_served_as_its_own_code_says(
    name: str, tmp_path: Path, engines: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMKIT_MODULES", "")
    counts = measure(name, tmp_path, chats=400, requests=REQUESTS, examples=scaled(5))
    assert counts.offline == counts.chat == counts.requests == REQUESTS
    assert counts.distinct > REQUESTS / 2
    assert counts.laws >= 9
