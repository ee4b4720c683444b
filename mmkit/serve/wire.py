"""What comes in a body, and its weight before anything is built of it: items in JSON.

====================================================== ===========================================
form                                                   is
====================================================== ===========================================
nested lists, a number                                 the values
``{"data": base64, "dtype": name, "shape": sizes}``    little-endian values in C order
``{"image_url": {"url": ...}}``, ``video_url``,        a media part of vLLM's chat messages, which
``audio_url``                                          vLLM's own loader reads
``"CCO"``                                              a text, where the item is one
``{"gene_ids": ..., "values": ...}``                   a record: its parts, in the forms above
====================================================== ===========================================

The value of a modality is a list of items; or one encoded tensor, which is one item or a batch; or
``{"<modality>_embeds": ...}`` with precomputed embeddings in the same forms, and beside them the
fields that their layout reads. Nothing is unpickled.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from msgspec import Raw, Struct

from ..errors import InputError
from ..language.items import ItemType
from ..language.items.pictures import upright_rgb
from ..language.items.tensor import DTYPES, Text
from ..language.layout import Target
from ..plan.parsing import Taken
from .decoding import decode_fields, decode_json, quote, starts_with
from .protocol import Limits, ModalityInfo

if TYPE_CHECKING:
    from ..plan.modality import BoundModality

MEDIA = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
"""The media parts of chat messages, and what they are."""

ITEM_URL = "data:application/vnd.mmkit.item+json;modality="
"""How the URL of an item begins that stands in an ``image_url`` part, which every gateway passes;
the modality and the JSON of the item in base64 follow."""

FORMS = 'nested lists of numbers, {"data", "dtype", "shape"}, or one of ' + ", ".join(
    f'{{"{name}"}}' for name in MEDIA
)
MAX_DEPTH = 32

_UNITS = {"elements": "numbers", "items": "items"}
"""What is counted in one request, by the name of its limit."""
CHUNK_BYTES = 2**16
_WRITTEN_OUT = 32


# -- weights ---------------------------------------------------------------------------------------


def count_values(raw: bytes | bytearray | memoryview) -> int:
    """At least as many values as JSON holds, but one: commas and opening brackets outside of texts.
    A text is one value."""
    count, in_text, rest = 0, 0, b""
    for at in range(0, len(raw), CHUNK_BYTES):
        piece = (rest + raw[at : at + CHUNK_BYTES]).replace(rb"\\", b"")
        rest = piece[-1:] if piece.endswith(b"\\") else b""
        parts = piece.removesuffix(b"\\").replace(rb"\"", b"").split(b'"')
        outside = b"".join(parts[in_text::2])
        count += sum(map(outside.count, (b",", b"[", b"{")))
        in_text ^= (len(parts) - 1) % 2
    return count


def check_size(raw: bytes | bytearray | memoryview, where: str, limits: Limits) -> None:
    """Refuse the JSON of a body or a message that is beyond a limit.

    Raises:
        TooLarge: it is.
    """
    if len(raw) > limits.body_bytes:
        raise limits.make_error(where, "body_bytes", "bytes")
    if count_values(raw) > limits.listed:
        raise limits.make_error(where, "listed", "values in JSON")


def parse_message(kind: Any, raw: bytes | bytearray, where: str, limits: Limits) -> Any:
    """A body or a message of some kind, which is weighed before anything is built of it.

    Raises:
        InputError: it is malformed.
        TooLarge: it is beyond a limit.
    """
    check_size(raw, where, limits)
    return decode_json(kind, raw)


class Media(Struct, frozen=True):
    """A media part of a chat message that is still to be loaded.

    Attributes:
        kind: image, video or audio.
        url: its address; a data URL holds the part itself.
    """

    kind: str
    url: str


# -- the server's side -----------------------------------------------------------------------------


class _Url(Struct):
    url: str


_FORMS: dict[str, Any] = {"data": bytearray, "dtype": str, "shape": list[int], "type": str}
_FORMS |= dict.fromkeys(MEDIA, _Url)
"""The fields of an item that is an object; which of the forms it has is seen afterwards."""

_NUMBERS: Any = int | float | bool
for _ in range(MAX_DEPTH):
    _NUMBERS = int | float | bool | list[_NUMBERS]


class _Rows:
    """What precomputed embeddings and the fields beside them hold, in place of an item type."""

    expected, media, parts = "numbers", "", ()


class Decoder:
    """Decodes the items of one request, and counts what they hold. Media become `Media`.

    Args:
        limits: what they may hold together.

    The methods take the JSON of a value, its path in errors, the item type, and the fields of
    precomputed embeddings, that of the rows first. They raise `InputError` with the path of what is
    malformed, and `TooLarge`.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._left = {name: getattr(limits, name) for name in _UNITS}

    def decode_items(self, raw: Raw, where: str, kind: Any, embeds: Sequence[str]) -> Any:
        """The value of a modality in ``multi_modal_data``."""
        if starts_with(raw, b"["):
            parts = decode_json(list[Raw], raw, where)
            self._take("items", len(parts), where)
            return [self._item(part, f"{where}[{i}]", kind) for i, part in enumerate(parts)]
        if not starts_with(raw, b"{") and not (isinstance(kind, Text) and starts_with(raw, b'"')):
            got = bytes(memoryview(raw)[:40]).decode(errors="replace")
            raise InputError(where, "a list of items, or one encoded tensor", got)
        one = self.decode_item(raw, where, kind, embeds)
        # a tensor may be a batch, whose items the spec counts
        return one if isinstance(one, (torch.Tensor, Media)) or embeds[0] in one else [one]

    def decode_item(self, raw: Raw, where: str, kind: Any, embeds: Sequence[str]) -> Any:
        """One item by itself, or the fields of one precomputed embedding."""
        if starts_with(raw, b"{") and embeds[0] in decode_json(dict[str, Raw], raw, where):
            sent = decode_fields(raw, dict.fromkeys(embeds, Raw), where)
            return {
                name: self.decode_items(sent[name], f"{where}.{name}", _Rows, [""]) for name in sent
            }
        self._take("items", 1, where)
        return self._item(raw, where, kind)

    def _item(self, raw: Raw, where: str, kind: Any) -> Any:
        if starts_with(raw, b"n"):  # an item that its uuid names
            return decode_json(None, raw, where)
        if isinstance(kind, Text):
            return decode_json(str, raw, where)
        if starts_with(raw, b'"') and getattr(kind, "media", None):
            part = f"{kind.media}_url"
            expected = f'an object {{"{part}": {{"url": "data:..."}}}}'
            raise InputError(where, expected, "a text")
        if kind.parts:
            sent = decode_fields(raw, dict.fromkeys(kind.parts, Raw), where, nullable=False)
            record = {}
            for name, part in sent.items():
                record[name] = self._item(part, f"{where}.{name}", kind.parts[name])
            return record
        if starts_with(raw, b"{"):
            return self._object(raw, where, kind)
        self._take("elements", bytes(raw).count(b",") + 1, where)
        return decode_json(_NUMBERS, raw, where)

    def _object(self, raw: Raw, where: str, kind: Any) -> Any:
        sent = decode_fields(raw, _FORMS, where)
        match sorted(sent):
            case ["data", "dtype", "shape"]:
                return self._raw(where, **sent)
            case [part] | [part, "type"] if part in MEDIA:
                if kind.media not in (None, MEDIA[part]):
                    raise InputError(where, kind.expected, f"a part of kind {MEDIA[part]}")
                return Media(MEDIA[part], sent[part].url)
            case names:
                raise InputError(where, FORMS, f"an object with {names}")

    def _raw(self, where: str, data: bytearray, dtype: str, shape: list[int]) -> torch.Tensor:
        kind = DTYPES.get(dtype)
        if kind is None:
            raise InputError(f"{where}.dtype", f"one of {', '.join(DTYPES)}", quote(dtype))
        if len(shape) > MAX_DEPTH or any(size < 0 for size in shape):
            raise InputError(f"{where}.shape", "a list of sizes", quote(str(shape))[1:-1])
        # a size of 0 does not make the others small
        self._take("elements", math.prod(max(size, 1) for size in shape), where)
        size = math.prod(shape) * kind.itemsize
        if len(data) != size:
            expected = f"{size} bytes for shape {tuple(shape)} of {dtype}"
            raise InputError(f"{where}.data", expected, f"{len(data)}")
        if not data:
            return torch.zeros(shape, dtype=kind)
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        if kind == torch.bool and (most := int(tensor.max())) > 1:
            raise InputError(f"{where}.data", "bytes 0 and 1 for bool", str(most))
        return tensor.view(kind).reshape(shape)

    def _take(self, name: str, count: int, where: str) -> None:
        self._left[name] -= count
        if self._left[name] < 0:
            raise self._limits.make_error(where, name, f"{_UNITS[name]} in one request")


