"""Whisper (encoder-decoder): the encoder gets nothing but audio, so a caller's prompt is the decoder's."""

from mmkit import Audio, Modality, ModelSpec, batched, cfg, ending_with, hf, literal, proc

EXTRACTOR = proc.feature_extractor
WINDOW = EXTRACTOR.chunk_length * EXTRACTOR.sampling_rate

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
    prompt=literal(0),
    decoder_prompt=ending_with(),
    tokenization_kwargs={"add_special_tokens": False},
)
