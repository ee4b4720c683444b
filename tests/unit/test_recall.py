"""What would let a broken `make recall` pass; the replays run there, in hours of the night."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tools.matrix.trees import RELEASES, ROOT
from tools.recall import __main__ as recall
from tools.recall.bugs import BUGS

HOLDS = {"status": "holds", "message": "", "seconds": 1.0}
VIOLATED = {"status": "violated", "message": f"ranges: {BUGS[8].replay.message}", "seconds": 1.0}  # type: ignore[union-attr]


def test_the_page_has_every_bug() -> None:
    page = recall.PAGE.read_text()
    assert [recall.row(number, bug) for number, bug in BUGS.items()] == re.findall(r"^\| \d.*$", page, re.MULTILINE)
    assert recall.counts() in page.replace("\n", " ")


def test_every_bug_is_one_of_three() -> None:
    planted = (ROOT / "docs" / "data" / "planted-bugs.md").read_text()
    for bug in BUGS.values():
        assert sum(map(bool, (bug.replay, bug.rebuilt, bug.missed))) == 1
        assert not bug.rebuilt or f"| {bug.rebuilt.replace('_', ' ')} |" in planted, bug
        if bug.replay is not None:
            assert {bug.replay.affected, bug.replay.fixed} - {None} <= set(RELEASES)
            re.compile(bug.replay.message)


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
