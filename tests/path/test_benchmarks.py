"""The benchmarks measure what they say. None of these tests looks at a time."""

from benchmarks import measure, report
from tests import ROOT


def test_ratios_are_of_pairs():
    ratios = measure.compare({"ours": [1.0, 4.0, 3.0], "theirs": [2.0, 4.0, 2.0]}, "ours", "theirs")
    assert (ratios["ratio"], ratios["ours_ms"], ratios["theirs_ms"]) == (1.0, 3000.0, 2000.0)


def test_the_tables_of_the_pages_are_the_stored_results():
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("data/performance.md", "performance-terra.md"))
    for name, table in report.read_tables().items():
        assert table in pages, f"python -m benchmarks.report prints another table of {name}"
