"""ChatTS as a spec, against a plain account of what its own processor does."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.gallery.chatts import CHATTS

from .common import Tokenizer

START, PATCH = 5, 4
CONFIG = SimpleNamespace(
    vocab_size=1000, hidden_size=16, ts_token_start_index=START, ts={"max_sequence_length": 40, "patch_size": PATCH}
)
TOKENIZER = Tokenizer()
PLAN = CHATTS.bind(CONFIG, TOKENIZER)

LEVELS = st.sampled_from([0.25, 1, 40, 1e4])
SERIES = st.builds(
    lambda numbers, level: np.array(numbers) * level, st.lists(st.integers(-40, 40), min_size=1, max_size=40), LEVELS
)
TEXTS = st.lists(st.integers(20, 90), max_size=3)


def by_hand(series: np.ndarray) -> tuple[list[int], np.ndarray]:
    """The ids of one series, and its values with the mask."""
    mean = np.mean(series)
    values, scale = series - mean, 1.0
    if np.any(np.abs(values) >= 3.0):
        scale = np.max(np.abs(values)) / 3.0
        values = values / scale
    text = TOKENIZER.encode(f"[Offset: {-mean:.4f}|Scaled by: {scale:.4f}]", add_special_tokens=False)
    encoded = np.stack([values, np.ones_like(values)], axis=1).reshape(-1, 1).astype(np.float32)
    return [*text, *[START] * -(-len(series) // PATCH)], encoded


@given(st.lists(st.tuples(TEXTS, SERIES), max_size=4), TEXTS)
def test_as_by_hand(parts: list[tuple[list[int], Any]], after: list[int]) -> None:
    prompt = [token for text, _ in parts for token in (*text, START, START + 1)] + after
    shown = PLAN.preview(prompt, {"timeseries": [series for _, series in parts]} if parts else {})
    expected: list[int] = []
    starts = []
    for text, series in parts:
        starts.append(len(expected) + len(text))
        expected += [*text, *by_hand(series)[0]]
    assert shown.prompt_token_ids == expected + after
    assert [placed.start for placed in shown.placements] == starts
    sent = shown.fields.get("timeseries", [])
    for (_, series), own in zip(parts, sent, strict=True):
        assert own["timeseries"].dtype == torch.float32
        np.testing.assert_allclose(own["timeseries"].numpy(), by_hand(series)[1], rtol=1e-6, atol=1e-7)
