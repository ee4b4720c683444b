"""The specs of the gallery under all laws that need no model, and beside vLLM's classes on many drawn requests."""

from __future__ import annotations

import pytest

from mmkit.testing import NotApplicable, check_law
from tests.path import test_gallery, test_render_processes
from tests.path.test_gallery import EXAMPLES, LEFT_OUT, PAIRS, check_law_or_expected, open_subject
from tests.profiles import scaled

SILENT = sorted((name, number) for number in LEFT_OUT.keys() - {"cache"} for name in LEFT_OUT[number])


@pytest.mark.parametrize(("name", "number"), PAIRS)
def test_law(name: str, number: str) -> None:
    check_law_or_expected(name, number)


@pytest.mark.parametrize(("name", "number"), SILENT)
def test_a_law_that_is_left_out_does_not_apply(name: str, number: str) -> None:
    with pytest.raises(NotApplicable):
        check_law(number, open_subject(name), examples=EXAMPLES)


@pytest.mark.parametrize("name", test_gallery.LIVE)
def test_as_the_hand_written_class(name: str) -> None:
    test_gallery.compare_with_class(name, scaled(25))


@pytest.mark.parametrize("name", ["molmo", "ultravox"])
def test_items_that_other_processes_process(name: str) -> None:
    """Fields that depend on the call; audio and embeddings."""
    test_render_processes.requests_are_the_same(name)
