"""Florence-2 (encoder-decoder): image tokens in front of the encoder's prompt; a task token stands for a sentence.

The decoder starts with the end-of-sequence token.
"""

from mmkit import Image, Modality, ModelSpec, Scope, batched, cfg, hf, insert, proc


def task(s: Scope) -> list[int]:
    """The prompt with its task token, as in ``<CAPTION>``, written out as the sentence that it stands for."""
    lead = s.prompt[: s.prompt[:1] == [s.cfg.bos_token_id]]
    body = s.prompt[len(lead) :]
    tail = body[-1:] if body[-1:] == [s.cfg.eos_token_id] else []
    text = s.tok.decode(body[: len(body) - len(tail)])
    return [*lead, *s.tok.text(s.proc._construct_prompts([text])[0]), *tail]


FLORENCE2 = ModelSpec(
    "florence2",
    Modality(
        "image",
        item=Image(largest=(cfg.projection_dim, cfg.projection_dim)),
        placeholder=cfg.pad_token_id,
        tokens=proc.image_seq_length,
        update=insert(at="start"),
        fields={"pixel_values": batched()},
        process=hf(proc.image_processor),
        limit=1,
    ),
    prompt=task,
    decoder_prompt=cfg.eos_token_id,
)
