"""VibeVoice-ASR and NeMo's speech models as specs, against a plain account of what their own processors do.

tests/path compares the same requests on vLLM's path, and `make matrix` on other releases.
"""

from __future__ import annotations

from collections.abc import Mapping
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

NEWLINE = 198
AUDIO, START, PAD, END = 901, 902, 903, 904
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


def requests(lengths: st.SearchStrategy[int], most: int) -> st.SearchStrategy[tuple[list[list[int]], list[int]]]:
    """Texts, and how many samples the audio between two of them has."""
    texts = st.lists(st.integers(20, 90), max_size=3)
    between = st.lists(st.tuples(lengths, texts), max_size=most)
    return st.builds(lambda first, rest: ([first, *(text for _, text in rest)], [n for n, _ in rest]), texts, between)


def joined(texts: list[list[int]], audio: list[list[int]]) -> tuple[list[int], list[int]]:
    """Ids of texts with those of audio between them, and where these start."""
    ids, starts = [*texts[0]], []
    for own, text in zip(audio, texts[1:], strict=True):
        starts.append(len(ids))
        ids += [*own, *text]
    return ids, starts


def check(plan: Plan, texts: list[list[int]], audio: list[np.ndarray], written: list[list[int]], names: Any) -> None:
    """A request of texts with audio between them becomes these ids, with the samples and their numbers as fields."""
    prompt, _ = joined(texts, [[AUDIO]] * len(audio))
    shown = plan.preview(prompt, {"audio": audio} if audio else {})
    starts = [placed.start for placed in shown.placements]
    assert (shown.prompt_token_ids, starts) == joined(texts, written)
    same_fields(audio, shown.fields.get("audio", []), names)


def same_fields(audio: list[np.ndarray], fields: list[dict[str, Any]], names: Any) -> None:
    for samples, own in zip(audio, fields, strict=True):
        assert {*own} == {*names}
        assert own[names[0]].dtype == torch.float32
        assert np.array_equal(own[names[0]].numpy(), samples)
        assert int(own[names[1]]) == len(samples)


# -- VibeVoice-ASR -----------------------------------------------------------------------------------------------------

VIBEVOICES = {3200: bound(VIBEVOICE), 320: bound(VIBEVOICE, speech_tok_compress_ratio=320)}


VIBEVOICE_FIELDS = ("raw_audio", "raw_audio_lengths")
VIBEVOICE_REQUESTS = requests(st.integers(160, 30_000), most=1)


def of_vibevoice(known: Mapping[str, int], samples: int, ratio: int) -> list[int]:
    """One position for each begun `ratio` samples, after one token, and before another one and a newline."""
    positions = max(1, int(np.ceil(samples / ratio)))
    pads = [known["<|box_start|>"]] * positions
    return [known["<|object_ref_start|>"], *pads, known["<|object_ref_end|>"], NEWLINE]


@settings(max_examples=400)
@given(st.sampled_from([*VIBEVOICES]), VIBEVOICE_REQUESTS)
def test_vibevoice_as_by_hand(ratio: int, request: Any) -> None:
    texts, lengths = request
    written = [of_vibevoice(VOCABULARY, n, ratio) for n in lengths]
    check(VIBEVOICES[ratio], texts, [*map(noise, lengths)], written, VIBEVOICE_FIELDS)


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


NEMO_FIELDS = ("audio_signal", "audio_signal_length")
NEMO_REQUESTS = requests(st.integers(1, 40_000) | st.integers(1, 2_000), most=3)


def of_nemo(known: Mapping[str, int], samples: int, seconds: float | None) -> list[int]:
    return [known["<|audio|>"]] * by_hand(samples, seconds)


@settings(max_examples=400)
@given(st.sampled_from(CHUNKS), NEMO_REQUESTS)
def test_nemo_as_by_hand(seconds: float | None, request: Any) -> None:
    texts, lengths = request
    written = [of_nemo(VOCABULARY, n, seconds) for n in lengths]
    check(NEMOS[seconds], texts, [*map(noise, lengths)], written, NEMO_FIELDS)
