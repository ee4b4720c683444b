"""Ultravox: audio in chunks of the encoder's window, one position per stack of its rows.

Audio is processed one by one: of several, the processor pads the shorter ones, which changes their features.
"""

from typing import Any

from mmkit import Audio, Modality, ModelSpec, batched, cfg, embed, fields, flat, hf, item, later, proc, replace, tok

EXTRACTOR, CHUNKS = proc.audio_processor, fields.audio_num_chunks
AUDIO = embed(cfg.audio_token_index)
OPTIONS: dict[str, Any] = {"sampling_rate": EXTRACTOR.sampling_rate, "include_audio_num_chunks": True}

ULTRAVOX = ModelSpec(
    "ultravox",
    Modality(
        "audio",
        item=Audio(largest=16 * EXTRACTOR.chunk_length * EXTRACTOR.sampling_rate, rate=EXTRACTOR.sampling_rate),
        layout=AUDIO * later(sum)(fields.audio_token_len),
        update=replace(tok.text("<|audio|>")),
        fields={
            "audio_features": flat(CHUNKS),
            "audio_token_len": flat(CHUNKS),
            "audio_lens": flat(CHUNKS, keep_on_cpu=True),
            "audio_num_chunks": batched(keep_on_cpu=True),
        },
        process=hf(
            inputs={"audios": "audios"}, outputs={"audio_values": "audio_features"}, kwargs=OPTIONS, one_by_one=True
        ),
        embeds=AUDIO * item.rows,
    ),
    tokenization_kwargs={"add_special_tokens": False},
)
