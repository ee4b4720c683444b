"""The kit on processors that nobody here generated: each law ends in a verdict, and none in an error of the kit."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import strategies as st

from examples.terra import CHECKPOINT
from mmkit.testing import LAWS, RecordSample, Result, Subject, TensorSample, check_subject
from mmkit.vllm_api import harness
from tests.path import foreign

SEEDS = st.integers(0, 3)
SERIES = st.builds(TensorSample, SEEDS, st.tuples(st.integers(1, 4), st.just(2)))
SCENES = st.builds(
    lambda seed: RecordSample(seed, {"pixels": TensorSample(seed, (3, 4, 4)), "place": TensorSample(seed + 1, (2,))}),
    SEEDS,
)
NO_POSITION = "no position of the prompt stands for scene"

CASES: dict[str, tuple[Any, Any, Any, Any, dict[str, str]]] = {
    "numpy arrays as fields": (
        *(foreign.SeriesInfo, foreign.SeriesDummy, foreign.NumpyFields, SERIES),
        {"L2": "holds$", "L4": "not applicable: the model has no tokenizer", "L5": "holds$", "L8": "holds$"},
    ),
    "numpy arrays that are padded": (
        *(foreign.SeriesInfo, foreign.SeriesDummy, foreign.PaddedNumpyFields, SERIES),
        {"L2": "holds$", "L5": r"violated: .*: numpy float32 \(\d, 2\) and numpy float32 \(\d, 2\)", "L8": "holds$"},
    ),
    "one-shot iterators": (
        *(foreign.SeriesInfo, foreign.SeriesDummy, foreign.OneShotFields, SERIES),
        {"L2": "holds$", "L8": "violated: .*: a one-shot iterator, which caches and batches read more than once"},
    ),
    "an exception of the processor": (
        *(foreign.SeriesInfo, foreign.SeriesDummy, foreign.Breaking, SERIES),
        {"L2": r"violated: RuntimeError: three steps\n +in the processing of series: \[TensorSample\("},
    ),
    "strings": (
        *(foreign.MoleculeInfo, foreign.MoleculeDummy, foreign.Molecules, st.text("CNO", min_size=1, max_size=6)),
        {"L2": "holds$", "L5": "holds$", "L6": "holds$", "L7": "holds$", "L8": "holds$"},
    ),
    "dicts, and no updates": (
        *(foreign.SceneInfo, foreign.SceneDummy, foreign.Scenes, SCENES),
        {"L2": f"not applicable: {NO_POSITION}", "L3": "holds$", "L6": "holds$", "L9": "holds$", "L10": "holds$"},
    ),
}
"""Of each: the classes, what is sent, and what the laws say."""


@pytest.mark.parametrize("name", CASES)
def test_verdicts(name: str) -> None:
    info, dummy_inputs, processor, samples, said = CASES[name]
    instance = harness.generated(info, dummy_inputs, processor, harness.config_for_spec(CHECKPOINT))
    subject = Subject(instance, {info.modality: samples}, model_dir=CHECKPOINT)
    laws = [number for number in LAWS if number != "L12"]
    report = check_subject(subject, laws=laws, examples=10)
    assert not report.kit_errors, str(report)
    results: dict[str, Result] = dict(zip(laws, report.results, strict=True))
    for number, pattern in said.items():
        assert re.match(pattern, results[number].sentence), results[number]
