"""What identifies an item: vLLM keeps processed items and encoder outputs by hash.

vLLM's hasher walks through an item in Python, leaf by leaf. Here it hashes what the items of a request have in common
(model, modality, options), once; an item is that, a line that says what it is, and its bytes.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from blake3 import blake3

_NAMES = 2**16
"""Uuids that are remembered, a few hundred bytes each."""


class HashForms(list[Any]):
    """What vLLM hashes of the items of a modality: it iterates, or calls `get_all_items_for_hash`."""

    def get_all_items_for_hash(self) -> list[Any]:
        return self


ByVllm: TypeAlias = Callable[[dict[str, HashForms]], Mapping[str, list[str]]]
"""vLLM's hashes of forms, by modality, under the options of one request."""


class Hashes:
    """Hashes of the items of the requests of one processor.

    Args:
        algorithm: vLLM's `mm_hasher_algorithm`: blake3, sha256 or sha512.
    """

    def __init__(self, algorithm: str) -> None:
        self._new: Callable[[bytes], Any] = blake3 if algorithm == "blake3" else partial(hashlib.new, algorithm)
        self._common: dict[str, str] = {}
        self._names: OrderedDict[tuple[str, str, str], str] = OrderedDict()

    def of(
        self, mm_items: Mapping[str, Any], uuids: Mapping[str, Any], by_vllm: ByVllm, *, options: bool
    ) -> dict[str, list[str]]:
        """The hashes of the items of a request.

        An item with a name (a uuid) has the hash of name and content, so that what one caller sends under a name is not
        taken for what another one sent. An item without data is the last one of that name.

        Args:
            mm_items: vLLM's items, by modality.
            uuids: names of items, by modality; None for an item without.
            by_vllm: how vLLM hashes.
            options: the request has `mm_processor_kwargs`, or others that `by_vllm` takes into account.
        """
        made: dict[str, list[str]] = {}
        for modality, items in mm_items.items():
            common = None if options else self._common.get(modality)
            if common is None:
                common = by_vllm({modality: HashForms([""])})[modality][0]
                if not options:
                    self._common[modality] = common
            names: Sequence[str | None] = uuids.get(modality) or [None] * len(items)
            of_vllm = getattr(items, "get_item_for_hash", items.get)  # the bytes of a file, where there are some
            kind = f"{common} {type(items).__name__}"
            made[modality] = found = []
            for index, name in enumerate(names):
                value = of_vllm(index)
                content = None
                if value is not None:
                    content = self._content(kind, value) or by_vllm({modality: HashForms([value])})[modality][0]
                found.append(content if name is None else self._named((modality, name, common), content))
        return made

    def _content(self, kind: str, value: Any) -> str | None:
        """The hash of a tensor, an array or an image; None for anything else."""
        if isinstance(value, torch.Tensor):
            known = value.view(torch.int16) if value.dtype == torch.bfloat16 else value  # numpy has no bfloat16
            what, data = f"{value.dtype} {tuple(value.shape)}", known.numpy().tobytes()
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            what, data = f"{value.dtype.str} {value.shape}", value.tobytes()
        elif hasattr(value, "getbands") and value.palette is None:
            what, data = f"{value.mode} {value.size}", value.tobytes()
        else:
            return None
        digest = self._new(f"{kind} {what}\n".encode())
        digest.update(data)
        return str(digest.hexdigest())

    def _named(self, key: tuple[str, str, str], content: str | None) -> str:
        name = key[1]
        if content is None:
            return self._names.get(key, name)
        self._names[key] = made = f"{name}-{content}"
        self._names.move_to_end(key)
        if len(self._names) > _NAMES:
            self._names.popitem(last=False)
        return made
