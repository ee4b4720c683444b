"""VibeVoice-ASR, a plugin of Microsoft outside vLLM: raw audio, a position per 3,200 samples between two tokens.

The encoder makes nothing of less than 160 samples, which its own processor lets through.
"""

from collections.abc import Sequence
from typing import Any

import torch

from mmkit import (
    Audio,
    InputError,
    Modality,
    ModelSpec,
    Scope,
    batched,
    ceil_div,
    derived,
    embed,
    item,
    literal,
    replace,
    tok,
)

RATE = 24_000
LONGEST = 61 * 60
LEAST = 160
NEWLINE = 198  # of every tokenizer of Qwen2


def ratio(scope: Scope) -> int:
    """Return the samples of a position."""
    return getattr(scope.cfg, "speech_tok_compress_ratio", 3200)


def raw(items: Sequence[Any], scope: Scope) -> dict[str, Any]:
    """Return the samples of audio as tensors."""
    for samples in items:
        if len(samples) < LEAST:
            raise InputError("vibevoice.audio", f"{LEAST} samples or more", f"{len(samples)}")
    return {"raw_audio": [torch.from_numpy(samples) for samples in items]}


VIBEVOICE = ModelSpec(
    "vibevoice",
    Modality(
        "audio",
        item=Audio(largest=LONGEST * RATE, rate=RATE),
        layout=tok["<|object_ref_start|>"]
        + embed(tok["<|box_start|>"]) * ceil_div(item.length, ratio)
        + tok["<|object_ref_end|>"]
        + literal(NEWLINE),
        update=replace(tok["<|AUDIO|>"]),
        fields={"raw_audio": batched(dtype="float32"), "raw_audio_lengths": derived(item.length, dtype="int64")},
        process=raw,
        limit=1,
    ),
    tokenization_kwargs={"add_special_tokens": False},
)
