"""The page about features of vLLM shows what was stored."""

import json

from tests import ROOT
from tools.features.__main__ import STORED, format_results


def test_the_page_has_the_stored_table() -> None:
    results = json.loads(STORED.read_text())
    assert format_results(results) in (ROOT / "docs" / "data" / "features.md").read_text()
    for name, result in results.items():
        assert result["verdict"] not in ("fails", "differs"), name
