"""The laws on the models of the examples: Terra's and the LLaVA-like one's classes are loaded, without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import strategies as st

from examples import llava_like, terra
from examples.llava_like.checkpoint import make_checkpoint
from examples.llava_like.spec import LLAVA_LIKE
from examples.terra.spec import TERRA
from mmkit.testing import LAWS, ImageSample, NotApplicable, Subject, check_law, of_spec
from tests.profiles import scaled

EXAMPLES = scaled(60)
SMALL = {"image": st.builds(ImageSample, st.integers(0, 2), st.integers(1, 160), st.integers(1, 160))}
SUBJECTS: dict[str, Subject] = {}


@pytest.mark.parametrize("number", LAWS)
def test_terra(number: str) -> None:
    terra.register()
    if "terra" not in SUBJECTS:
        SUBJECTS["terra"] = of_spec(TERRA, terra.CHECKPOINT)
    _check(number, SUBJECTS["terra"])


@pytest.mark.parametrize("number", [number for number, law in LAWS.items() if law.needs_model])
def test_llava_like(number: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    llava_like.register()
    if "llava_like" not in SUBJECTS:
        folder: Path = make_checkpoint(tmp_path_factory.mktemp("llava"))
        options = {"hf_overrides": {"architectures": [llava_like.ARCHITECTURE]}}
        SUBJECTS["llava_like"] = of_spec(LLAVA_LIKE, folder, samples=dict(SMALL), **options)
    _check(number, SUBJECTS["llava_like"])


def _check(number: str, made: Subject) -> None:
    try:
        check_law(number, made, examples=EXAMPLES, database=False)
    except NotApplicable as reason:
        pytest.skip(str(reason))
