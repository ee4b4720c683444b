"""NeMo's speech language models, a plugin of NVIDIA outside vLLM: raw audio of any length, encoded in chunks.

A frame per 160 samples, and three convolutions that halve them: one position per eight frames of a chunk.
"""

from collections.abc import Sequence
from math import ceil
from typing import Any

import torch

from mmkit import Audio, Modality, ModelSpec, Scope, batched, cfg, derived, item, later

RATE = 16_000
HOP = 160
FRAMES = 8
LONGEST = 60 * 60
LEAST = 2 * HOP  # of a chunk


@later
def rows(length: int, seconds: float | None) -> int:
    """Return the positions of audio of a length; its last chunk takes a remainder that is too short for a chunk."""
    if not seconds:
        return rows_of_chunk(length)
    size = max(LEAST, round(seconds * RATE))
    count = max(1, length // size)
    remainder = length - count * size
    if remainder >= LEAST:
        return count * rows_of_chunk(size) + rows_of_chunk(remainder)
    return (count - 1) * rows_of_chunk(size) + rows_of_chunk(size + remainder)


def rows_of_chunk(length: int) -> int:
    """Return the positions of a chunk of samples."""
    return max(1, ceil(length // HOP / FRAMES))


def raw(items: Sequence[Any], scope: Scope) -> dict[str, Any]:
    """Return the samples of audio as tensors."""
    return {"audio_signal": [torch.from_numpy(samples) for samples in items]}


NEMO_SALM = ModelSpec(
    "nemo_salm",
    Modality(
        "audio",
        item=Audio(largest=LONGEST * RATE, rate=RATE),
        placeholder="<|audio|>",
        tokens=rows(item.length, cfg.encoder_chunk_size_seconds),
        fields={
            "audio_signal": batched(dtype="float32"),
            "audio_signal_length": derived(item.length, dtype="int64"),
        },
        process=raw,
    ),
)
