"""VibeVoice-ASR, NeMo's speech models and ChatTS as specs, against a plain account of what their own processors do.

tests/path compares the requests of the first two on vLLM's path, and `make matrix` on other releases.
"""

from __future__ import annotations

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


class Special(Tokenizer):
    all_special_ids = (AUDIO, START, PAD, END)

    def get_vocab(self) -> dict[str, int]:
        return VOCABULARY


def bound(spec: Any, **config: Any) -> Plan:
    return spec.bind(SimpleNamespace(vocab_size=1000, hidden_size=16, **config), Special())


def noise(length: int) -> np.ndarray:
    return np.random.RandomState(length).randn(length).astype(np.float32)


def requests(items: st.SearchStrategy[Any], most: int) -> st.SearchStrategy[tuple[list[list[int]], list[Any]]]:
    """Texts, and what tells of the item between two of them, as how many samples an audio has."""
    texts = st.lists(st.integers(20, 90), max_size=3)
    between = st.lists(st.tuples(items, texts), max_size=most)
    return st.builds(lambda first, rest: ([first, *(text for _, text in rest)], [n for n, _ in rest]), texts, between)


def joined(texts: list[list[int]], items: list[list[int]]) -> tuple[list[int], list[int]]:
    """Ids of texts with those of items between them, and where these start."""
    ids, starts = [*texts[0]], []
    for own, text in zip(items, texts[1:], strict=True):
        starts.append(len(ids))
        ids += [*own, *text]
    return ids, starts


def fields_of(
    plan: Plan, texts: list[list[int]], items: list[np.ndarray], mark: list[int], written: list[list[int]]
) -> list[dict[str, Any]]:
    """A request of texts with items between them, each marked by the same ids, becomes these. Returns the fields."""
    (name,) = plan.modalities
    prompt, _ = joined(texts, [mark] * len(items))
    shown = plan.preview(prompt, {name: items} if items else {})
    starts = [placed.start for placed in shown.placements]
    assert (shown.prompt_token_ids, starts) == joined(texts, written)
    return shown.fields.get(name, [])


def same_fields(audio: list[np.ndarray], fields: list[dict[str, Any]], names: Any) -> None:
    for samples, own in zip(audio, fields, strict=True):
        assert {*own} == {*names}
        assert own[names[0]].dtype == torch.float32
        assert np.array_equal(own[names[0]].numpy(), samples)
        assert int(own[names[1]]) == len(samples)


# -- VibeVoice-ASR and NeMo --------------------------------------------------------------------------------------------


class Field(NamedTuple):
    """A spec of audio with options of its config; the ids of an audio, requests, the names of the fields, and the token
    that is written for an audio."""

    spec: ModelSpec
    options: dict[str, Any]
    ids_of: Callable[[Mapping[str, int], int], list[int]]
    requests: st.SearchStrategy[Any]
    names: tuple[str, str]
    mark: str


def vibevoice(ratio: int, **options: Any) -> Field:
    def ids_of(known: Mapping[str, int], samples: int) -> list[int]:
        """One position for each begun `ratio` samples, after one token, and before another one and a newline."""
        positions = max(1, int(np.ceil(samples / ratio)))
        pads = [known["<|box_start|>"]] * positions
        return [known["<|object_ref_start|>"], *pads, known["<|object_ref_end|>"], NEWLINE]

    asked = requests(st.integers(160, 30_000), most=1)
    return Field(VIBEVOICE, options, ids_of, asked, ("raw_audio", "raw_audio_lengths"), "<|AUDIO|>")


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


def nemo(seconds: float | None) -> Field:
    def ids_of(known: Mapping[str, int], samples: int) -> list[int]:
        return [known["<|audio|>"]] * by_hand(samples, seconds)

    asked = requests(st.integers(1, 40_000) | st.integers(1, 2_000), most=3)
    options = {"encoder_chunk_size_seconds": seconds}
    return Field(NEMO_SALM, options, ids_of, asked, ("audio_signal", "audio_signal_length"), "<|audio|>")


FIELDS = {
    "VibeVoice": vibevoice(3200),
    "VibeVoice of 320 samples": vibevoice(320, speech_tok_compress_ratio=320),
    "NeMo": nemo(None),
    "NeMo in chunks": nemo(0.1),
    **{f"NeMo in chunks of {seconds} s": nemo(seconds) for seconds in (0.001, 0.05, 1.0)},
}
PLANS = {name: bound(own.spec, **own.options) for name, own in FIELDS.items()}
REQUESTS = st.sampled_from([*FIELDS]).flatmap(lambda name: st.tuples(st.just(name), FIELDS[name].requests))


@settings(max_examples=800)
@given(REQUESTS)
def test_audio_as_by_hand(drawn: Any) -> None:
    name, (texts, lengths) = drawn
    own, audio = FIELDS[name], [*map(noise, lengths)]
    written = [own.ids_of(VOCABULARY, n) for n in lengths]
    same_fields(audio, fields_of(PLANS[name], texts, audio, [AUDIO], written), own.names)


def test_vibevoice_refuses_what_its_encoder_leaves_out() -> None:
    """The plugin makes a position of 159 samples, and no row for it."""
    with pytest.raises(InputError, match=r"vibevoice\.audio: expected 160 samples or more, got 159"):
        PLANS["VibeVoice"].expand([AUDIO], {"audio": [noise(159)]})


# -- ChatTS ------------------------------------------------------------------------------------------------------------

TOKEN, PATCH = 5, 4
CHATTS_PLAN = bound(CHATTS, ts_token_start_index=TOKEN, ts={"max_sequence_length": 40, "patch_size": PATCH})
NUMBERS = st.lists(st.integers(-40, 40), min_size=1, max_size=40)
SERIES = st.builds(lambda numbers, level: np.array(numbers) * level, NUMBERS, st.sampled_from([0.25, 1, 40, 1e4]))


def of_chatts(series: np.ndarray) -> tuple[list[int], np.ndarray]:
    """The ids of one series, and its values with the mask."""
    mean = np.mean(series)
    values, scale = series - mean, 1.0
    if np.any(np.abs(values) >= 3.0):
        scale = np.max(np.abs(values)) / 3.0
        values = values / scale
    text = Special().encode(f"[Offset: {-mean:.4f}|Scaled by: {scale:.4f}]", add_special_tokens=False)
    encoded = np.stack([values, np.ones_like(values)], axis=1).reshape(-1, 1).astype(np.float32)
    return [*text, *[TOKEN] * -(-len(series) // PATCH)], encoded


@settings(max_examples=400)
@given(requests(SERIES, most=4))
def test_chatts_as_by_hand(request: Any) -> None:
    texts, series = request
    by_hand = [of_chatts(one) for one in series]
    fields = fields_of(CHATTS_PLAN, texts, series, [TOKEN, TOKEN + 1], [ids for ids, _ in by_hand])
    for (_, encoded), own in zip(by_hand, fields, strict=True):
        assert own["timeseries"].dtype == torch.float32
        np.testing.assert_allclose(own["timeseries"].numpy(), encoded, rtol=1e-6, atol=1e-7)
