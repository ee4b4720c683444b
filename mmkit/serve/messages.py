"""Items in the messages of vLLM's routes: moved out of a body, with references in their place.

Three kinds of bodies have messages: OpenAI's chat, its responses, and Anthropic's
messages. Each has parts with an item, ``{"type": "cloud", "cloud": ...}``, in the forms of
``POST /v1/mm/generate``; or the same as a data URL where the body has the URL of a picture. vLLM
accepts only parts of its own types, so it reads the part of a picture whose URL refers to the item.
"""

from __future__ import annotations

import base64
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
from msgspec import Raw

from ..errors import InputError, relocate
from ..vllm_api.chat import check_type
from ..vllm_api.media import count_pixels_of_image
from ..wire.decoding import starts_with
from ..wire.items import ITEM_DATA_URL, MEDIA, Decoder, list_embeds_fields, parse_item_url
from .state import ServerState

Json = Any
"""A value as `json.loads` gives it."""


class MessageFormat(NamedTuple):
    """How a body has messages.

    Attributes:
        field: the field of the body with messages.
        picture: makes the part of a picture at a URL.
        nested: the field of a part in which there may be further parts, if there is one. vLLM
            reads these in another order than they stand.
        adds_special_tokens_twice: whether vLLM lets the tokenizer add the special tokens (BOS) that
            the chat template has written.
    """

    field: str
    picture: Callable[[str], dict[str, Json]]
    nested: str = ""
    adds_special_tokens_twice: bool = False


def _chat_picture(url: str) -> dict[str, Json]:
    return {"type": "image_url", "image_url": {"url": url}}


def _responses_picture(url: str) -> dict[str, Json]:
    return {"type": "input_image", "image_url": url, "detail": "auto"}


def _anthropic_picture(url: str) -> dict[str, Json]:
    return {"type": "image", "source": {"type": "url", "url": url}}


CHAT = MessageFormat("messages", _chat_picture)
RESPONSES = MessageFormat(
    "input", _responses_picture, nested="output", adds_special_tokens_twice=True
)
ANTHROPIC = MessageFormat("messages", _anthropic_picture, nested="content")

MESSAGE_FORMATS: Mapping[str, MessageFormat] = {
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": CHAT,
    "/v1/chat/completions/render": CHAT,
    "/tokenize": CHAT,
    "/v1/embeddings": CHAT,
    "/pooling": CHAT,
    "/classify": CHAT,
    "/invocations": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/responses/render": RESPONSES,
    "/v1/messages": ANTHROPIC,
    "/v1/messages/count_tokens": ANTHROPIC,
    "/v1/messages/render": ANTHROPIC,
}
"""How the body has messages, by route. On other routes vLLM refuses parts with items."""

MAX_HEADER_CHARS = 2**16
"""Characters of the base64 of a picture in which its size is looked for, before vLLM's loader has
all of it. A multiple of 4, so that the base64 stays whole."""

_VLLM_TYPES = {"input_image": "image", "image": "image", "input_audio": "audio"} | MEDIA
"""The types of vLLM's parts with media, and the kind of media."""


REFERENCE = "mmkit-item:"
"""How the URL begins that stands for an item in what vLLM reads; a random number follows."""


class MovedItem(NamedTuple):
    """An item that was moved out of a message.

    Attributes:
        url: stands for it in the body that vLLM reads.
        modality: its name.
        value: the item, whose media are still to be loaded.
        uuid: its name in the caches, if it has one.
        where: its path in errors.
    """

    url: str
    modality: str
    value: Any
    uuid: str | None
    where: str


