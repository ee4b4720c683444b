"""VibeVoice-ASR and NeMo's speech models as specs, against a plain account of what their own processors do."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.gallery.nemo_salm import NEMO_SALM
from examples.gallery.vibevoice import VIBEVOICE
from mmkit import InputError
from mmkit.plan import Plan

from .common import Tokenizer

AUDIO, START, PAD, END, NEWLINE = 901, 902, 903, 904, 198
VOCABULARY = {
    "<|AUDIO|>": AUDIO, "<|object_ref_start|>": START, "<|box_start|>": PAD, "<|object_ref_end|>": END,
    "<|audio|>": AUDIO,
}  # fmt: skip


class Special(Tokenizer):
    all_special_ids = (AUDIO, START, PAD, END)

    def get_vocab(self) -> dict[str, int]:
        return VOCABULARY


def bound(spec: Any, **config: Any) -> Plan:
    return spec.bind(SimpleNamespace(vocab_size=1000, hidden_size=16, **config), Special())


def noise(length: int) -> np.ndarray:
    return np.random.RandomState(length).randn(length).astype(np.float32)


TEXTS = st.lists(st.integers(20, 90), max_size=3)


def check(plan: Plan, texts: list[list[int]], audio: list[np.ndarray], written: list[list[int]], names: Any) -> None:
    """A request of texts with audio between them becomes these ids, with the samples and their numbers as fields."""
    prompt, expected, starts = [*texts[0]], [*texts[0]], []
    for ids, text in zip(written, texts[1:], strict=True):
        prompt += [AUDIO, *text]
        starts.append(len(expected))
        expected += [*ids, *text]
    shown = plan.preview(prompt, {"audio": audio} if audio else {})
    assert shown.prompt_token_ids == expected
    assert [placed.start for placed in shown.placements] == starts
    for samples, own in zip(audio, shown.fields.get("audio", []), strict=True):
        assert {*own} == {*names}
        assert own[names[0]].dtype == torch.float32
        assert np.array_equal(own[names[0]].numpy(), samples)
        assert int(own[names[1]]) == len(samples)


# -- VibeVoice-ASR -----------------------------------------------------------------------------------------------------

VIBEVOICES = {3200: bound(VIBEVOICE), 320: bound(VIBEVOICE, speech_tok_compress_ratio=320)}


@settings(max_examples=400)
@given(st.sampled_from([*VIBEVOICES]), st.lists(st.integers(160, 30_000), max_size=1), st.data())
def test_vibevoice_as_by_hand(ratio: int, lengths: list[int], data: st.DataObject) -> None:
    """One position for each begun `ratio` samples, after one token, and before another one and a newline."""
    texts = data.draw(st.lists(TEXTS, min_size=len(lengths) + 1, max_size=len(lengths) + 1))
    written = [[START, *[PAD] * max(1, int(np.ceil(n / ratio))), END, NEWLINE] for n in lengths]
    check(VIBEVOICES[ratio], texts, [*map(noise, lengths)], written, ("raw_audio", "raw_audio_lengths"))


def test_vibevoice_refuses_what_its_encoder_leaves_out() -> None:
    """The plugin makes a position of 159 samples, and no row for it."""
    with pytest.raises(InputError, match=r"vibevoice\.audio: expected 160 samples or more, got 159"):
        VIBEVOICES[3200].expand([AUDIO], {"audio": [noise(159)]})


# -- NeMo --------------------------------------------------------------------------------------------------------------

CHUNKS = [None, 0.001, 0.05, 0.1, 1.0]
NEMOS = {seconds: bound(NEMO_SALM, encoder_chunk_size_seconds=seconds) for seconds in CHUNKS}


def of_one_pass(samples: int) -> int:
    """Frames of a spectrogram of 512 samples that is padded by half of them; then three times a convolution of three
    frames, two apart, with one of padding on either side."""
    frames = (samples + 2 * 256 - 512) // 160
    for _ in range(3):
        frames = (frames + 2 * 1 - 3) // 2 + 1
    return max(1, frames)


def by_hand(samples: int, seconds: float | None) -> int:
    """As often as there are chunks of so many seconds; one of less than 320 samples goes to the one before it."""
    if seconds is None:
        return of_one_pass(samples)
    size = max(320, round(seconds * 16_000))
    edges = [*range(0, samples, size), samples]
    if len(edges) > 2 and edges[-1] - edges[-2] < 320:
        del edges[-2]
    return sum(of_one_pass(end - begin) for begin, end in pairwise(edges))


@settings(max_examples=400)
@given(st.sampled_from(CHUNKS), st.lists(st.integers(1, 40_000) | st.integers(1, 2_000), max_size=3), st.data())
def test_nemo_as_by_hand(seconds: float | None, lengths: list[int], data: st.DataObject) -> None:
    texts = data.draw(st.lists(TEXTS, min_size=len(lengths) + 1, max_size=len(lengths) + 1))
    written = [[AUDIO] * by_hand(n, seconds) for n in lengths]
    check(NEMOS[seconds], texts, [*map(noise, lengths)], written, ("audio_signal", "audio_signal_length"))
