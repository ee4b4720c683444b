"""What would let a broken `make recall` pass; the replays run there, in hours of the night."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tools.matrix.trees import RELEASES, ROOT
from tools.recall import __main__ as recall
from tools.recall.bugs import REPLAYS

HOLDS = {"status": "holds", "message": "", "seconds": 1.0}
VIOLATED = {"status": "violated", "message": f"ranges: {REPLAYS[8].message}", "seconds": 1.0}


def test_the_page_has_every_replay() -> None:
    """And what is rebuilt there is planted."""
    page = recall.PAGE.read_text()
    planted = (ROOT / "docs" / "data" / "planted-bugs.md").read_text()
    for number, replayed in REPLAYS.items():
        after = f"holds on {replayed.fixed}" if replayed.fixed else "holds on none up to 0.33.0"
        end = re.escape(f"| {replayed.law} | replayed on {replayed.affected}; {after} |")
        assert re.search(rf"^\| {number} \| .* {end}$", page, re.MULTILINE), number
        assert {replayed.affected, replayed.fixed} - {None} <= set(RELEASES)
    assert page.count("| replayed on ") == len(REPLAYS)
    assert all(f"| {name} |" in planted for name in re.findall(r"\| rebuilt: (.*?) \|", page))


@pytest.mark.parametrize(
    ("before", "after", "failure"),
    [
        (VIOLATED, HOLDS, None),
        (HOLDS, HOLDS, "8, ranges on 0.17.1: expected"),
        ({**VIOLATED, "message": "another one"}, HOLDS, "8, ranges on 0.17.1: expected"),
        ({**VIOLATED, "status": "error"}, HOLDS, "8, ranges on 0.17.1: expected"),
        ({**VIOLATED, "seconds": 1e6}, HOLDS, "took 1000000.0 s"),
        (VIOLATED, VIOLATED, "8, ranges on 0.18.1, which is fixed: violated"),
        (VIOLATED, {**HOLDS, "status": "not applicable"}, "8, ranges on 0.18.1, which is fixed: not applicable"),
        (VIOLATED, None, "8, ranges on 0.18.1, which is fixed: no result"),
    ],
)
def test_what_fails(before: dict[str, Any], after: dict[str, Any] | None, failure: str | None) -> None:
    results = {(8, "0.17.1"): before} | ({(8, "0.18.1"): after} if after else {})
    told = recall.failures(8, results)
    assert bool(told) == (failure is not None)
    assert failure is None or failure in told[0]
