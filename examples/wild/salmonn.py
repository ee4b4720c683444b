"""SALMONN hears speech, sounds and music by two encoders, Whisper and BEATs, and answers questions about them.

Source: https://github.com/bytedance/SALMONN, branch salmonn at a58bba7, paper arXiv 2310.13289, Apache 2.0.

Less than a second is padded, and what is longer than 30 seconds is cut off. The rows of both encoders stand side by
side, and a Q-Former makes a row of each window: the number of rows is always the same.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import WhisperFeatureExtractor

from mmkit import Audio, Modality, ModelSpec, Scope, batched, cfg, embed, replace, tok

RATE = 16_000
FRAMES_PER_SECOND = 50
"""Of Whisper's encoder."""


@cache
def make_extractor(bins: int, seconds: int) -> Any:
    """Return Whisper's extractor of spectrograms."""
    return WhisperFeatureExtractor(feature_size=bins, sampling_rate=RATE, chunk_length=seconds)


def hear(items: Sequence[np.ndarray], scope: Scope) -> dict[str, list[torch.Tensor]]:
    """Return the samples of each sound, at least a second and at most what Whisper hears, and their spectrogram."""
    columns: dict[str, list[torch.Tensor]] = {"raw_wav": [], "spectrogram": []}
    extractor = make_extractor(scope.cfg.num_mel_bins, scope.cfg.max_seconds)
    for samples in items:
        missing = max(0, RATE - len(samples))
        cut = np.pad(samples, (0, missing))[: RATE * scope.cfg.max_seconds]
        spectrogram = extractor(cut, sampling_rate=RATE, return_tensors="pt").input_features
        columns["raw_wav"].append(torch.from_numpy(cut))
        columns["spectrogram"].append(spectrogram[0])
    return columns


def count_rows(scope: Scope) -> int:
    """Return the windows over the frames, times the queries for each."""
    frames = FRAMES_PER_SECOND * scope.cfg.max_seconds
    kernel = round(FRAMES_PER_SECOND * scope.cfg.second_per_window)
    stride = round(FRAMES_PER_SECOND * scope.cfg.second_stride)
    windows = (frames - kernel) // stride + 1
    rows: int = windows * scope.cfg.num_speech_query_token
    return rows


SALMONN = ModelSpec(
    "salmonn",
    Modality(
        "speech",
        item=Audio(largest=RATE * cfg.max_upload_seconds, rate=RATE),
        process=hear,
        fields={"raw_wav": batched(dtype="float32"), "spectrogram": batched(dtype="float32")},
        layout=embed(tok[cfg.speech_token]) * count_rows,
        update=replace(tok["<SpeechHere>"]),
        limit=1,
    ),
)