class Messages:
    """The messages of one body, whose items are moved out while they are read.

    Args:
        state: the server's.
        message_format: the format of the body.

    Attributes:
        moved_items: the items, in the order in which they stand.
    """

    def __init__(self, state: ServerState, message_format: MessageFormat) -> None:
        self._state = state
        self._format = message_format
        self._decoder = Decoder(state.limits)
        self._counts = Counter[str]()
        self._pixels = 0
        self._is_reordered = False
        self._item_paths: list[dict[str, list[str]]] = []
        self.moved_items: list[MovedItem] = []

    @property
    def item_paths(self) -> list[dict[str, list[str]]]:
        """The paths of all items by modality, media of vLLM's own parts too, for each conversation.

        Empty where vLLM may read the items in another order.
        """
        if self._is_reordered:
            return []
        return self._item_paths

    def move_items_out(self, body: dict[str, Json]) -> None:
        """Put references in place of the items of a body.

        Raises:
            InputError: an item is malformed, or there are too many.
            TooLarge: they are beyond a limit of the server.
        """
        field = self._format.field
        messages: Json = body.get(field)
        if body.get("previous_response_id") is not None:
            self._is_reordered = True  # the items of earlier messages come first
        if _is_batch(messages):
            for number, conversation in enumerate(messages):
                self._begin_conversation()
                messages[number] = self._walk_messages(conversation, f"{field}[{number}]")
        elif field in body:  # a body without messages may be another kind, with a prompt
            self._begin_conversation()
            body[field] = self._walk_messages(messages, field)

    def _begin_conversation(self) -> None:
        self._counts.clear()
        self._item_paths.append(defaultdict(list))

    def _walk_messages(self, messages: Json, where: str) -> Json:
        """Return a conversation with references in place of items; what is no list as it is."""
        if not isinstance(messages, list):
            return messages
        for number, message in enumerate(messages):
            if not isinstance(message, dict):
                continue
            where_of_message = f"{where}[{number}]"
            if "content" in message:
                where_of_content = f"{where_of_message}.content"
                message["content"] = self._walk_parts(message["content"], where_of_content)
            # a result of a tool may be no part of a message
            self._walk_nested(message, where_of_message)
        return messages

    def _walk_parts(self, parts: Json, where: str, *, nested: bool = False) -> Json:
        """Return the parts of a message, or those in a part, with references in place of items."""
        if not isinstance(parts, list):
            return parts
        for number, part in enumerate(parts):
            if not isinstance(part, dict):
                continue
            where_of_part = f"{where}[{number}]"
            if not nested:
                self._walk_nested(part, where_of_part)
            reference = self._convert_part(part, where_of_part)
            if reference is not None:
                parts[number] = reference
        return parts

    def _walk_nested(self, part: dict[str, Json], where: str) -> None:
        """Put references in place of the items in the result of a tool."""
        field = self._format.nested
        if field not in part:
            return
        if "role" in part:  # a message, whose own content `_walk_messages` has walked
            return
        num_items = self._count_items()
        part[field] = self._walk_parts(part[field], f"{where}.{field}", nested=True)
        if self._count_items() != num_items:
            self._is_reordered = True

    def _count_items(self) -> int:
        """Return the number of items and media of this conversation so far."""
        count = 0
        for item_paths in self._item_paths[-1].values():
            count += len(item_paths)
        return count

    def _convert_part(self, part: dict[str, Json], where: str) -> dict[str, Json] | None:
        """Return the reference to the item of a part; None for a part that vLLM reads itself."""
        part_type = part.get("type")
        url = _get_url(part)
        uuid = part.get("uuid")
        if not isinstance(part_type, str):
            part_type = ""  # vLLM refuses it, or finds the type by the fields
        if url.startswith(ITEM_DATA_URL):
            modality, raw = parse_item_url(
                url, self._state.message_modalities, where, self._state.limits
            )
            return self._move_item(modality, raw, uuid, where)
        is_anthropic_image = self._format is ANTHROPIC and part_type == "image" and "source" in part
        if part_type in self._state.message_modalities and not is_anthropic_image:
            if part_type not in part:
                raise InputError(where, f'a field "{part_type}" with the item', "none")
            raw = Raw(msgspec.json.encode(part[part_type]))
            return self._move_item(part_type, raw, uuid, f"{where}.{part_type}")
        if self._format is CHAT and part_type:
            check_type(self._state.plan.spec, part_type, where)
        kind = _VLLM_TYPES.get(part_type)
        if kind is not None:
            self._item_paths[-1][kind].append(where)
        if kind == "image":
            self._count_pixels(part, url, where)
        return None

    def _count_pixels(self, part: dict[str, Json], url: str, where: str) -> None:
        """Refuse pictures that vLLM's loader would refuse after it has decoded those before them.

        The loader decides: here a picture whose size is not in its first bytes counts nothing.
        """
        source = part.get("source")
        content = url.partition(";base64,")[2]
        if isinstance(source, dict) and isinstance(source.get("data"), str):
            content = source["data"]
        try:
            header = base64.b64decode(content[:MAX_HEADER_CHARS])
            self._pixels += count_pixels_of_image(header)
        except ValueError:
            return  # no base64, which vLLM refuses
        if self._pixels > self._state.limits.pixels:
            raise self._state.limits.make_error(where, "pixels", "pixels in one request")

    def _move_item(self, modality: str, raw: Raw, uuid: Json, where: str) -> dict[str, Json]:
        """Decode one more item, and return the part that refers to it.

        Args:
            modality: its name.
            raw: the JSON of the item.
            uuid: its name in the caches; None without one.
            where: its path in errors.
        """
        if starts_with(raw, b"n") and uuid is None:  # null
            raise InputError(where, "an item, or a uuid that names one", "null")
        bound = self._state.plan.modalities[modality]
        self._counts[modality] += 1
        try:
            most_items = self._state.engine.most_items.get(modality)
            bound.parser.check_count(self._counts[modality], most_items)
        except InputError as error:
            raise relocate(error, where) from None
        value = self._decoder.decode_item(raw, where, bound.item, list_embeds_fields(bound))
        url = f"{REFERENCE}{uuid4().hex}"
        if uuid is not None:
            uuid = str(uuid)
        self.moved_items.append(MovedItem(url, modality, value, uuid, where))
        self._item_paths[-1][modality].append(where)
        return self._format.picture(url)


def _is_batch(messages: Json) -> bool:
    """Tell whether messages are several conversations: a list with a list in it."""
    if not isinstance(messages, list):
        return False
    return any(isinstance(conversation, list) for conversation in messages)


def _get_url(part: Mapping[str, Json]) -> str:
    """Return the URL of the picture of a part; empty where it has none."""
    value = part.get("image_url", part.get("source"))
    if isinstance(value, dict):
        value = value.get("url")
    if not isinstance(value, str):
        return ""
    return value
