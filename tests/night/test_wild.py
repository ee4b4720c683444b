"""The models of examples/wild: 400 chats each, tiny models of their shapes in engines and servers, and the laws."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from examples.wild.biomed_rna import BIOMED_RNA
from mmkit.testing import check
from tests.profiles import scaled
from tests.wild import biomed_rna
from tests.wild.compare import NAMES
from tests.wild.serve import measure

pytestmark = pytest.mark.timeout(600)

REQUESTS = 10
SERVED = 5


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_served_as_its_own_code_says(
    name: str, tmp_path: Path, engines: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMKIT_MODULES", "")
    counts = measure(name, tmp_path, chats=400, requests=REQUESTS, served=SERVED, examples=scaled(5))
    assert counts.offline == counts.chat == counts.requests == REQUESTS
    assert counts.http == counts.served == SERVED
    assert counts.distinct > REQUESTS / 2
    assert counts.laws >= 8


def test_the_laws_hold_on_cells_without_a_prompt(tmp_path: Path) -> None:
    report = check(BIOMED_RNA, biomed_rna.write_config(tmp_path), examples=scaled(15))
    assert report, report
    held = {result.law for result in report.results if result.status == "holds"}
    assert held >= {"ranges", "independence", "round_trip", "worst_case", "identity", "refusal", "cache"}
