"""What of an item's fields SGLang's caches and its transport see."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from ..plan.modality import BoundModality


def hash_fields(modality: BoundModality, fields: Mapping[str, Any]) -> bytes:
    """Return what tells an item from others, 32 bytes.

    SGLang's own hash covers the bytes of `feature` alone: two items of equal bytes and other shapes
    or other fields would be one item in its caches. This one covers the modality, and the name, the
    dtype, the shape and the values of each field. Of items that are never kept each is unique.
    """
    digest = hashlib.sha256()
    _add_value(digest.update, modality.name)
    if modality.is_never_kept:
        _add_value(digest.update, uuid4().bytes)
    _add_value(digest.update, fields)
    return digest.digest()


def _add_value(add: Callable[[Any], None], value: Any) -> None:
    """Add a value to a digest: its kind and its size first, so that no two values are alike."""
    if isinstance(value, torch.Tensor):
        add(f"tensor {value.dtype} {tuple(value.shape)}\n".encode())
        add(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        add(f"array {value.dtype.str} {value.shape}\n".encode())
        add(value.tobytes())
    elif isinstance(value, Mapping):
        add(f"mapping {len(value)}\n".encode())
        for name in sorted(value):
            _add_value(add, name)
            _add_value(add, value[name])
    elif isinstance(value, (list, tuple)):
        add(f"list {len(value)}\n".encode())
        for element in value:
            _add_value(add, element)
    else:
        content = value if isinstance(value, bytes) else repr(value).encode()
        add(f"{type(value).__name__} {len(content)}\n".encode())
        add(content)


def choose_feature(modality: BoundModality, fields: Mapping[str, Any]) -> str:
    """Return the name of the field that goes as the `feature` of an item.

    SGLang sends it through shared memory, moves it to the device, and frees it after the request,
    so it is the largest tensor. Of fields that stay on the host it is only one if all do.
    """

    def rank(name: str) -> tuple[bool, int]:
        value = fields[name]
        size = value.nbytes if isinstance(value, torch.Tensor) else 0
        return not modality.fields[name].keep_on_cpu, size

    return max(fields, key=rank)
