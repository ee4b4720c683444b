"""The laws on the examples' specs, and on their models: the classes are loaded, without an engine."""

from pathlib import Path

import pytest
from hypothesis import strategies as st

from examples import llava_like
from examples.llava_like.checkpoint import make_checkpoint
from examples.llava_like.spec import LLAVA_LIKE
from mmkit.testing import ImageSample, Subject, check, of_spec
from tests.hf_law import EXAMPLES
from tests.profiles import scaled


def make_llava_like(folder: Path) -> Subject:
    llava_like.register()
    images = st.builds(ImageSample, st.integers(0, 2), st.integers(1, 160), st.integers(1, 160))
    options = {"hf_overrides": {"architectures": [llava_like.ARCHITECTURE]}}
    return of_spec(LLAVA_LIKE, make_checkpoint(folder), samples={"image": images}, **options)


@pytest.mark.parametrize(
    ("name", "not_applicable"),
    [
        pytest.param("terra", {"text", "embeds", "reference", "positions", "ids_only", "logprobs"}, id="terra"),
        pytest.param("llava_like", {"positions", "outputs", "ids_only", "logprobs"}, id="llava_like"),
        pytest.param("series", {"embeds", "reference", "positions", "outputs", "ids_only", "logprobs"}, id="series"),
    ],
)
def test_an_example_satisfies_each_law_that_applies_to_it(name: str, not_applicable: set[str], tmp_path: Path) -> None:
    if name == "llava_like":
        subject = make_llava_like(tmp_path)
    else:
        subject = EXAMPLES[name]()

    report = check(subject, model=True, examples=scaled(15))

    assert report, str(report)
    laws_not_held = {result.law for result in report.results if result.status != "holds"}
    assert laws_not_held == not_applicable
