"""Whisper (encoder-decoder): the encoder gets nothing but audio, so a caller's prompt is the decoder's."""

from mmkit import Audio, Modality, ModelSpec, Scope, batched, cfg, hf, proc

EXTRACTOR = proc.feature_extractor
WINDOW = EXTRACTOR.chunk_length * EXTRACTOR.sampling_rate


def encoder_prompt(scope: Scope) -> list[int]:
    """Return the encoder's prompt: the placeholder of the audio."""
    return [0]


def callers_prompt(scope: Scope) -> list[int]:
    """Return the prompt of the caller."""
    return scope.prompt


WHISPER = ModelSpec(
    "whisper",
    Modality(
        "audio",
        item=Audio(largest=WINDOW, rate=EXTRACTOR.sampling_rate, most=WINDOW),
        placeholder=0,
        tokens=cfg.max_source_positions,
        fields={"input_features": batched()},
        process=hf(EXTRACTOR, inputs={"audios": "raw_speech"}, kwargs={"sampling_rate": EXTRACTOR.sampling_rate}),
        limit=1,
    ),
    prompt=encoder_prompt,
    decoder_prompt=callers_prompt,
    tokenization_kwargs={"add_special_tokens": False},
)
