"""Ultravox: audio in chunks of the encoder's window, one position per stack of its rows.

Audio is processed one by one: of several, the processor pads the shorter ones, which changes their features.
"""

from typing import Any

from mmkit import Audio, Modality, ModelSpec, batched, cfg, embed, fields, flat, hf, item, later, proc, replace, tok

extractor, chunks = proc.audio_processor, fields.audio_num_chunks
audio = embed(cfg.audio_token_index)
fixed: dict[str, Any] = {"sampling_rate": extractor.sampling_rate, "include_audio_num_chunks": True}

ULTRAVOX = ModelSpec(
    "ultravox",
    Modality(
        "audio",
        item=Audio(largest=16 * extractor.chunk_length * extractor.sampling_rate, rate=extractor.sampling_rate),
        layout=audio * later(sum)(fields.audio_token_len),
        update=replace(tok.text("<|audio|>")),
        fields={
            "audio_features": flat(chunks),
            "audio_token_len": flat(chunks),
            "audio_lens": flat(chunks, keep_on_cpu=True),
            "audio_num_chunks": batched(keep_on_cpu=True),
        },
        process=hf(
            inputs={"audios": "audios"}, outputs={"audio_values": "audio_features"}, kwargs=fixed, one_by_one=True
        ),
        embeds=audio * item.rows,
    ),
    tokenization_kwargs={"add_special_tokens": False},
)
