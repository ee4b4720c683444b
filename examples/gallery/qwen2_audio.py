"""Qwen2-Audio: audio of one length, cut or padded; one position per four frames of the spectrogram that are audio."""

from mmkit import Audio, Modality, ModelSpec, batched, ceil_div, embed, hf, item, minimum, proc, replace

EXTRACTOR = proc.feature_extractor
AUDIO = embed(proc.audio_token_id)
FRAMES = minimum(ceil_div(item.length, EXTRACTOR.hop_length), EXTRACTOR.nb_max_frames)

QWEN2_AUDIO = ModelSpec(
    "qwen2_audio",
    Modality(
        "audio",
        item=Audio(largest=EXTRACTOR.chunk_length * EXTRACTOR.sampling_rate, rate=EXTRACTOR.sampling_rate),
        # a convolution halves the frames and rounds up, pooling halves the rest and rounds down
        layout=AUDIO * ((FRAMES + 1) // 2 // 2),
        update=replace(proc.audio_token_id),
        fields={"input_features": batched(), "feature_attention_mask": batched()},
        process=hf(
            EXTRACTOR,
            inputs={"audios": "raw_speech"},
            outputs={"attention_mask": "feature_attention_mask"},
            kwargs={"sampling_rate": EXTRACTOR.sampling_rate, "return_attention_mask": True},
        ),
        embeds=AUDIO * item.rows,
    ),
)
