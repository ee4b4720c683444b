"""Every stored output of vLLM's hand-written processors, and what is right where one is wrong, through the specs that
replace them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.oracles import SYSTEMS, differences, replay
from tools.lines import code_lines

CASES = [(name, case) for name, system in SYSTEMS.items() for case in system.cases()]


@pytest.mark.parametrize(("name", "case"), [pytest.param(n, c, id=f"{n}/{c['id']}") for n, c in CASES])
def test_stored_case(name: str, case: dict[str, Any]) -> None:
    if "error" in case:
        with pytest.raises(ValueError, match=r"^\w+\.(image|video|audio)[^ ]*: expected "):
            replay(name, case)
    else:
        assert not differences(case["expect"], replay(name, case))


def test_the_table_of_the_docs() -> None:
    """docs/data/gallery.md states the lines of each spec and the number of stored cases."""
    text = (Path(__file__).parents[2] / "docs" / "data" / "gallery.md").read_text()
    stated = re.findall(r"^\| \[.*?\]\(\.\./\.\./(.*?)\) \|[^|]*\| (\d+) \|[^|]*\|[^|]*\| (\d+) \|", text, re.MULTILINE)
    known = {}
    for name, system in SYSTEMS.items():
        path = Path(*("examples/" + system.spec.split(":")[0].replace(".", "/") + ".py").split("/"))
        known[str(path)] = code_lines(path.read_text(), imports=False), sum(n == name for n, _ in CASES)
    assert {path: (int(lines), int(cases)) for path, lines, cases in stated} == known
