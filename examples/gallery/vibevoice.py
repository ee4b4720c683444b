"""VibeVoice-ASR, a plugin of Microsoft outside vLLM: raw audio, a position per 3,200 samples between two tokens.

The encoder makes nothing of less than 160 samples, which its own processor lets through.
"""

from mmkit import (
    Audio,
    Modality,
    ModelSpec,
    batched,
    ceil_div,
    cfg,
    derived,
    embed,
    identity,
    item,
    literal,
    replace,
    tok,
)

RATE = 24_000
LONGEST = 61 * 60
NEWLINE = 198  # of every tokenizer of Qwen2
SAMPLES_PER_POSITION = cfg.get("speech_tok_compress_ratio", 3200)

VIBEVOICE = ModelSpec(
    "vibevoice",
    Modality(
        "audio",
        item=Audio(largest=LONGEST * RATE, rate=RATE, least=160),
        layout=tok["<|object_ref_start|>"]
        + embed(tok["<|box_start|>"]) * ceil_div(item.length, SAMPLES_PER_POSITION)
        + tok["<|object_ref_end|>"]
        + literal(NEWLINE),
        update=replace(tok["<|AUDIO|>"]),
        fields={"raw_audio": batched(dtype="float32"), "raw_audio_lengths": derived(item.length, dtype="int64")},
        process=identity(),
        limit=1,
    ),
    tokenization_kwargs={"add_special_tokens": False},
)
