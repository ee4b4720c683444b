"""Hashes of items, by which vLLM keeps processed items and encoder outputs.

vLLM's hasher walks through an item in Python, leaf by leaf. Here it hashes the common part of a
request's items (model, modality, options) once; the hash of an item then covers its bytes, that
part, and a line with its form. An item with a uuid (`multi_modal_uuids`) has a hash of that in
place of its bytes: that a uuid always stands for the same item is the caller's promise.

A server takes the common part from its own vLLM: `mmkit.vllm_api.hashes`. Without vLLM, for example
in a router, it is computed here as vLLM 0.31 to 0.33 do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from .files import ImageFile
from .item import Item
from .memo import Memo, options_key
from .modality import BoundModality

_MAX_COMMON_PARTS = 64
"""The number of pairs of a modality and options of which the common part is kept."""

_VIEW_THRESHOLD = 2**14
"""Bytes above which making a view takes less time than a copy."""

_MAX_INT64 = 2**63 - 1


class ItemHasher:
    """Makes the hashes of the items of the requests of one processor.

    Args:
        algorithm: vLLM's `mm_hasher_algorithm`: blake3, vLLM's default, sha256 or sha512.
        model: vLLM's id of the model, which is what `--model` says, letter by letter.
    """

    def __init__(self, algorithm: str, model: str) -> None:
        self._algorithm = algorithm
        self._model = model
        self._common_parts = Memo(_MAX_COMMON_PARTS)

    def hash_items(
        self, modality: BoundModality, items: Sequence[Item], options: Mapping[str, Any]
    ) -> list[str | None]:
        """Return the hashes of all items of one modality in a request.

        None stands for an item without content and uuid, or whose hash only vLLM can make; where
        the items are processed together and one has none, none has one. Of items that vLLM never
        keeps, each hash is unique.

        Args:
            modality: the modality.
            items: at least one.
            options: with which the items are processed: other options, another hash.
        """
        if modality.is_never_kept:
            return list(_number_items(uuid4().hex, len(items)))
        hashes = self._hash_one_by_one(items, options)
        if not modality.are_independent(len(items)):
            return self._hash_together(hashes)
        return hashes

    def _hash_one_by_one(
        self, items: Sequence[Item], options: Mapping[str, Any]
    ) -> list[str | None]:
        common_part = self._get_common_part(items[0].modality, options)
        if common_part is None:
            return [None] * len(items)
        # the names of vLLM's classes for these
        kind = "EmbedItems" if items[0].is_embedding else "ProcessorBatchItems"
        prefix = f"{common_part} {kind}"
        hashes: list[str | None] = []
        for item in items:
            item_hash: str | None = None
            if item.uuid is not None:
                item_hash = self._digest(f"{common_part} uuid\n", item.uuid.encode())
            else:
                item_hash = self._hash_content(prefix, item.content)
                if item_hash is None:
                    item_hash = self._hash_other_content(prefix, item.content)
            hashes.append(item_hash)
        return hashes

    def _hash_together(self, hashes: Sequence[str | None]) -> list[str | None]:
        """Return the hashes of items that are processed together.

        Each depends on all items of the modality in the request, and on their order.

        Args:
            hashes: the hashes of the items without the others.
        """
        single_hashes: list[str] = []
        for item_hash in hashes:
            if item_hash is None:
                return [None] * len(hashes)
            single_hashes.append(item_hash)
        together = self._digest("together\n", "".join(single_hashes).encode())
        return list(_number_items(together, len(hashes)))

    def _get_common_part(self, modality: str, options: Mapping[str, Any]) -> str | None:
        key = modality, options_key(options) if options else None

        def hash_common_part() -> str | None:
            return self._hash_common_part(modality, options)

        return self._common_parts.get(key, hash_common_part)

    def _hash_common_part(self, modality: str, options: Mapping[str, Any]) -> str | None:
        """Return vLLM's hash of what the items of a modality have in common.

        None for options that JSON lacks.
        """
        values = {"model_id": self._model, modality: "", "options": options}
        digest = self._make_digest()
        try:
            for name in sorted(values):
                for chunk in (*_frame(name.encode()), *_frame_value(values[name])):
                    digest.update(chunk)
        except TypeError:
            return None
        return str(digest.hexdigest())

    def _hash_other_content(self, prefix: str, content: Any) -> str | None:
        """Return the hash of content that `_hash_content` does not know."""
        return None

    def _make_digest(self, data: Any = b"") -> Any:
        if self._algorithm == "blake3":
            return _import_blake3()(data)
        return hashlib.new(self._algorithm, data)

    def _digest(self, line: str, data: Any) -> str:
        # bytes first: blake3 is a third faster on what begins at a boundary of its blocks. The line
        # begins with a digest, so no other bytes with another line are the same together
        digest = self._make_digest(data)
        digest.update(line.encode())
        return str(digest.hexdigest())

    def _hash_content(self, prefix: str, value: Any) -> str | None:
        """Return the hash of a tensor, an array, an image, a text, or a dict or a list of these.

        None in a dict or a list is a part that is absent. Return None for any other value.
        """
        data: Any
        if isinstance(value, dict):
            hashes = {name: self._hash_content(prefix, part) for name, part in value.items()}
            if None in hashes.values():
                return None
            form = "parts"
            data = json.dumps(hashes).encode()
        elif isinstance(value, list):
            hashes_of_elements = [self._hash_content(prefix, element) for element in value]
            if None in hashes_of_elements:
                return None
            form = "elements"
            data = json.dumps(hashes_of_elements).encode()
        elif value is None:
            form = "absent"
            data = b""
        elif isinstance(value, str):
            form = "text"
            data = value.encode()
        elif isinstance(value, torch.Tensor):
            form = f"{value.dtype} {tuple(value.shape)}"
            data = _get_bytes(_as_array(value))
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            form = f"{value.dtype.str} {value.shape}"
            data = _get_bytes(value)
        elif _is_image_file(value):
            form = f"file {value.io_config}"
            data = value.original_bytes
        elif hasattr(value, "getbands") and value.palette is None:
            form = f"{value.mode} {value.size}"
            data = _get_pixels(value)
        else:
            return None
        return self._digest(f"{prefix} {form}\n", data)


def _is_image_file(value: Any) -> bool:
    """Return whether a value is an image with its file, and with how vLLM's loader converts it."""
    if isinstance(value, ImageFile):
        return True
    return hasattr(value, "getbands") and hasattr(value, "io_config")


