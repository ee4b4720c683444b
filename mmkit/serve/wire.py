"""Items in JSON.

========================================================= ============================================================
form                                                      is
========================================================= ============================================================
nested lists, a number                                    the values
``{"data": base64, "dtype": name, "shape": sizes}``       little-endian values in C order
``{"safetensors": base64}``                               a safetensors file with one tensor
``{"image_url": {"url": ...}}``, ``video_url``,           a media part of vLLM's chat messages; the server hands it to
``audio_url``                                             vLLM's own media loader
========================================================= ============================================================

The value of a modality is a list of items, or one encoded tensor, which is one item or a batch of them, or
``{"<modality>_embeds": ...}`` with precomputed embeddings in the same forms. Nothing is unpickled.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import InputError

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)}  # fmt: skip
"""What raw data may be of, by name."""

MEDIA = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
"""The media parts of chat messages, and what they are."""

FORMS = 'nested lists of numbers, {"data", "dtype", "shape"}, {"safetensors"}, or one of ' + ", ".join(
    f'{{"{name}"}}' for name in MEDIA
)

_DEEPEST = 32


@dataclass(frozen=True)
class Media:
    """A media part of a chat message that is still to be loaded.

    Attributes:
        kind: image, video or audio.
        url: where it is; a data URL holds it.
    """

    kind: str
    url: str


class TooLarge(InputError):
    """Items beyond a limit of the server."""


@dataclass
class Decoder:
    """Decodes the items of one request.

    Attributes:
        elements: numbers that may still come, all items together.
        items: items that may still come.
    """

    elements: int
    items: int

    def __post_init__(self) -> None:
        self._limits = self.elements, self.items

    def decode(self, items: Mapping[str, Any]) -> dict[str, Any]:
        """What goes into ``multi_modal_data``; media parts become `Media`.

        Raises:
            InputError: names the path of what is malformed.
            TooLarge: more numbers or items than allowed.
        """
        return {name: self._modality(value, f"items.{name}") for name, value in items.items()}

    def _modality(self, value: Any, where: str) -> Any:
        if isinstance(value, list):
            self._take_items(len(value), where)
            return [None if item is None else self._item(item, f"{where}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, dict) and len(value) == 1 and (embeds := next(iter(value))).endswith("_embeds"):
            return {embeds: self._modality(value[embeds], f"{where}.{embeds}")}
        if isinstance(value, dict):
            self._take_items(1, where)  # the spec counts those of a batch
            return self._item(value, where)
        raise InputError(where, "a list of items, or one encoded tensor", _kind(value))

    def _item(self, value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            self._count(value, where)
            return value
        keys = set(value)
        if keys == {"data", "dtype", "shape"}:
            return self._raw(value, where)
        if keys == {"safetensors"}:
            return self._safetensors(value["safetensors"], f"{where}.safetensors")
        for name, kind in MEDIA.items():
            if name in keys and keys <= {name, "type"}:
                part = value[name]
                if isinstance(part, dict) and isinstance(url := part.get("url"), str):
                    return Media(kind, url)
                raise InputError(f"{where}.{name}", 'an object with a text "url"', _kind(part))
        raise InputError(where, FORMS, f"an object with {sorted(keys)}")

    def _raw(self, value: Mapping[str, Any], where: str) -> torch.Tensor:
        dtype = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
        if dtype is None:
            raise InputError(f"{where}.dtype", f"one of {', '.join(DTYPES)}", repr(value["dtype"])[:80])
        shape = value["shape"]
        if not isinstance(shape, list) or len(shape) > _DEEPEST or not all(type(n) is int and n >= 0 for n in shape):
            raise InputError(f"{where}.shape", "a list of sizes", repr(shape)[:80])
        self._take(math.prod(max(n, 1) for n in shape), where)  # a size of 0 does not make the others small
        raw = _bytes(value["data"], f"{where}.data")
        wanted = math.prod(shape) * dtype.itemsize
        if len(raw) != wanted:
            got = f"{len(raw)}"
            raise InputError(f"{where}.data", f"{wanted} bytes for shape {tuple(shape)} of {value['dtype']}", got)
        if not raw:
            return torch.zeros(shape, dtype=dtype)
        if dtype == torch.bool and max(raw) > 1:
            raise InputError(f"{where}.data", "bytes 0 and 1 for bool", str(max(raw)))
        return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)

    def _safetensors(self, value: Any, where: str) -> torch.Tensor:
        import safetensors.torch

        raw = _bytes(value, where)
        try:
            tensors = safetensors.torch.load(raw)
        except Exception as error:  # SafetensorError, and KeyError for a dtype that torch lacks
            raise InputError(where, "a safetensors file", f"{type(error).__name__}: {error}"[:200]) from None
        if len(tensors) != 1:
            raise InputError(where, "a file with one tensor", str(len(tensors)))
        (tensor,) = tensors.values()
        self._take(tensor.numel(), where)
        return tensor

    def _count(self, value: Any, where: str) -> None:
        """Take the numbers of nested lists, without recursion."""
        level, depth = [value], 0
        while level:
            if depth > _DEEPEST:
                raise InputError(where, f"lists nested at most {_DEEPEST} deep", "deeper")
            lists = [part for part in level if isinstance(part, list)]
            self._take(len(level) - len(lists), where)
            for part in level:
                if isinstance(part, (str, dict)) or part is None:
                    raise InputError(where, FORMS, _kind(part))
            level = [part for inner in lists for part in inner]
            depth += 1

    def _take(self, count: int, where: str) -> None:
        self.elements -= count
        if self.elements < 0:
            remedy = "Send less at once, or raise MMKIT_SERVE_ELEMENTS on the server."
            raise TooLarge(where, f"at most {self._limits[0]} numbers in one request", "more", remedy)

    def _take_items(self, count: int, where: str) -> None:
        self.items -= count
        if self.items < 0:
            remedy = "Send less at once, or raise MMKIT_SERVE_ITEMS on the server."
            raise TooLarge(where, f"at most {self._limits[1]} items in one request", "more", remedy)


def _bytes(value: Any, where: str) -> bytes:
    if not isinstance(value, str):
        raise InputError(where, "base64 text", _kind(value))
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(where, "base64 text", f"another one ({error})") from None


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a text", type(None): "null", bool: repr(value)}.get(
        type(value), repr(value)[:40]
    )


# -- the client's side -------------------------------------------------------------------------------------------------


def encode(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a caller would put into ``multi_modal_data``, as JSON: arrays and tensors as raw base64, PIL images as PNG
    data URLs, lists as they are.

    Raises:
        InputError: a value that has no form on the wire.
    """
    return {name: _encoded(value, f"items.{name}", top=True) for name, value in data.items()}