def list_embeds_fields(modality: BoundModality) -> list[str]:
    """The fields of precomputed embeddings, that of the rows first."""
    return [modality.parser.embeds_field, *modality.parser.companions]


def describe_modality(modality: BoundModality, limit: int | None) -> ModalityInfo:
    """A modality, for clients that have not read its spec."""
    kind, known = modality.item, not modality.needs_hf
    written: set[Target] = set()
    for value in (*kind.candidates(), *kind.smallest()) if known else ():
        written |= {ids for _, ids in modality.written(Taken.whole([value]))}
    fixed = len(written) == 1 and not modality.layout_evaluator.depends_on_index
    told = {
        "name": modality.name,
        "limit": limit,
        "largest_tokens": modality.most_rows if known else None,
        "placeholder": list(written.pop()) if fixed else None,
        "embeds": modality.parser.embeds_field if modality.parser.takes_embeds else None,
        "example": _example(kind),
        "expected": kind.expected,
        **kind.schema(),
    }
    return msgspec.convert(told, ModalityInfo)


def _example(kind: ItemType) -> Any:
    """A small item in JSON; of one that comes as a file, how the JSON begins."""
    if kind.mime:
        return {f"{kind.media}_url": {"url": f"data:{kind.mime};base64,..."}}
    example = next(reversed(kind.small()), None)
    if isinstance(example, torch.Tensor) and example.numel() <= _WRITTEN_OUT:
        return example.tolist()
    return encode_value(example, "item")


