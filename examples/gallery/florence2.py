"""Florence-2 (encoder-decoder): image tokens in front of the encoder's prompt; a task token stands for a sentence.

The decoder starts with the end-of-sequence token.
"""

from mmkit import Image, Modality, ModelSpec, Scope, batched, cfg, hf, insert, proc


def task(s: Scope) -> list[int]:
    """Return the prompt with its task token, as in ``<CAPTION>``, replaced by the sentence that it stands for."""
    ids = list(s.prompt)
    begin = []
    end = []
    if ids[:1] == [s.cfg.bos_token_id]:
        begin = [ids.pop(0)]
    if ids[-1:] == [s.cfg.eos_token_id]:
        end = [ids.pop()]
    sentence = s.proc._construct_prompts([s.tok.decode(ids)])[0]
    return begin + s.tok.text(sentence) + end


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
