"""One model in the dtype of the least range; tests/night/test_containment.py has the others, in three."""

from pathlib import Path

from tests.engine.containment import check


def test_no_request_changes_the_answers_of_others(tmp_path: Path) -> None:
    check("new", "float16", tmp_path)
