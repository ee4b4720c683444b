"""VibeVoice-ASR, NeMo's speech models and ChatTS as specs, against a plain account of what their own processors do.

tests/path compares the requests of the first two on vLLM's path, and `make matrix` on other releases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.gallery.chatts import CHATTS
from examples.gallery.nemo_salm import NEMO_SALM
from examples.gallery.vibevoice import VIBEVOICE
from mmkit import InputError, ModelSpec
from mmkit.plan.plan import Plan

from .common import Tokenizer

NEWLINE = 198
AUDIO, START, PAD, END = 901, 902, 903, 904
VOCABULARY = {
    "<|AUDIO|>": AUDIO, "<|object_ref_start|>": START, "<|box_start|>": PAD, "<|object_ref_end|>": END,
    "<|audio|>": AUDIO,
}  # fmt: skip


class SpecialTokenizer(Tokenizer):
    all_special_ids = (AUDIO, START, PAD, END)

    def get_vocab(self) -> dict[str, int]:
        return VOCABULARY


def bind_plan(spec: Any, **config: Any) -> Plan:
    return spec.bind(SimpleNamespace(vocab_size=1000, hidden_size=16, **config), SpecialTokenizer())


def make_noise(length: int) -> np.ndarray:
    return np.random.RandomState(length).randn(length).astype(np.float32)


class Request(NamedTuple):
    """Texts, and the items between two of them; an audio is told by the number of its samples."""

    texts: list[list[int]]
    items: list[Any]


@st.composite
def requests(draw: Any, items: st.SearchStrategy[Any], most: int) -> Request:
    """Requests of at most so many items."""
    texts = st.lists(st.integers(20, 90), max_size=3)
    request = Request([draw(texts)], [])
    for _ in range(draw(st.integers(0, most))):
        request.items.append(draw(items))
        request.texts.append(draw(texts))
    return request


def join(texts: list[list[int]], items: list[list[int]]) -> tuple[list[int], list[int]]:
    """Return the ids of texts with those of items between them, and the positions where items start."""
    ids = list(texts[0])
    starts = []
    for item, text in zip(items, texts[1:], strict=True):
        starts.append(len(ids))
        ids += item + text
    return ids, starts


def check_prompt(
    plan: Plan, texts: list[list[int]], items: list[np.ndarray], target: list[int], expected: list[list[int]]
) -> list[dict[str, Any]]:
    """Check that the target of each item, between texts, becomes the expected ids; return the fields of the items."""
    (name,) = plan.modalities
    prompt, _ = join(texts, [target] * len(items))
    preview = plan.preview(prompt, {name: items} if items else {})
    starts = [placement.start for placement in preview.placements]
    assert (preview.prompt_token_ids, starts) == join(texts, expected)
    return preview.fields.get(name, [])


def check_audio_fields(audio: list[np.ndarray], fields: list[dict[str, Any]], names: tuple[str, str]) -> None:
    """Check that the fields of each audio are its samples and their number."""
    samples_name, length_name = names
    for samples, fields_of_audio in zip(audio, fields, strict=True):
        assert set(fields_of_audio) == set(names)
        assert fields_of_audio[samples_name].dtype == torch.float32
        assert np.array_equal(fields_of_audio[samples_name].numpy(), samples)
        assert int(fields_of_audio[length_name]) == len(samples)


# -- VibeVoice-ASR and NeMo --------------------------------------------------------------------------------------------


class AudioModel(NamedTuple):
    """A spec of audio with options of its config; the ids of an audio, its requests, the names of its fields, and the
    token that is written for an audio."""

    spec: ModelSpec
    options: dict[str, Any]
    list_ids: Callable[[Mapping[str, int], int], list[int]]
    requests: st.SearchStrategy[Any]
    names: tuple[str, str]
    mark: str


def make_vibevoice(ratio: int, **options: Any) -> AudioModel:
    def list_ids(vocabulary: Mapping[str, int], samples: int) -> list[int]:
        """One position for each begun `ratio` samples, after one token, and before another one and a newline."""
        positions = max(1, int(np.ceil(samples / ratio)))
        pads = [vocabulary["<|box_start|>"]] * positions
        return [vocabulary["<|object_ref_start|>"]] + pads + [vocabulary["<|object_ref_end|>"], NEWLINE]

    lengths = requests(st.integers(160, 30_000), most=1)
    return AudioModel(VIBEVOICE, options, list_ids, lengths, ("raw_audio", "raw_audio_lengths"), "<|AUDIO|>")


def count_frames_of_one_pass(samples: int) -> int:
    """Return the frames of a spectrogram of 512 samples that is padded by half of them; then three times of a
    convolution of three frames, two apart, with one of padding on either side."""
    frames = (samples + 2 * 256 - 512) // 160
    for _ in range(3):
        frames = (frames + 2 * 1 - 3) // 2 + 1
    return max(1, frames)


def count_frames(samples: int, seconds: float | None) -> int:
    """Return the frames of all chunks of so many seconds; one of less than 320 samples goes to the one before it."""
    if seconds is None:
        return count_frames_of_one_pass(samples)
    size = max(320, round(seconds * 16_000))
    edges = list(range(0, samples, size))
    edges.append(samples)
    if len(edges) > 2 and edges[-1] - edges[-2] < 320:
        del edges[-2]
    return sum(count_frames_of_one_pass(end - begin) for begin, end in pairwise(edges))


def make_nemo(seconds: float | None) -> AudioModel:
    def list_ids(vocabulary: Mapping[str, int], samples: int) -> list[int]:
        return [vocabulary["<|audio|>"]] * count_frames(samples, seconds)

    lengths = requests(st.integers(1, 40_000) | st.integers(1, 2_000), most=3)
    options = {"encoder_chunk_size_seconds": seconds}
    return AudioModel(NEMO_SALM, options, list_ids, lengths, ("audio_signal", "audio_signal_length"), "<|audio|>")


AUDIO_MODELS = {
    "VibeVoice": make_vibevoice(3200),
    "VibeVoice of 320 samples": make_vibevoice(320, speech_tok_compress_ratio=320),
    "NeMo": make_nemo(None),
    "NeMo in chunks": make_nemo(0.1),
    "NeMo in chunks of 0.001 s": make_nemo(0.001),
    "NeMo in chunks of 0.05 s": make_nemo(0.05),
    "NeMo in chunks of 1.0 s": make_nemo(1.0),
}
PLANS = {name: bind_plan(model.spec, **model.options) for name, model in AUDIO_MODELS.items()}


@settings(max_examples=800)
@given(st.sampled_from(list(AUDIO_MODELS)), st.data())
def test_audio_becomes_what_its_own_processor_makes_of_it(name: str, data: Any) -> None:
    model = AUDIO_MODELS[name]
    request = data.draw(model.requests)
    audio = [make_noise(length) for length in request.items]
    expected = [model.list_ids(VOCABULARY, length) for length in request.items]
    fields = check_prompt(PLANS[name], request.texts, audio, [AUDIO], expected)
    check_audio_fields(audio, fields, model.names)


def test_vibevoice_refuses_what_its_encoder_leaves_out() -> None:
    """The plugin makes a position of 159 samples, and no row for it."""
    sentence = r"vibevoice\.audio\[0\]: expected .* of at least 160 samples, got 159 samples\."
    with pytest.raises(InputError, match=sentence):
        PLANS["VibeVoice"].expand([AUDIO], {"audio": [make_noise(159)]})


# -- ChatTS ------------------------------------------------------------------------------------------------------------

TOKEN, PATCH = 5, 4
CHATTS_PLAN = bind_plan(CHATTS, ts_token_start_index=TOKEN, ts={"max_sequence_length": 40, "patch_size": PATCH})
LEVELS = st.sampled_from([0.25, 1, 40, 1e4])


@st.composite
def series(draw: Any) -> np.ndarray:
    numbers = draw(st.lists(st.integers(-40, 40), min_size=1, max_size=40))
    return np.array(numbers) * draw(LEVELS)


class EncodedSeries(NamedTuple):
    ids: list[int]
    values: np.ndarray
    """The values, each with the mask behind it."""


def encode_series(values: np.ndarray) -> EncodedSeries:
    """Return what ChatTS makes of one series."""
    mean = np.mean(values)
    centered = values - mean
    scale = 1.0
    if np.any(np.abs(centered) >= 3.0):
        scale = np.max(np.abs(centered)) / 3.0
        centered = centered / scale
    text = f"[Offset: {-mean:.4f}|Scaled by: {scale:.4f}]"
    patches = [TOKEN] * math.ceil(len(values) / PATCH)
    ids = SpecialTokenizer().encode(text, add_special_tokens=False) + patches
    with_mask = np.stack([centered, np.ones_like(centered)], axis=1)
    return EncodedSeries(ids, with_mask.reshape(-1, 1).astype(np.float32))


@settings(max_examples=400)
@given(requests(series(), most=4))
def test_series_become_what_chatts_makes_of_them(request: Request) -> None:
    encoded = [encode_series(values) for values in request.items]
    expected = [one_series.ids for one_series in encoded]
    fields = check_prompt(CHATTS_PLAN, request.texts, request.items, [TOKEN, TOKEN + 1], expected)
    for one_series, fields_of_series in zip(encoded, fields, strict=True):
        assert fields_of_series["timeseries"].dtype == torch.float32
        np.testing.assert_allclose(fields_of_series["timeseries"].numpy(), one_series.values, rtol=1e-6, atol=1e-7)
