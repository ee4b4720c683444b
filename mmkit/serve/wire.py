"""Items in JSON: the forms on the wire, their decoder and their encoder.

====================================================== ===========================================
form                                                   is
====================================================== ===========================================
nested lists, a number                                 the values
``{"data": base64, "dtype": name, "shape": sizes}``    little-endian values in C order
``{"safetensors": base64}``                            a safetensors file with one tensor
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
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import UNSET, Raw, Struct

from ..errors import InputError
from ..items import ItemType
from ..items.tensor import DTYPES
from ..items.text import Text
from .parsing import DEEPEST, FORMS, MEDIA, UnknownField, decoded, decoder, shown

_SHOWN = 40
_HEADER = 2**16
"""Bytes of the header of a safetensors file with one tensor, at most."""


@dataclass(frozen=True)
class Media:
    """A media part of a chat message that is still to be loaded.

    Attributes:
        kind: image, video or audio.
        url: its address; a data URL holds the part itself.
    """

    kind: str
    url: str


class TooLarge(InputError):
    """A request beyond a limit of the server."""


# -- what msgspec makes of JSON; it stops at the first value of another kind -----------------------


class _Url(Struct):
    url: str


class _Object(Struct, forbid_unknown_fields=True):
    """An item that is an object; which of the forms it has is seen afterwards."""

    data: bytearray | msgspec.UnsetType = UNSET
    dtype: str | msgspec.UnsetType = UNSET
    shape: list[int] | msgspec.UnsetType = UNSET
    safetensors: bytes | msgspec.UnsetType = UNSET
    image_url: _Url | msgspec.UnsetType = UNSET
    video_url: _Url | msgspec.UnsetType = UNSET
    audio_url: _Url | msgspec.UnsetType = UNSET
    type: str | msgspec.UnsetType = UNSET


def _nested(deepest: int) -> Any:
    """The type of numbers in lists at most so deep."""
    numbers: Any = int | float | bool
    for _ in range(deepest):
        numbers = int | float | bool | list[numbers]
    return numbers


_VALUE: Any = _nested(DEEPEST) | _Object | None
_PART: Any = _VALUE | str
"""A part of a record; the spec says which of them are texts."""


@cache
def _named(names: tuple[str, ...], kind: Any) -> Any:
    fields = [
        (f"field_{i}", kind, msgspec.field(name=name, default=UNSET))
        for i, name in enumerate(names)
    ]
    return msgspec.defstruct("Named", fields, forbid_unknown_fields=True)


@cache
def _any_with(name: str) -> Any:
    """The type of an object of which one field is asked for."""
    fields = [("value", Raw, msgspec.field(name=name, default=UNSET))]
    return msgspec.defstruct("AnyWith", fields)


def _type_of(kind: ItemType | None) -> Any:
    """The type of one item of a list, by its item type; None stands for numbers or media."""
    if isinstance(kind, Text):
        return str | None
    return _named(kind.part_names, _PART) | None if kind and kind.part_names else _VALUE


def by_modality(raw: Raw, names: Iterable[str], where: str, kind: Any = Raw) -> dict[str, Any]:
    """The values of an object whose keys are modalities, in the order of `names`.

    Args:
        raw: its JSON; null is an object without keys.
        names: the modalities.
        where: the object in errors.
        kind: the type of the values.

    Raises:
        InputError: no such object, or a key that is no modality.
    """
    of = decoder(_named(tuple(names), kind) | None)
    values = decoded(of, raw, where=where)
    pairs = zip(names, msgspec.structs.astuple(values) if values else (), strict=False)
    return {name: value for name, value in pairs if value is not UNSET}


def _has(raw: Raw, name: str, where: str) -> bool:
    """Whether JSON is an object with a field."""
    if bytes(memoryview(raw)[:1]) != b"{":
        return False
    return decoded(decoder(_any_with(name)), raw, where=where).value is not UNSET


@contextmanager
def _forms(parts: tuple[str, ...]) -> Iterator[None]:
    """A context that names the forms of an item, or the parts of a record, in the error for an
    object with another field."""
    try:
        yield
    except UnknownField as error:
        if parts and error.object.rpartition(".")[0] == "items":
            expected, got = " and ".join(parts), f"{error.name!r} as well"
            raise InputError(error.object, f"a dict of {expected}", f"one with {got}") from None
        raise InputError(error.object, FORMS, f"an object with {error.name!r}") from None


@dataclass
class Decoder:
    """Decodes the items of one request.

    Attributes:
        elements: numbers that the request may still have, all items together.
        items: items that the request may still have.
    """

    elements: int
    items: int

    def __post_init__(self) -> None:
        self._limits = self.elements, self.items

    def decode(
        self,
        items: Mapping[str, Raw],
        kinds: Mapping[str, ItemType] | None = None,
        beside: Mapping[str, Iterable[str]] | None = None,
    ) -> dict[str, Any]:
        """The value of ``multi_modal_data``; media parts become `Media`.

        Args:
            items: JSON, by modality.
            kinds: the item types, by modality; a modality without one takes numbers or media.
            beside: the fields beside precomputed embeddings, by modality.

        Raises:
            InputError: names the path of what is malformed.
            TooLarge: more numbers or items than allowed.
        """
        kinds, beside = kinds or {}, beside or {}
        return {
            name: self._modality(
                raw, f"items.{name}", kinds.get(name), [f"{name}_embeds", *beside.get(name, ())]
            )
            for name, raw in items.items()
        }

    def part(self, raw: Raw, where: str, kind: ItemType, embeds: list[str]) -> Any:
        """One item by itself, or the fields of one precomputed embedding.

        Args:
            raw: its JSON.
            where: its path in errors.
            kind: the item type.
            embeds: the fields of precomputed embeddings, that of the rows first.

        Raises:
            InputError: names the path of what is malformed.
            TooLarge: as for `decode`.
        """
        parts = kind.part_names
        with _forms(parts):
            if _has(raw, embeds[0], where):
                return self._embeddings(raw, where, embeds)
            self._take_items(1, where)
            return self._item(decoded(decoder(_type_of(kind)), raw, where=where), where, parts)

    def _modality(self, raw: Raw, where: str, kind: ItemType | None, embeds: list[str]) -> Any:
        parts = kind.part_names if kind else ()
        start = bytes(memoryview(raw)[:1])
        with _forms(parts):
            if start == b"{":
                if _has(raw, embeds[0], where):
                    return self._embeddings(raw, where, embeds)
                self._take_items(1, where)  # the spec counts those of a batch
                of = decoder(_named(parts, _PART) if parts else _Object)
                item = self._item(decoded(of, raw, where=where), where, parts)
                return [item] if parts else item
            if start == b'"' and isinstance(kind, Text):
                return [decoded(decoder(str), raw, where=where)]
            return self._tensors(raw, where, partial(self._item, parts=parts), _type_of(kind))

    def _embeddings(self, raw: Raw, where: str, names: list[str]) -> dict[str, Any]:
        try:
            sent = by_modality(raw, names, where)
        except UnknownField:
            raise InputError(where, f"{' and '.join(names)} alone", "others beside it") from None
        return {
            name: self._tensors(value, f"{where}.{name}", self._part)
            for name, value in sent.items()
        }

    def _tensors(self, raw: Raw, where: str, item: Callable[..., Any], kind: Any = _VALUE) -> Any:
        """A list of items, each of a type, or one encoded tensor."""
        start = bytes(memoryview(raw)[:_SHOWN])
        if start.startswith(b"["):
            values = decoded(decoder(list[kind]), raw, where=where)
            self._take_items(len(values), where)
            return [item(v, f"{where}[{i}]") for i, v in enumerate(values)]
        if start.startswith(b"{"):
            self._take_items(1, where)
            return item(decoded(decoder(_Object), raw, where=where), where)
        got = "a text" if start.startswith(b'"') else start.decode()
        raise InputError(where, "a list of items, or one encoded tensor", got)

    def _item(self, value: Any, where: str, parts: tuple[str, ...] = ()) -> Any:
        """One item."""
        if parts and value is not None:
            record = {name: getattr(value, f"field_{i}") for i, name in enumerate(parts)}
            return {
                name: self._item(part, f"{where}.{name}")
                for name, part in record.items()
                if part is not UNSET
            }
        if isinstance(value, _Object):
            return self._object(value, where)
        if value is not None and not isinstance(value, str):
            self._take(_numbers(value), where)
        return value

    def _part(self, value: Any, where: str) -> Any:
        """One part of what precomputed embeddings are."""
        part = self._item(value, where)
        if isinstance(part, Media):
            raise InputError(where, "numbers", f"a part of kind {part.kind}")
        return part

    def _object(self, value: _Object, where: str) -> Any:
        match sorted(
            name for name in _Object.__struct_fields__ if getattr(value, name) is not UNSET
        ):
            case ["data", "dtype", "shape"]:
                return self._raw(value.data, value.dtype, value.shape, where)
            case ["safetensors"]:
                return self._safetensors(value.safetensors, f"{where}.safetensors")
            case [part] | [part, "type"] if part in MEDIA:
                return Media(MEDIA[part], getattr(value, part).url)
            case names:
                raise InputError(where, FORMS, f"an object with {names}")

    def _raw(self, raw: Any, name: Any, shape: Any, where: str) -> torch.Tensor:
        dtype = DTYPES.get(name)
        if dtype is None:
            raise InputError(f"{where}.dtype", f"one of {', '.join(DTYPES)}", shown(name))
        if len(shape) > DEEPEST or any(size < 0 for size in shape):
            raise InputError(f"{where}.shape", "a list of sizes", reprlib.repr(shape))
        # a size of 0 does not make the others small
        self._take(math.prod(max(size, 1) for size in shape), where)
        size = math.prod(shape) * dtype.itemsize
        if len(raw) != size:
            expected = f"{size} bytes for shape {tuple(shape)} of {name}"
            raise InputError(f"{where}.data", expected, f"{len(raw)}")
        if not raw:
            return torch.zeros(shape, dtype=dtype)
        tensor = torch.frombuffer(raw, dtype=torch.uint8)
        if dtype == torch.bool and (most := int(tensor.max())) > 1:
            raise InputError(f"{where}.data", "bytes 0 and 1 for bool", str(most))
        return tensor.view(dtype).reshape(shape)

    def _safetensors(self, raw: Any, where: str) -> torch.Tensor:
        import safetensors.torch

        if (header := int.from_bytes(raw[:8], "little")) > _HEADER:
            expected = f"a file with one tensor and a header of at most {_HEADER} bytes"
            raise InputError(where, expected, str(header))
        try:
            tensors = safetensors.torch.load(raw)
        except Exception as error:  # SafetensorError, and KeyError for a dtype that torch lacks
            got = f"{type(error).__name__}: {error}"[:200]
            raise InputError(where, "a safetensors file", got) from None
        if len(tensors) != 1:
            raise InputError(where, "a file with one tensor", str(len(tensors)))
        (tensor,) = tensors.values()
        self._take(tensor.numel(), where)
        return tensor

    def _take(self, count: int, where: str) -> None:
        self.elements -= count
        if self.elements < 0:
            expected = f"at most {self._limits[0]} numbers in one request"
            remedy = "Send less at once, or raise MMKIT_SERVE_ELEMENTS on the server."
            raise TooLarge(where, expected, "more", remedy)

    def _take_items(self, count: int, where: str) -> None:
        self.items -= count
        if self.items < 0:
            remedy = "Send less at once, or raise MMKIT_SERVE_ITEMS on the server."
            raise TooLarge(where, f"at most {self._limits[1]} items in one request", "more", remedy)


def _numbers(value: Any) -> int:
    """The number of numbers in nested lists."""
    count, level = 0, [value]
    while level:
        lists = [part for part in level if isinstance(part, list)]
        count += len(level) - len(lists)
        level = [part for inner in lists for part in inner]
    return count


# -- the client's side -----------------------------------------------------------------------------


def encode(data: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of items as a caller writes them into ``multi_modal_data``: arrays and tensors as
    raw base64, PIL images as PNG data URLs, lists and texts as they are, dicts part by part.

    Raises:
        InputError: a value without a form on the wire.
    """
    return {name: encoded(value, f"items.{name}", top=True) for name, value in data.items()}


