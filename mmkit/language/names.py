"""Names that a spec cannot give to a modality or a field.

Something else has them where the modality or the field is used. The trainer's batch holds the
prompt and the fields side by side, a call of the trainer's processor takes its options and the
items side by side, and vLLM passes the fields of a model without placeholders beside its own
arguments to `forward`. In each of these places a name must tell whose value it is.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence

from .messages import PARTS

PROMPT_KEYS = ("input_ids", "attention_mask", "mm_token_type_ids", "placeholders")
"""The keys of a prompt in the trainer's batch."""

BATCH_KEYS = PROMPT_KEYS + ("decoder_input_ids", "decoder_attention_mask", "labels")
"""All keys of the trainer's batch that are no fields."""

LANGUAGE_MODEL_ARGUMENTS = (
    "position_ids",
    "inputs_embeds",
    "past_key_values",
    "cache_position",
    "use_cache",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "decoder_inputs_embeds",
    "encoder_outputs",
)
"""What transformers passes to a language model beside a batch."""

FORWARD_ARGUMENTS = ("input_ids", "positions", "intermediate_tensors", "inputs_embeds")
"""The arguments that vLLM passes to every `forward`."""

CALL_ARGUMENTS = (
    "text",
    "input_ids",
    "add_special_tokens",
    "padding",
    "truncation",
    "max_length",
    "padding_side",
    "pad_to_multiple_of",
    "return_tensors",
)
"""The arguments of the trainer's processor beside the items."""

SAMPLE_KEYS = ("text", "input_ids", "answer")
"""The keys of a sample of the trainer's collator beside the items."""

MODEL_METHODS = ("multimodal", "input_ids")
"""What vLLM's models embed, by a method ``embed_<name>`` each."""


PART_KEYS = ("type", "uuid")
"""The keys of a part of a message beside its item."""


_OWNERS_OF_MODALITY_NAMES: Mapping[str, Sequence[str]] = {
    "an argument of the trainer's processor": CALL_ARGUMENTS,
    "a key of a sample of the trainer's collator": SAMPLE_KEYS,
    "a part of vLLM's chat messages": PARTS,
    "a key of a part of a message": PART_KEYS,
    "what vLLM's models embed": MODEL_METHODS,
}

_OWNERS_OF_FIELD_NAMES: Mapping[str, Sequence[str]] = {
    "a key of the trainer's batch": BATCH_KEYS,
    "an argument of the language model": LANGUAGE_MODEL_ARGUMENTS,
}

_OWNERS_OF_RAW_FIELD_NAMES: Mapping[str, Sequence[str]] = {
    "an argument of the model's forward": FORWARD_ARGUMENTS,
}


def find_owner_of_modality_name(name: str) -> str | None:
    """Return what has the name of a modality already, in words; None where the name is free."""
    if name.endswith("_embeds"):
        return "a name of precomputed embeddings"
    return _find_owner(name, _OWNERS_OF_MODALITY_NAMES)


def find_owner_of_field_name(name: str, *, is_raw: bool) -> str | None:
    """Return what has the name of a field already, in words; None where the name is free.

    Args:
        name: the field's.
        is_raw: whether the items of the modality take no positions. Its fields take the place of
            the prompt, so that only the arguments of `forward` stand beside them.
    """
    if name.startswith("mmkit_"):
        return "a name of mmkit's own fields"
    return _find_owner(name, _OWNERS_OF_RAW_FIELD_NAMES if is_raw else _OWNERS_OF_FIELD_NAMES)


def _find_owner(name: str, owners: Mapping[str, Sequence[str]]) -> str | None:
    # methods receive items and fields by name, which Python must be able to write
    if name == "self":
        return "the first argument of every method"
    if keyword.iskeyword(name):
        return "a keyword of Python"
    for owner, names in owners.items():
        if name in names:
            return owner
    return None