def _encoded(value: Any, where: str, *, top: bool = False) -> Any:
    if isinstance(value, torch.Tensor):
        dtype, bits = str(value.dtype).removeprefix("torch."), value.detach().cpu().contiguous()
        if dtype not in DTYPES:
            raise InputError(where, f"a dtype among {', '.join(DTYPES)}", dtype)
        raw = bits.flatten().view(torch.uint8).numpy().tobytes()  # bfloat16 has no numpy dtype
        return {"data": base64.b64encode(raw).decode(), "dtype": dtype, "shape": list(value.shape)}
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.ascontiguousarray(value) if isinstance(value, np.ndarray) else np.asarray(value)
        dtype = array.dtype.name
        if dtype not in DTYPES:
            raise InputError(where, f"a dtype among {', '.join(DTYPES)}", dtype)
        raw = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        return {"data": base64.b64encode(raw).decode(), "dtype": dtype, "shape": list(np.shape(value))}
    if hasattr(value, "getbands"):
        buffer = io.BytesIO()
        value.save(buffer, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        part = {"image_url": {"url": url}}
        return [part] if top else part
    if isinstance(value, (list, tuple)):
        return [_encoded(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: _encoded(part, f"{where}.{key}", top=top) for key, part in value.items()}
    if value is None or type(value) in (bool, int, float):
        return value
    raise InputError(where, "lists, arrays, tensors or images", f"a {type(value).__name__}")