# -- the client's side -----------------------------------------------------------------------------


def encode(data: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of items as a caller writes them into ``multi_modal_data``: arrays and tensors as
    raw base64, PIL images as PNG data URLs, lists and texts as they are, dicts part by part.

    Raises:
        InputError: a value without a form on the wire.
    """
    return {name: encode_value(value, f"items.{name}") for name, value in data.items()}


def content_part(modality: str, item: Any, *, as_url: bool = False) -> dict[str, Any]:
    """A content part of a chat message with an item, for `/v1/chat/completions`; a `uuid` in it
    names the item for the server's cache.

    Args:
        modality: name of the modality.
        item: as for `encode`; None for an item that a `uuid` names and the server has.
        as_url: whether as a data URL in an ``image_url`` part, for a gateway that passes only the
            parts of OpenAI's chat.

    Raises:
        InputError: as for `encode`.
    """
    value = encode_value(item, f"items.{modality}[0]")
    part = {"type": modality, modality: value}
    if as_url:
        text = base64.b64encode(msgspec.json.encode(value)).decode()
        url = f"{ITEM_URL}{modality};base64,{text}"
        part = {"type": "image_url", "image_url": {"url": url}}
    return part


def encode_value(value: Any, where: str) -> Any:
    """One value as JSON, see `encode`.

    Args:
        value: an item, or a container of items, for example messages.
        where: its path in errors.

    Raises:
        InputError: a value without a form on the wire.
    """
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return _base64(value, where)
    if hasattr(value, "getbands"):
        buffer = io.BytesIO()
        upright_rgb(value, where).save(buffer, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        return {"image_url": {"url": url}}
    if isinstance(value, (list, tuple)):
        return [encode_value(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: encode_value(part, f"{where}.{key}") for key, part in value.items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise InputError(where, "texts, lists, arrays, tensors or images", f"a {type(value).__name__}")


def _base64(values: Any, where: str) -> dict[str, Any]:
    """A tensor or an array as its little-endian values in C order."""
    dtype = getattr(values.dtype, "name", str(values.dtype).removeprefix("torch."))
    if dtype not in DTYPES:
        raise InputError(where, f"a dtype among {', '.join(DTYPES)}", dtype)
    if dtype == "bfloat16":  # which numpy lacks
        values = values.view(torch.int16)
    array = values.numpy(force=True) if isinstance(values, torch.Tensor) else np.asarray(values)
    raw = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    data = base64.b64encode(raw).decode()
    return {"data": data, "dtype": dtype, "shape": list(array.shape)}
