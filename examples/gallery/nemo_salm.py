"""NeMo's speech language models, a plugin of NVIDIA outside vLLM: raw audio of any length, encoded in chunks.

A frame per 160 samples, and three convolutions that halve them: one position per eight frames of a chunk.
"""

from collections.abc import Sequence
from typing import Any

import torch

from mmkit import Audio, Modality, ModelSpec, Scope, batched, cfg, derived, item, later

RATE, HOP, FRAMES = 16_000, 160, 8
LONGEST = 60 * 60
LEAST = 2 * HOP  # of a chunk


@later
def rows(length: int, seconds: float | None) -> int:
    """The last chunk takes a rest that is too short for one of its own."""
    size = max(LEAST, round(seconds * RATE)) if seconds else length
    chunks = [min(size, length - begin) for begin in range(0, length, size)]
    if len(chunks) > 1 and chunks[-1] < LEAST:
        chunks[-2:] = [sum(chunks[-2:])]
    return sum(max(1, -(-(chunk // HOP) // FRAMES)) for chunk in chunks)


def raw(items: Sequence[Any], scope: Scope) -> dict[str, Any]:
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
