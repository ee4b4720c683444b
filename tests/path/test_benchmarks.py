"""The benchmarks measure what they say. None of these tests looks at a time."""

from benchmarks import measure


def test_ratios_are_of_pairs():
    ratios = measure.compare({"ours": [1.0, 4.0, 3.0], "theirs": [2.0, 4.0, 2.0]}, "ours", "theirs")
    assert (ratios["ratio"], ratios["ours_ms"], ratios["theirs_ms"]) == (1.0, 3000.0, 2000.0)
