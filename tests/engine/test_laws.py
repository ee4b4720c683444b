"""The laws on the examples' specs, and on their models: the classes are loaded, without an engine."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import strategies as st

from examples import llava_like, series, terra
from examples.llava_like.checkpoint import make_checkpoint
from examples.llava_like.spec import LLAVA_LIKE
from examples.series.spec import WAVES
from examples.series.untrained import make_model, make_tokenizer
from examples.terra.spec import TERRA
from mmkit.testing import ImageSample, Subject, check, of_spec
from tests.profiles import scaled


def of_terra(folder: Path) -> Subject:
    terra.register()
    return of_spec(TERRA, terra.CHECKPOINT)


def of_llava_like(folder: Path) -> Subject:
    llava_like.register()
    images = st.builds(ImageSample, st.integers(0, 2), st.integers(1, 160), st.integers(1, 160))
    options = {"hf_overrides": {"architectures": [llava_like.ARCHITECTURE]}}
    return of_spec(LLAVA_LIKE, make_checkpoint(folder), samples={"image": images}, **options)


def of_series(folder: Path) -> Subject:
    series.register()
    tokenizer = make_tokenizer()
    make_model(0, len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return of_spec(WAVES, folder)


@pytest.mark.parametrize(
    ("make", "not_applicable"),
    [
        (of_terra, {"text", "embeds", "reference", "positions"}),
        (of_llava_like, {"positions", "outputs"}),
        (of_series, {"embeds", "reference", "positions", "outputs"}),
    ],
)
def test_laws(make: Callable[[Path], Subject], not_applicable: set[str], tmp_path: Path) -> None:
    report = check(make(tmp_path), model=True, examples=scaled(40))
    assert report, str(report)
    assert {result.law for result in report.results if result.status != "holds"} == not_applicable