def content_part(modality: str, item: Any, uuid: str | None = None) -> dict[str, Any]:
    """A content part of a chat message with an item, for `/v1/chat/completions`.

    Args:
        modality: name of the modality.
        item: as for `encode`; None with a `uuid` for an item that the server has.
        uuid: a name for the server's cache.

    Raises:
        InputError: as for `encode`.
    """
    part = {"type": modality, modality: encoded(item, f"items.{modality}[0]")}
    return part if uuid is None else {**part, "uuid": uuid}


def _base64(values: Any, dtype: str, where: str) -> dict[str, Any]:
    """A tensor or an array as its little-endian values in C order."""
    if dtype not in DTYPES:
        raise InputError(where, f"a dtype among {', '.join(DTYPES)}", dtype)
    if isinstance(values, torch.Tensor):
        # bfloat16 has no numpy dtype; the copy mends the odd strides that a tensor of one element
        # may have
        flat = values.flatten().clone(memory_format=torch.contiguous_format)
        raw = flat.view(torch.uint8).numpy().tobytes()
    else:
        raw = values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
    data = base64.b64encode(raw).decode()
    return {"data": data, "dtype": dtype, "shape": list(values.shape)}


def encoded(value: Any, where: str, *, top: bool = False) -> Any:
    """One value as JSON, see `encode`.

    Args:
        value: an item, or a container of items, for example messages.
        where: its path in errors.
        top: whether the value is all of a modality.

    Raises:
        InputError: a value without a form on the wire.
    """
    if isinstance(value, torch.Tensor):
        return _base64(value.detach().cpu(), str(value.dtype).removeprefix("torch."), where)
    if isinstance(value, (np.ndarray, np.generic)):
        return _base64(np.asarray(value), value.dtype.name, where)
    if hasattr(value, "getbands"):
        buffer = io.BytesIO()
        value.save(buffer, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        part = {"image_url": {"url": url}}
        return [part] if top else part
    if isinstance(value, (list, tuple)):
        return [encoded(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: encoded(part, f"{where}.{key}") for key, part in value.items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise InputError(where, "texts, lists, arrays, tensors or images", f"a {type(value).__name__}")
