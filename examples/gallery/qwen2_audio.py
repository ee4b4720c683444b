"""Qwen2-Audio: audio of one length, cut or padded; one position per four frames of the spectrogram that are audio."""

import torch

from mmkit import Audio, Modality, ModelSpec, batched, embed, fields, hf, item, later, proc, replace

EXTRACTOR = proc.feature_extractor
AUDIO = embed(proc.audio_token_id)


@later
def positions(mask: torch.Tensor) -> int:
    """Of a mask of frames: a convolution halves them and rounds up, pooling halves the rest and rounds down."""
    return (int(mask.sum()) + 1) // 2 // 2


QWEN2_AUDIO = ModelSpec(
    "qwen2_audio",
    Modality(
        "audio",
        item=Audio(largest=EXTRACTOR.chunk_length * EXTRACTOR.sampling_rate, rate=EXTRACTOR.sampling_rate),
        layout=AUDIO * positions(fields.feature_attention_mask),
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
