"""Items in JSON: what a client encodes, and a server decodes within its limits.

====================================================== ===========================================
form                                                   is
====================================================== ===========================================
nested lists, a number                                 the values
``{"data": base64, "dtype": name, "shape": sizes}``    little-endian values in C order
``{"image_url": {"url": ...}}``, ``video_url``,        a media part of vLLM's chat messages, which
``audio_url``                                          vLLM's own loader reads
``"CCO"``                                              a text, where the item is one
``{"gene_ids": ..., "values": ...}``                   a record: its parts, in any of the forms; an
                                                       optional one may be missing, or null
a list of these                                        a list: its elements, in any of the forms
====================================================== ===========================================

The value of a modality is a list of items; or one encoded tensor, which is one item or a batch; or
``{"<modality>_embeds": ...}`` with precomputed embeddings in the same forms, and beside them the
fields that their layout reads. Nothing is unpickled.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Raw, Struct

from ..errors import InputError
from ..language.items import ItemType
from ..language.items.lists import List
from ..language.items.optional import OptionalPart
from ..language.items.pictures import upright_rgb
from ..language.items.tensor import DTYPES, Tensor, Text
from ..language.items.values import check_unicode
from .decoding import decode_fields, decode_json, quote, starts_with
from .limits import Limits, parse_message

if TYPE_CHECKING:
    from ..plan.modality import BoundModality

MEDIA = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
"""The kind of media of each media part of chat messages."""

ITEM_DATA_URL = "data:application/vnd.mmkit.item+json;modality="
"""How the URL of an item begins that stands in an ``image_url`` part, which every gateway passes;
the modality and the JSON of the item in base64 follow."""

MAX_NAME_CHARS = 40
"""Characters of an unknown modality that an error shows."""

MAX_DEPTH = 32
"""Lists in lists of an item, and dimensions of a tensor."""

_COUNTED = {"elements": "numbers", "items": "items"}
"""The limits on the items of a request, and what each counts."""


# -- the client's side -----------------------------------------------------------------------------


def encode(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON of items as a caller writes them into ``multi_modal_data``.

    Arrays and tensors become raw base64, and PIL images PNG data URLs. Lists and texts stay as they
    are. Dicts are encoded part by part.

    Raises:
        InputError: a value has no form on the wire.
    """
    return {name: encode_value(value, f"items.{name}") for name, value in data.items()}


def content_part(modality: str, item: Any, *, as_url: bool = False) -> dict[str, Any]:
    """Return a content part of a chat message with an item, for `/v1/chat/completions`.

    A `uuid` in it names the item for the server's cache.

    Args:
        modality: name of the modality.
        item: as for `encode`; None for an item that a `uuid` names and the server has.
        as_url: whether as a data URL in an ``image_url`` part, for a gateway that passes only the
            parts of OpenAI's chat.

    Raises:
        InputError: as for `encode`.
    """
    if as_url:
        return {"type": "image_url", "image_url": {"url": make_item_url(modality, item)}}
    return {"type": modality, modality: encode_value(item, f"items.{modality}[0]")}


def make_item_url(modality: str, item: Any) -> str:
    """Return an item as a data URL.

    Args:
        modality: name of the modality.
        item: as for `encode`.

    Raises:
        InputError: as for `encode`.
    """
    value = encode_value(item, f"items.{modality}[0]")
    text = base64.b64encode(msgspec.json.encode(value)).decode()
    return f"{ITEM_DATA_URL}{modality};base64,{text}"


