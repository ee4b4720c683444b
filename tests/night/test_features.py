"""Features of vLLM that ask something of the model class; `python -m tools.features` runs all, on both sides."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from examples.llava_like import register
from examples.llava_like.offline import answer, engine
from tests.engine.processes import engines_in_this_process
from tools.features import parts
from tools.features.rows import FEATURES, Side


@pytest.fixture(scope="module")
def engines() -> Iterator[ExitStack]:
    register()
    with engines_in_this_process() as stack:
        yield stack


@pytest.mark.parametrize("name", ["EAGLE-3", "classification: `classify`"])
def test_answers_are_those_of_vllms_own_class(engines: ExitStack, tmp_path: Path, name: str) -> None:
    (feature,) = (feature for feature in FEATURES if feature.name == name)
    theirs, ours = (feature.run(Side(own, tmp_path / str(own), engines)) for own in (True, False))
    assert ours == theirs


def test_an_adapter_of_the_tower_is_as_its_weights_in_the_checkpoint(engines: ExitStack, tmp_path: Path) -> None:
    """vLLM's own class counts a position less than CLIP computes, and fails."""
    (feature,) = (feature for feature in FEATURES if "tower" in feature.name)
    side = Side(False, tmp_path / "side", engines)
    ids = feature.run(side)
    merged = parts.merged(tmp_path / "merged", side.checkpoint, side.folder / "adapter")
    llm = engines.enter_context(engine(merged, seed=0, enforce_eager=True))
    assert answer(llm, side.requests) == ids
