"""NeMo's speech language models, a plugin of NVIDIA outside vLLM: raw audio of any length, encoded in chunks.

A frame per 160 samples, and three convolutions that halve them: one position per eight frames of a chunk.
"""

from mmkit import (
    Audio,
    Modality,
    ModelSpec,
    batched,
    ceil_div,
    cfg,
    derived,
    identity,
    item,
    maximum,
    where,
)

RATE = 16_000
HOP = 160
FRAMES = 8
LONGEST = 60 * 60
LEAST = 2 * HOP  # of a chunk


def rows_of_chunk(length):
    """Return the positions of a chunk of samples."""
    return maximum(1, ceil_div(length // HOP, FRAMES))


SECONDS = cfg.encoder_chunk_size_seconds
CHUNK = maximum(LEAST, round(SECONDS * RATE))
COUNT = maximum(1, item.length // CHUNK)
REMAINDER = item.length - COUNT * CHUNK
# the last chunk takes a remainder that is too short for a chunk
LAST = where(
    REMAINDER >= LEAST,
    rows_of_chunk(CHUNK) + rows_of_chunk(REMAINDER),
    rows_of_chunk(CHUNK + REMAINDER),
)
ROWS_OF_CHUNKS = (COUNT - 1) * rows_of_chunk(CHUNK) + LAST

NEMO_SALM = ModelSpec(
    "nemo_salm",
    Modality(
        "audio",
        item=Audio(largest=LONGEST * RATE, rate=RATE),
        placeholder="<|audio|>",
        tokens=where(SECONDS, ROWS_OF_CHUNKS, rows_of_chunk(item.length)),
        fields={
            "audio_signal": batched(dtype="float32"),
            "audio_signal_length": derived(item.length, dtype="int64"),
        },
        process=identity(),
    ),
)