def encode_value(value: Any, where: str) -> Any:
    """Return one value as JSON, see `encode`.

    Args:
        value: an item, or a container of items, for example messages.
        where: its path in errors.

    Raises:
        InputError: a value has no form on the wire.
    """
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return _encode_array(value, where)
    if hasattr(value, "getbands"):
        return _encode_picture(value, where)
    if isinstance(value, (list, tuple)):
        return [encode_value(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: encode_value(part, f"{where}.{key}") for key, part in value.items()}
    if isinstance(value, str):
        check_unicode(value, where)
        return value
    if value is None or type(value) in (bool, int, float):
        return value
    raise InputError(where, "texts, lists, arrays, tensors or images", f"a {type(value).__name__}")


def _encode_array(values: Any, where: str) -> dict[str, Any]:
    """Return a tensor or an array as its little-endian values in C order."""
    dtype = getattr(values.dtype, "name", str(values.dtype).removeprefix("torch."))
    if dtype not in DTYPES:
        raise InputError(where, f"a dtype among {', '.join(DTYPES)}", dtype)
    if dtype == "bfloat16":  # which numpy lacks
        values = values.view(torch.int16)
    if isinstance(values, torch.Tensor):
        array = values.numpy(force=True)
    else:
        array = np.asarray(values)
    little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
    data = base64.b64encode(little_endian.tobytes()).decode()
    return {"data": data, "dtype": dtype, "shape": list(array.shape)}


def _encode_picture(picture: Any, where: str) -> dict[str, Any]:
    """Return a PIL image as a media part with a data URL."""
    buffer = io.BytesIO()
    upright_rgb(picture, where).save(buffer, "PNG")
    text = base64.b64encode(buffer.getvalue()).decode()
    return {"image_url": {"url": f"data:image/png;base64,{text}"}}


# -- the server's side -----------------------------------------------------------------------------


def parse_item_url(
    url: str, modalities: Collection[str], where: str, limits: Limits
) -> tuple[str, Raw]:
    """Return the modality of an item in a URL, and its JSON.

    Args:
        url: begins with `ITEM_DATA_URL`.
        modalities: those that it may name.
        where: its path in errors.
        limits: on the size of the JSON.

    Raises:
        InputError: another modality, or no base64.
        TooLarge: the JSON is beyond a limit.
    """
    name, _, content = url.removeprefix(ITEM_DATA_URL).partition(";base64,")
    if name not in modalities:
        expected = f"one of {', '.join(modalities)} as the modality of a URL"
        raise InputError(where, expected, repr(name[:MAX_NAME_CHARS]))
    try:
        item = base64.b64decode(content, validate=True)
    except ValueError:
        raise InputError(where, "base64 in the URL of an item", "another text") from None
    return name, parse_message(Raw, item, where, limits)


class Media(Struct, frozen=True):
    """A media part of a chat message that is still to be loaded.

    Attributes:
        kind: image, video or audio.
        url: its address; a data URL holds the part itself.
    """

    kind: str
    url: str


class MediaPart(NamedTuple):
    """A media part among decoded items.

    Attributes:
        holder: the list or the dict that has the media, and is to get what is loaded.
        key: where it has it: an index or a name.
        media: the media.
        where: its path in errors.
    """

    holder: Any
    key: Any
    media: Media
    where: str


def find_media(holder: Any, key: Any, where: str) -> list[MediaPart]:
    """Return the media parts of a value that was decoded, in order.

    It looks at each number of a nested list, so that large items are for a thread.

    Args:
        holder: a list or a dict with the value.
        key: where it has the value.
        where: the path of the value in errors.
    """
    value = holder[key]
    if isinstance(value, Media):
        return [MediaPart(holder, key, value, where)]
    parts: list[MediaPart] = []
    if isinstance(value, dict):
        for name, part in value.items():
            if isinstance(part, (Media, dict, list)):
                parts += find_media(value, name, f"{where}.{name}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            if isinstance(part, (Media, dict, list)):
                parts += find_media(value, number, f"{where}[{number}]")
    return parts


class _Url(Struct):
    """The value of a media part."""

    url: str


_OBJECT_FIELDS: dict[str, Any] = {
    "data": bytearray,
    "dtype": str,
    "shape": list[int],
    "type": str,
    "image_url": _Url,
    "video_url": _Url,
    "audio_url": _Url,
}
"""The fields of an item that is an object. Which of the forms it has is checked after decoding."""

_OBJECT_FORMS = (
    'nested lists of numbers, {"data", "dtype", "shape"}, '
    'or one of {"image_url"}, {"video_url"}, {"audio_url"}'
)
"""The forms of an item, as errors name them."""

# The type of nested lists of numbers. Each step allows one more level of lists.
_NUMBERS: Any = int | float | bool
for _ in range(MAX_DEPTH):
    _NUMBERS = int | float | bool | list[_NUMBERS]


class Decoder:
    """Decodes the items of one request, and counts what they hold.

    Media become `Media`.

    The methods take the JSON of a value, its path in errors, the item type, and the fields of
    precomputed embeddings, that of the rows first (`list_embeds_fields`). They raise `InputError`
    with the path of what is malformed, and `TooLarge`.

    Args:
        limits: what the items may hold together.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._remaining = {"elements": limits.elements, "items": limits.items}

    def decode_items(
        self, raw: Raw, where: str, item_type: ItemType, embeds_fields: Sequence[str]
    ) -> Any:
        """Return the value of a modality in ``multi_modal_data``."""
        if starts_with(raw, b"["):
            return self._decode_list(raw, where, item_type)
        is_text = isinstance(item_type, Text) and starts_with(raw, b'"')
        if not is_text and not starts_with(raw, b"{"):
            got = bytes(memoryview(raw)[:40]).decode(errors="replace")
            raise InputError(where, "a list of items, or one encoded tensor", got)
        item = self.decode_item(raw, where, item_type, embeds_fields)
        # A tensor may be a batch, whose items the spec counts; so may media, once it is loaded.
        if isinstance(item, (torch.Tensor, Media)):
            return item
        if isinstance(item, dict) and embeds_fields[0] in item:
            return item
        return [item]

    def decode_item(
        self, raw: Raw, where: str, item_type: ItemType, embeds_fields: Sequence[str]
    ) -> Any:
        """Return one item by itself, or the fields of one precomputed embedding."""
        if starts_with(raw, b"{") and embeds_fields[0] in decode_json(dict[str, Raw], raw, where):
            return self._decode_embeds(raw, where, embeds_fields)
        self._spend("items", 1, where)
        return self._decode_value(raw, where, item_type)

    def _decode_list(self, raw: Raw, where: str, item_type: ItemType | None) -> list[Any]:
        elements = decode_json(list[Raw], raw, where)
        self._spend("items", len(elements), where)
        items = []
        for number, element in enumerate(elements):
            items.append(self._decode_value(element, f"{where}[{number}]", item_type))
        return items

    def _decode_embeds(self, raw: Raw, where: str, names: Sequence[str]) -> dict[str, Any]:
        """Return the fields of precomputed embeddings: tensors, or lists of numbers or tensors."""
        fields = decode_fields(raw, dict.fromkeys(names, Raw), where)
        values = {}
        for name, value in fields.items():
            values[name] = self._decode_rows(value, f"{where}.{name}")
        return values

    def _decode_rows(self, raw: Raw, where: str) -> Any:
        """Return the value of one field of precomputed embeddings."""
        if starts_with(raw, b"["):
            return self._decode_list(raw, where, None)
        if not starts_with(raw, b"{"):
            got = bytes(memoryview(raw)[:40]).decode(errors="replace")
            raise InputError(where, "a list of items, or one encoded tensor", got)
        self._spend("items", 1, where)
        return self._decode_object(raw, where, None)

    def _decode_value(self, raw: Raw, where: str, item_type: ItemType | None) -> Any:
        """Return an item, a part of an item, or numbers where there is no item type.

        A tensor as nested lists stays lists: the parser of items converts them.
        """
        if starts_with(raw, b"n"):  # null: an item that its uuid names, or a part that is absent
            return decode_json(None, raw, where)
        if isinstance(item_type, OptionalPart):
            item_type = item_type.item
        if isinstance(item_type, Text):
            return decode_json(str, raw, where)
        if item_type is not None:
            if item_type.vllm_modality and starts_with(raw, b'"'):
                part = f"{item_type.vllm_modality}_url"
                expected = f'an object {{"{part}": {{"url": "data:..."}}}}'
                raise InputError(where, expected, "a text")
            if item_type.parts:
                return self._decode_record(raw, where, item_type.parts)
        if isinstance(item_type, List):
            return self._decode_elements(raw, where, item_type)
        if starts_with(raw, b"{"):
            return self._decode_object(raw, where, item_type)
        self._spend("elements", bytes(raw).count(b",") + 1, where)
        return decode_json(_NUMBERS, raw, where)

    def _decode_record(self, raw: Raw, where: str, parts: Mapping[str, ItemType]) -> dict[str, Any]:
        fields = decode_fields(raw, dict.fromkeys(parts, Raw), where, nullable=False)
        record = {}
        for name, value in fields.items():
            record[name] = self._decode_value(value, f"{where}.{name}", parts[name])
        return record

    def _decode_elements(self, raw: Raw, where: str, item_type: List) -> Any:
        """Return the elements of a list, or one tensor whose first dimension counts them."""
        if isinstance(item_type.element, Tensor) and starts_with(raw, b"{"):
            return self._decode_object(raw, where, item_type.element)
        elements = decode_json(list[Raw], raw, where)
        self._spend("elements", len(elements), where)
        values = []
        for position, element in enumerate(elements):
            path = f"{where}[{position}]"
            values.append(self._decode_value(element, path, item_type.element))
        return values

    def _decode_object(self, raw: Raw, where: str, item_type: ItemType | None) -> Any:
        """Return a tensor, or a media part."""
        fields = decode_fields(raw, _OBJECT_FIELDS, where)
        names = sorted(fields)
        if names == ["data", "dtype", "shape"]:
            return self._decode_tensor(where, fields["data"], fields["dtype"], fields["shape"])
        fields.pop("type", None)  # clients copy media parts from chat messages, which have a type
        part = next(iter(fields), "")
        if part in MEDIA and len(fields) == 1:
            if item_type is None:
                raise InputError(where, "numbers", f"a part of kind {MEDIA[part]}")
            if item_type.vllm_modality not in (None, MEDIA[part]):
                raise InputError(where, item_type.expected, f"a part of kind {MEDIA[part]}")
            return Media(MEDIA[part], fields[part].url)
        raise InputError(where, _OBJECT_FORMS, f"an object with {names}")

    def _decode_tensor(
        self, where: str, data: bytearray, dtype_name: str, shape: list[int]
    ) -> torch.Tensor:
        """Return the tensor of these bytes, which share its memory."""
        dtype = DTYPES.get(dtype_name)
        if dtype is None:
            raise InputError(f"{where}.dtype", f"one of {', '.join(DTYPES)}", quote(dtype_name))
        if len(shape) > MAX_DEPTH or min(shape, default=0) < 0:
            raise InputError(f"{where}.shape", "a list of sizes", quote(str(shape))[1:-1])
        # A size of 0 does not make the others small: torch multiplies all of them.
        sizes_at_least_one = [max(size, 1) for size in shape]
        self._spend("elements", math.prod(sizes_at_least_one), where)
        num_bytes = math.prod(shape) * dtype.itemsize
        if len(data) != num_bytes:
            expected = f"{num_bytes} bytes for shape {tuple(shape)} of {dtype_name}"
            raise InputError(f"{where}.data", expected, f"{len(data)}")
        if not data:
            return torch.zeros(shape, dtype=dtype)
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        if dtype == torch.bool:
            largest = int(tensor.max())
            if largest > 1:
                raise InputError(f"{where}.data", "bytes 0 and 1 for bool", str(largest))
        return tensor.view(dtype).reshape(shape)

    def _spend(self, limit: str, count: int, where: str) -> None:
        """Count what one more value holds.

        Raises:
            TooLarge: the items of the request are beyond the limit together.
        """
        self._remaining[limit] -= count
        if self._remaining[limit] < 0:
            raise self._limits.make_error(where, limit, f"{_COUNTED[limit]} in one request")


def list_embeds_fields(modality: BoundModality) -> list[str]:
    """Return the fields of precomputed embeddings, the field of the rows first."""
    return [modality.parser.embeds_field, *modality.parser.companions]
