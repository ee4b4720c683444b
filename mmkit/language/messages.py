"""Chat messages, as servers and trainers read them.

The parts of a message, and the items of a conversation as the data of one request.
"""

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

PARTS = tuple(TEXT_PARTS) + (
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


def gather_items(where: str, embeds_field: str, values: Sequence[Any]) -> Any:
    """Return the items of one modality as the data of a request.

    Args:
        where: the modality, for messages.
        embeds_field: the name of precomputed embeddings.
        values: what each part of the conversation has.

    Returns:
        A list of items; where each part has precomputed embeddings, a dict of lists, field by
        field.

    Raises:
        InputError: embeddings beside items, or beside other fields in each part.
    """
    num_embeddings = 0
    for value in values:
        if isinstance(value, Mapping) and embeds_field in value:
            num_embeddings += 1
    if num_embeddings == 0:
        return list(values)
    expected = f"{embeds_field} in all parts, with the same fields"
    if num_embeddings < len(values):
        raise InputError(where, expected, "others as well")
    for value in values:
        if value.keys() != values[0].keys():
            raise InputError(where, expected, "others as well")
    gathered: dict[str, list[Any]] = {}
    for name in values[0]:
        gathered[name] = [value[name] for value in values]
    return gathered
