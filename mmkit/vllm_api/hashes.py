"""Hashes of items, by which vLLM keeps processed items and encoder outputs.

vLLM's hasher walks through an item in Python, leaf by leaf. Here it hashes the common part of a
request's items (model, modality, options) once; the hash of an item then covers its bytes, that
part, and a line with its form. An item with a uuid (`multi_modal_uuids`) has a hash of that in
place of its bytes: that a uuid always stands for the same item is the caller's promise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from blake3 import blake3
from PIL import _imaging
from PIL.Image import Image

from ..plan.memo import Memo, options_key
from .compat import FILES_TELL_DECODING, hash_by_vllm

_COMMON = 64
"""Modalities and options whose part of hashes is kept."""

_LARGE = 2**14
"""Bytes that take longer to copy than a view of them to make."""


class Hashes:
    """Hashes of the items of the requests of one processor.

    Args:
        algorithm: vLLM's `mm_hasher_algorithm`: blake3, sha256 or sha512.
        model: vLLM's id of the model.
    """

    def __init__(self, algorithm: str, model: str) -> None:
        self._new: Callable[[Any], Any] = (
            blake3 if algorithm == "blake3" else partial(hashlib.new, algorithm)
        )
        self._by_vllm = partial(hash_by_vllm, algorithm, model_id=model)
        self._common = Memo(_COMMON)

    def of(
        self,
        modality: str,
        items: Any,
        uuids: Sequence[str | None] | None,
        options: Mapping[str, Any],
    ) -> list[str]:
        """The hashes of the items of a modality.

        Args:
            modality: the name of the modality.
            items: vLLM's items.
            uuids: one per item, None for an item without; None for no uuids.
            options: that items are processed with: other options, another hash.
        """
        key = modality, options_key(options) if options else None
        common = self._common.get(key, lambda: self._by_vllm(**{modality: ""}, options=options))
        kind = f"{common} {type(items).__name__}"
        # the bytes of a file, where it tells how they were converted
        value_of = items.get_item_for_hash if FILES_TELL_DECODING else items.get
        hashes = []
        for index, uuid in enumerate(uuids or [None] * len(items)):
            if uuid is not None:
                hashes.append(self._digest(f"{common} uuid\n", uuid.encode()))
                continue
            value = value_of(index)
            hashes.append(self._content(kind, value) or self._by_vllm(**{kind: value}))
        return hashes

    def of_all(self, hashes: Sequence[str]) -> list[str]:
        """The hashes of items that depend on the other items of their modality in a request, and on
        their order.

        Args:
            hashes: those of the items alone.
        """
        together, count = self._digest("together\n", "".join(hashes).encode()), len(hashes)
        return [f"{together}-{number}-of-{count}" for number in range(1, count + 1)]

    def _digest(self, what: str, data: Any) -> str:
        # bytes first: blake3 is a third faster on what begins at a boundary of its blocks. The line
        # begins with a digest, so no other bytes with another line are the same together
        digest = self._new(data)
        digest.update(what.encode())
        return str(digest.hexdigest())

    def _content(self, kind: str, value: Any) -> str | None:
        """The hash of a tensor, an array, an image or a text, or of a dict of these; None for
        anything else."""
        if isinstance(value, Image) and value.palette is None:
            what, data = f"{value.mode} {value.size}", _pixels(value)
        elif isinstance(value, dict):
            parts = {name: self._content(kind, part) for name, part in value.items()}
            if None in parts.values():
                return None
            what, data = "parts", json.dumps(parts).encode()
        elif isinstance(value, str):
            what, data = "text", value.encode()
        elif isinstance(value, torch.Tensor):
            what, data = f"{value.dtype} {tuple(value.shape)}", _bytes_of(_as_array(value))
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            what, data = f"{value.dtype.str} {value.shape}", _bytes_of(value)
        elif hasattr(value, "getbands") and hasattr(value, "io_config"):
            # vLLM's loader tells the file, and how it was converted
            what, data = f"file {value.io_config}", value.original_bytes
        else:
            return None
        return self._digest(f"{kind} {what}\n", data)


def unique_hashes(count: int) -> list[str]:
    """Hashes of items that nothing keeps: no other item, and no other request, has them."""
    together = uuid4().hex
    return [f"{together}-{number}-of-{count}" for number in range(1, count + 1)]


def _pixels(image: Image) -> bytes:
    """What `tobytes` returns, which puts pieces of 64 KiB together: that takes seven times as long
    for an image of 336 x 336 pixels."""
    image.load()
    encoder = _imaging.raw_encoder(image.mode, image.mode)
    encoder.setimage(image.im, (0, 0, *image.size))
    _, ended, data = encoder.encode(4 * image.width * image.height + 1)
    return data if ended == 1 else image.tobytes()


def _as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor as an array with its bytes; numpy has no bfloat16."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _bytes_of(array: np.ndarray[Any, Any]) -> Any:
    """The bytes of an array; those of a large one are not copied."""
    if array.nbytes < _LARGE or not array.flags.c_contiguous:
        return array.tobytes()
    return array.reshape(-1).view(np.uint8)
