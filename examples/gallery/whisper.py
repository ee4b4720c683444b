"""Whisper (encoder-decoder): the encoder gets nothing but audio, so a caller's prompt is the decoder's."""

from mmkit import Audio, Modality, ModelSpec, batched, cfg, hf, proc

extractor = proc.feature_extractor
window = extractor.chunk_length * extractor.sampling_rate

WHISPER = ModelSpec(
    "whisper",
    Modality(
        "audio",
        item=Audio(largest=window, rate=extractor.sampling_rate, most=window),
        placeholder=0,
        tokens=cfg.max_source_positions,
        fields={"input_features": batched()},
        process=hf(extractor, inputs={"audios": "raw_speech"}, kwargs={"sampling_rate": extractor.sampling_rate}),
        limit=1,
    ),
    prompt=lambda s: [0],
    decoder_prompt=lambda s: s.prompt,
    tokenization_kwargs={"add_special_tokens": False},
)
