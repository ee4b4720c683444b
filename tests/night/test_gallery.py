"""The specs of the gallery under all laws that need no model, and beside vLLM's classes on many drawn requests."""

from __future__ import annotations

import pytest

from mmkit.testing import NotApplicable, check_law
from tests.path import test_gallery, test_render_processes
from tests.path.test_gallery import EXAMPLES, LEFT_OUT, PAIRS, check_law_or_expected, open_subject
from tests.profiles import scaled


def list_laws_left_out() -> list[tuple[str, str]]:
    """Return the pairs of a spec and a law that has nothing to say about it.

    "cache" is none of these laws: it applies to each spec, but too few requests of a test show its violation.
    """
    pairs = []
    for law, names in LEFT_OUT.items():
        if law != "cache":
            pairs += [(name, law) for name in names]
    return sorted(pairs)


@pytest.mark.parametrize(("name", "number"), PAIRS)
def test_a_spec_satisfies_a_law(name: str, number: str) -> None:
    check_law_or_expected(name, number)


@pytest.mark.parametrize(("name", "law"), list_laws_left_out())
def test_a_law_that_is_left_out_does_not_apply(name: str, law: str) -> None:
    with pytest.raises(NotApplicable):
        check_law(law, open_subject(name), examples=EXAMPLES)


@pytest.mark.parametrize("name", test_gallery.LIVE)
def test_requests_are_processed_as_by_the_hand_written_class(name: str) -> None:
    test_gallery.compare_with_class(name, scaled(25))


@pytest.mark.parametrize("name", ["molmo", "ultravox"])
def test_items_are_the_same_from_render_processes(name: str) -> None:
    """Fields that depend on the call; audio and embeddings."""
    test_render_processes.requests_are_the_same(name)
