"""The kit on processors that nobody here generated: each law ends in a verdict, and none in an error of the kit."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from examples.terra import CHECKPOINT
from mmkit.testing import RecordSample, Subject, TensorSample, check, vllm_path
from tests.path import foreign

SEEDS = st.integers(0, 3)
SERIES = st.builds(TensorSample, SEEDS, st.tuples(st.integers(1, 4), st.just(2)))
SCENES = st.builds(
    lambda seed: RecordSample(seed, {"pixels": TensorSample(seed, (3, 4, 4)), "place": TensorSample(seed + 1, (2,))}),
    SEEDS,
)
NO_POSITION = "no position of the prompt stands for scene"

SERIES_OF = ("series", np.zeros((4, 2), np.float32), lambda item: foreign.array(item).ndim == 2)
MOLECULE = ("molecule", "CCCCCC", lambda item: isinstance(item, str))
SCENE = (
    "scene",
    {"pixels": np.zeros((3, 4, 4), np.float32), "place": np.zeros(2, np.float32)},
    lambda item: isinstance(item, dict) and {*item} == {"pixels", "place"},
)


def scenes(items: list[Any]) -> dict[str, Any]:
    return {key: torch.stack([torch.as_tensor(item[key]) for item in items]) for key in ("pixels", "place")}


def data(values: Any) -> Any:
    """A processor of one field."""
    return lambda items: {"data": values(items)}


CASES: dict[str, tuple[Any, Any, Any, dict[str, str]]] = {
    "numpy arrays as fields": (
        SERIES_OF,
        data(lambda items: [*map(foreign.array, items)]),
        SERIES,
        {
            "ranges": "holds$",
            "text": "not applicable: the model has no tokenizer",
            "independence": "holds$",
            "round_trip": "holds$",
        },
    ),
    "numpy arrays that are padded": (
        SERIES_OF,
        data(foreign.padded),
        SERIES,
        {
            "ranges": "holds$",
            "independence": r"violated: .*: numpy float32 \(\d, 2\) and numpy float32 \(\d, 2\)",
            "round_trip": "holds$",
        },
    ),
    "one-shot iterators": (
        SERIES_OF,
        data(lambda items: [iter(foreign.array(item)) for item in items]),
        SERIES,
        {
            "ranges": "holds$",
            "round_trip": "violated: .*: a one-shot iterator, which caches and batches read more than once",
        },
    ),
    "an exception of the processor": (
        SERIES_OF,
        data(lambda items: [*map(foreign.breaking, items)]),
        SERIES,
        {"ranges": r"violated: RuntimeError: three steps\n +in the processing of series: \[TensorSample\("},
    ),
    "strings": (
        MOLECULE,
        data(lambda items: [torch.tensor([*item.encode()]) for item in items]),
        st.text("CNO", min_size=1, max_size=6),
        dict.fromkeys(("ranges", "independence", "worst_case", "identity", "round_trip"), "holds$"),
    ),
    "dicts, and no updates": (
        SCENE,
        scenes,
        SCENES,
        {
            "ranges": f"not applicable: {NO_POSITION}",
            **dict.fromkeys(("cache", "worst_case", "refusal", "idempotence"), "holds$"),
        },
    ),
}
"""Of each: modality, largest item and what is one; the fields; what is sent; and what the laws say."""


@pytest.mark.parametrize("name", CASES)
def test_verdicts(name: str) -> None:
    about, fields, samples, said = CASES[name]
    base = foreign.Raw if about is SCENE else foreign.Processor
    instance = foreign.instance(*about, fields, vllm_path.config_for_spec(CHECKPOINT), base)
    subject = Subject(instance, {about[0]: samples}, model_dir=CHECKPOINT)
    results = {result.law: result for result in check(subject, examples=10).results}
    assert all(result.status != "kit error" for result in results.values()), results
    for law, pattern in said.items():
        assert re.match(pattern, results[law].sentence), results[law]
