"""Hashes of items, by which vLLM keeps processed items and encoder outputs.

vLLM's hasher walks through an item in Python, leaf by leaf. Here it hashes the common part of a
request's items (model, modality, options) once; the hash of an item then covers its bytes, that
part, and a line with its form. An item with a uuid (`multi_modal_uuids`) has a hash of that in
place of its bytes: that a uuid always stands for the same item is the caller's promise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from blake3 import blake3
from PIL import _imaging
from PIL.Image import Image

from ..plan.item import Item
from ..plan.memo import Memo, options_key
from .compat import hash_by_vllm

_MAX_COMMON_PARTS = 64
"""The number of pairs of a modality and options of which the common part is kept."""

_VIEW_THRESHOLD = 2**14
"""Bytes above which making a view takes less time than a copy."""


class ItemHasher:
    """Makes the hashes of the items of the requests of one processor.

    Args:
        algorithm: vLLM's `mm_hasher_algorithm`: blake3, sha256 or sha512.
        model: vLLM's id of the model.
    """

    def __init__(self, algorithm: str, model: str) -> None:
        self._algorithm = algorithm
        self._model = model
        self._common_parts = Memo(_MAX_COMMON_PARTS)

    def hash_items(self, items: Sequence[Item], options: Mapping[str, Any]) -> list[str]:
        """Return the hashes of items of one modality.

        Args:
            items: at least one.
            options: with which the items are processed: other options, another hash.
        """
        modality = items[0].modality
        key = modality, options_key(options) if options else None

        def hash_common_part() -> str:
            return self._hash_by_vllm({modality: ""}, options=options)

        common_part = self._common_parts.get(key, hash_common_part)
        # the names of vLLM's classes for these
        kind = "EmbedItems" if items[0].is_embedding else "ProcessorBatchItems"
        prefix = f"{common_part} {kind}"
        hashes = []
        for item in items:
            item_hash: str | None
            if item.uuid is not None:
                item_hash = self._digest(f"{common_part} uuid\n", item.uuid.encode())
            else:
                item_hash = self._hash_content(prefix, item.content)
                if item_hash is None:
                    item_hash = self._hash_by_vllm({prefix: item.content})
            hashes.append(item_hash)
        return hashes

    def hash_together(self, hashes: Sequence[str]) -> list[str]:
        """Return the hashes of items that are processed together.

        Each depends on all items of the modality in the request, and on their order.

        Args:
            hashes: the hashes of the items without the others.
        """
        together = self._digest("together\n", "".join(hashes).encode())
        return _number_items(together, len(hashes))

    def _hash_by_vllm(self, values: Mapping[str, Any], **more: Any) -> str:
        return hash_by_vllm(self._algorithm, model_id=self._model, **values, **more)

    def _digest(self, line: str, data: Any) -> str:
        # bytes first: blake3 is a third faster on what begins at a boundary of its blocks. The line
        # begins with a digest, so no other bytes with another line are the same together
        digest: Any
        if self._algorithm == "blake3":
            digest = blake3(data)
        else:
            digest = hashlib.new(self._algorithm, data)
        digest.update(line.encode())
        return str(digest.hexdigest())

    def _hash_content(self, prefix: str, value: Any) -> str | None:
        """Return the hash of a tensor, an array, an image, a text, or a dict of these.

        Return None for any other value.
        """
        data: Any
        if isinstance(value, Image) and value.palette is None:
            form = f"{value.mode} {value.size}"
            data = _get_pixels(value)
        elif isinstance(value, dict):
            hashes = {name: self._hash_content(prefix, part) for name, part in value.items()}
            if None in hashes.values():
                return None
            form = "parts"
            data = json.dumps(hashes).encode()
        elif isinstance(value, str):
            form = "text"
            data = value.encode()
        elif isinstance(value, torch.Tensor):
            form = f"{value.dtype} {tuple(value.shape)}"
            data = _get_bytes(_as_array(value))
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            form = f"{value.dtype.str} {value.shape}"
            data = _get_bytes(value)
        elif hasattr(value, "getbands") and hasattr(value, "io_config"):
            # vLLM's loader keeps the file, and how it was converted
            form = f"file {value.io_config}"
            data = value.original_bytes
        else:
            return None
        return self._digest(f"{prefix} {form}\n", data)


def make_unique_hashes(count: int) -> list[str]:
    """Return hashes that no other item has, in this or any other request."""
    return _number_items(uuid4().hex, count)


def _number_items(together: str, count: int) -> list[str]:
    return [f"{together}-{number}-of-{count}" for number in range(1, count + 1)]


def _get_pixels(image: Image) -> bytes:
    """Return the bytes of an image, as `tobytes` does, but in one piece.

    `tobytes` joins pieces of 64 KiB, which takes seven times as long for an image of 336 x 336
    pixels.
    """
    image.load()
    encoder = _imaging.raw_encoder(image.mode, image.mode)
    encoder.setimage(image.im, (0, 0, *image.size))
    _, ended, data = encoder.encode(4 * image.width * image.height + 1)
    return data if ended == 1 else image.tobytes()


def _as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor as an array with its bytes; numpy has no bfloat16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return tensor.numpy()


def _get_bytes(array: np.ndarray[Any, Any]) -> Any:
    """Return the bytes of an array; those of a large one are not copied."""
    if array.nbytes < _VIEW_THRESHOLD or not array.flags.c_contiguous:
        return array.tobytes()
    return array.reshape(-1).view(np.uint8)
