"""Every spec of this project against every law; Terra and the LLaVA-like model with their models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from examples import llava_like, terra
from examples.llava_like.checkpoint import make_checkpoint
from examples.llava_like.spec import LLAVA_LIKE
from examples.terra.spec import TERRA
from mmkit.testing import LAWS, ImageSample, NotApplicable, Subject, Violation, check_law, of_spec
from tests.oracles import SYSTEMS
from tests.profiles import scaled

EXAMPLES = scaled(60)
SMALL = {"image": st.builds(ImageSample, st.integers(0, 2), st.integers(1, 160), st.integers(1, 160))}
KWARGS: dict[str, Any] = {
    "fuyu": st.sampled_from([{}, {"size": {"height": 60, "width": 90}}]),
    "molmo": st.sampled_from([{}, {"max_crops": 2}]),
    "internvl2": st.sampled_from([{}, {"max_dynamic_patch": 2}, {"dynamic_image_size": False}]),
}
KNOWN_IF_SEEN = ("molmo", "L3")
"""As L5, but few sequences of requests show it."""

EXPECTED = {
    (
        "molmo",
        "L5",
    ): "image_input_idx counts positions over all images of the processor's call; the model uses its order alone",
}
SUBJECTS: dict[str, Subject] = {}


def subject(name: str) -> Subject:
    if name not in SUBJECTS:
        system = SYSTEMS[name]
        SUBJECTS[name] = of_spec(system.load_spec(), system.checkpoint, kwargs=KWARGS.get(name), samples=dict(SMALL))
    return SUBJECTS[name]


@pytest.mark.parametrize("number", [number for number, law in LAWS.items() if not law.needs_model])
@pytest.mark.parametrize("name", SYSTEMS)
def test_gallery(name: str, number: str) -> None:
    if (name, number) == KNOWN_IF_SEEN:
        pytest.skip(EXPECTED[name, "L5"])
    if (name, number) in EXPECTED:
        with pytest.raises(Violation, match="image_input_idx"):
            check_law(number, subject(name), examples=100, database=False)
    else:
        _check(number, subject(name))


@pytest.mark.engine
@pytest.mark.parametrize("number", LAWS)
def test_terra(number: str) -> None:
    terra.register()
    if "terra" not in SUBJECTS:
        SUBJECTS["terra"] = of_spec(TERRA, terra.CHECKPOINT)
    _check(number, SUBJECTS["terra"])


@pytest.mark.engine
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
