"""What the chat of a server and that of a trainer share: the parts of a message, and the items of a
conversation as the data of one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError

TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""The types of the parts that are texts, each with the key of its text."""

PARTS = (
    *TEXT_PARTS,
    "input_image",
    "image_url",
    "image_pil",
    "audio_url",
    "input_audio",
    "video_url",
    "tool_reference",
    "vision_chunk",
)
"""The types of vLLM's own parts, but for those that end in ``_embeds``."""


def gather_items(where: str, field: str, values: Sequence[Any]) -> Any:
    """Return the items of one modality as the data of a request: a list of items, or, where each
    part has precomputed embeddings, a dict of lists, field by field.

    Args:
        where: the modality, for messages.
        field: the name of the embeddings.
        values: what each part of the conversation has.

    Raises:
        InputError: embeddings beside items, or beside other fields in each part.
    """
    embeds = [isinstance(value, Mapping) and field in value for value in values]
    if not any(embeds):
        return list(values)
    names = {*map(frozenset, values)} if all(embeds) else set()
    if len(names) != 1:
        raise InputError(where, f"{field} in all parts, with the same fields", "others as well")
    return {key: [value[key] for value in values] for key in values[0]}