def salt_uuid(uuid: Any, cache_salt: str | None) -> Any:
    """Return what stands for a uuid within one `cache_salt`.

    No tenant reaches the items of another one by a uuid.
    """
    if not isinstance(uuid, str):  # no uuid, or a value that is refused
        return uuid
    salted = json.dumps([cache_salt, uuid]).encode()
    return hashlib.blake2b(salted, digest_size=24).hexdigest()


def _number_items(together: str, count: int) -> list[str]:
    return [f"{together}-{number}-of-{count}" for number in range(1, count + 1)]


# -- vLLM's framing --------------------------------------------------------------------------------


def _frame(chunk: bytes) -> tuple[bytes, bytes]:
    """Return bytes behind their length."""
    return _frame_length(len(chunk)), chunk


def _frame_length(length: int) -> bytes:
    return length.to_bytes(8, "little")


def _frame_value(value: Any) -> Iterator[bytes]:
    """Yield what vLLM's `MultiModalHasher` hashes of a value of JSON.

    Raises:
        TypeError: it is no value of JSON, or too large a number.
    """
    if value is None:
        yield b"\x00"
    elif isinstance(value, (list, tuple)):
        yield b"\x01"
        yield _frame_length(len(value))
        for element in value:
            yield from _frame_value(element)
    elif isinstance(value, Mapping):
        yield b"\x02"
        yield _frame_length(len(value))
        for name, element in value.items():
            yield from _frame(str(name).encode())
            yield from _frame_value(element)
    else:
        yield b"\x03"
        yield from _frame(_encode_scalar(value))


def _encode_scalar(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    is_number = isinstance(value, (int, float))
    if not is_number or (isinstance(value, int) and not -_MAX_INT64 <= value <= _MAX_INT64):
        raise TypeError(f"{value!r} is no value of JSON that vLLM hashes")
    return np.array(value).tobytes()


# -- bytes -----------------------------------------------------------------------------------------


def _get_pixels(image: Any) -> bytes:
    """Return the bytes of an image of PIL, as `tobytes` does, but in one piece.

    `tobytes` joins pieces of 64 KiB, which takes seven times as long for an image of 336 x 336
    pixels.
    """
    image.load()
    try:
        encoder = _import_imaging().raw_encoder(image.mode, image.mode)
        encoder.setimage(image.im, (0, 0, *image.size))
        _, ended, data = encoder.encode(4 * image.width * image.height + 1)
    except (AttributeError, TypeError):  # a Pillow whose private functions are other ones
        ended = 0
    pixels: bytes = data if ended == 1 else image.tobytes()
    return pixels


# An import statement takes as long as to hash a small item, each time.


@cache
def _import_imaging() -> Any:
    """Return PIL's module in C, which models without images do not load."""
    from PIL import _imaging

    return _imaging


@cache
def _import_blake3() -> Any:
    """Return the hash function that vLLM brings."""
    from blake3 import blake3

    return blake3


def _as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor as an array with its bytes; numpy has no bfloat16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return tensor.numpy()


def _get_bytes(array: np.ndarray[Any, Any]) -> Any:
    """Return the bytes of an array; the bytes of a large array are not copied."""
    if array.nbytes < _VIEW_THRESHOLD or not array.flags.c_contiguous:
        return array.tobytes()
    return array.reshape(-1).view(np.uint8)
