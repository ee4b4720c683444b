"""Hashes of items, by which vLLM keeps processed items and encoder outputs.

vLLM's hasher walks through an item in Python, leaf by leaf. Here it hashes the common part of a
request's items (model, modality, options) once; the hash of an item then covers that part, a line
with its form, and its bytes.

A caller may name items (`multi_modal_uuids`), and later send a name in place of the item. A name is
valid among the requests of one `cache_salt`, so no tenant reaches or replaces the items that
another tenant named.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from ..bound.memo import Memo, options_key
from ..errors import InputError
from .moved import hash_by_vllm
from .names import SharedNames

_NAMES = 2**16
"""Uuids that are remembered, some 300 bytes each."""

_COMMON = 64
"""Modalities and options whose part of hashes is kept."""

_LARGE = 2**14
"""Bytes that take longer to copy than a view of them to make."""

NAME_LENGTH = 256
"""The most characters of a uuid."""


class TenantNames(Mapping[str, Any]):
    """The uuids of one prompt, by modality, as names within its `cache_salt`.

    vLLM's chat adds the salt to a prompt that is tokenized already, so it is looked up only when
    the names are read.

    Args:
        prompt: what vLLM's renderer works on; its uuids are read now.
        spec: name of the model's spec, for messages.

    Raises:
        InputError: a name that is too long.
    """

    def __init__(self, prompt: Mapping[str, Any], spec: str) -> None:
        sent = prompt["multi_modal_uuids"]
        self._sent: Mapping[str, Any] = sent._sent if isinstance(sent, TenantNames) else sent
        self._prompt: Mapping[str, Any] = prompt
        self._names: dict[str, Any] | None = None
        for modality, names in self._sent.items():
            for i, name in enumerate(_listed(names)):
                check_name(name, f"{spec}.{modality}[{i}]")

    def __getitem__(self, modality: str) -> Any:
        if self._names is None:
            salt = self._prompt.get("cache_salt")
            self._names = {
                key: [
                    _digest(salt, name) if isinstance(name, str) else name
                    for name in _listed(names)
                ]
                for key, names in self._sent.items()
            }
            # it refers to this object, and would keep the items of the request alive
            self._prompt = {}
        return self._names[modality]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sent)

    def __len__(self) -> int:
        return len(self._sent)


def check_name(name: Any, where: str) -> None:
    """Refuse a uuid that is too long.

    Raises:
        InputError: it is.
    """
    if isinstance(name, str) and len(name) > NAME_LENGTH:
        remedy = "Use a digest of it."
        raise InputError(
            where, f"a uuid of at most {NAME_LENGTH} characters", f"{len(name)}", remedy
        )


def _listed(names: Any) -> Sequence[Any]:
    return [names] if isinstance(names, str) else names or ()


def _digest(*parts: str | None) -> str:
    """One text of a fixed length for several; no other parts have the same."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=24).hexdigest()


def _parts(value: Any) -> Iterator[Any]:
    """A field as bytes; the repr of a tensor would leave out most of it."""
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}\n".encode()
        yield _bytes_of(_as_array(value))
    elif isinstance(value, list | tuple):
        yield f"{len(value)} parts\n".encode()
        for part in value:
            yield from _parts(part)
    else:
        yield f"{value!r}\n".encode()


def _as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor as an array with its bytes; numpy has no bfloat16."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _bytes_of(array: np.ndarray[Any, Any]) -> Any:
    """The bytes of an array; those of a large one are not copied."""
    if array.nbytes < _LARGE or not array.flags.c_contiguous:
        return array.tobytes()
    return array.reshape(-1).view(np.uint8)


class _Names(OrderedDict[str, str]):
    """Hashes of items by name, those that were given last."""

    def __setitem__(self, key: str, item_hash: str) -> None:
        super().__setitem__(key, item_hash)
        self.move_to_end(key)
        if len(self) > _NAMES:
            self.popitem(last=False)


class Hashes:
    """Hashes of the items of the requests of one processor.

    Args:
        algorithm: vLLM's `mm_hasher_algorithm`: blake3, sha256 or sha512.
        model: vLLM's id of the model.
    """

    def __init__(self, algorithm: str, model: str) -> None:
        self._new: Callable[[bytes], Any] = (
            blake3 if algorithm == "blake3" else partial(hashlib.new, algorithm)
        )
        self._by_vllm = partial(hash_by_vllm, algorithm, model_id=model)
        self._common = Memo(_COMMON)
        self._names: _Names | SharedNames = _Names()

    def share(self, path: Path) -> None:
        """Share the names with the processes that share a file."""
        if isinstance(self._names, _Names):
            self._names = SharedNames(path)

    def of(
        self,
        modality: str,
        items: Any,
        names: Sequence[str | None] | None,
        options: Mapping[str, Any],
        contents: dict[Any, str],
    ) -> tuple[list[str], dict[str, str]]:
        """The hashes of the items of a modality, and the names that the request gives, which are
        forgotten unless `keep` follows.

        An item with a name (a uuid) has the hash of name and content, so that what one caller sends
        under a name is not taken for what another one sent. An item without data is the last one of
        that name.

        Args:
            modality: the name of the modality.
            items: vLLM's items.
            names: one per item, None for an item without; None for no names.
            options: that items are processed with: other options, another hash.
            contents: the hashes of contents that are known of this request, and become known here.
        """
        key = modality, options_key(options) if options else None
        common = self._common.get(key, lambda: self._by_vllm(**{modality: ""}, options=options))
        kind = f"{common} {type(items).__name__}"
        # the bytes of a file, where there are some
        of_vllm = getattr(items, "get_item_for_hash", items.get)
        hashes: list[str] = []
        given: dict[str, str] = {}
        for index, name in enumerate(names or [None] * len(items)):
            content = contents.get((kind, index))
            if content is None and (value := of_vllm(index)) is not None:
                content = self._content(kind, value) or self._by_vllm(**{kind: value})
                contents[kind, index] = content
            if name is None:
                assert content is not None
                hashes.append(content)
                continue
            key_of_name = _digest(modality, name, common)
            if content is not None:
                given[key_of_name] = _digest(key_of_name, content)
            # of a name that nobody has given, the hash is one that no cache has
            known = given.get(key_of_name) or self._names.get(key_of_name)
            hashes.append(known or _digest(key_of_name, None))
        return hashes, given

    def of_fields(self, modality: str, fields: Mapping[str, Any]) -> str:
        """The hash of an item that came as processed fields: of their content, whatever name came
        with them."""
        digest = self._new(f"fields of {modality}\n".encode())
        for key, value in sorted(fields.items()):
            digest.update(f"{key} ".encode())
            for part in _parts(value):
                digest.update(part)
        return str(digest.hexdigest())

    def keep(self, given: Mapping[str, str]) -> None:
        """Remember the names of a request that was not refused."""
        for key, item_hash in given.items():
            self._names[key] = item_hash

    def _content(self, kind: str, value: Any) -> str | None:
        """The hash of a tensor, an array, an image or a text, or of a dict of these; None for
        anything else."""
        if isinstance(value, dict):
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
        elif hasattr(value, "getbands") and value.palette is None:
            what, data = f"{value.mode} {value.size}", value.tobytes()
        else:
            return None
        digest = self._new(f"{kind} {what}\n".encode())
        digest.update(data)
        return str(digest.hexdigest())
