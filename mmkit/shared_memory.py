"""Python objects from one process to another, their tensors and arrays through shared memory.

The bytes of tensors and arrays lie in a file of a folder in memory; the rest is a pickle. The
receiver maps the file, and removes its name: the memory is freed with the last tensor that lies in
it, whatever happens to the sender.
"""

from __future__ import annotations

import io
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .errors import MmkitError

FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where files lie in memory; None, the usual temporary folder, where there is no such place."""

_ALIGNED = 64
"""Bytes: tensors begin at multiples of it, so that any dtype can look at them."""


class Packed(NamedTuple):
    """An object on its way.

    Attributes:
        pickled: all but the bytes of tensors and arrays.
        path: the file with these; empty where there are none.
    """

    pickled: bytes
    path: str


def pack(value: Any, folder: str) -> Packed:
    """An object, its large parts in a file of the folder.

    Raises:
        MmkitError: the folder has no room for them.
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(value)
    path = _written(pickler, folder) if pickler.size else ""
    return Packed(pickled.getvalue(), path)


def unpack(packed: Packed) -> Any:
    """The object. Its tensors and arrays lie in the file, which has no name any more."""
    block = torch.empty(0, dtype=torch.uint8)
    if packed.path:
        size = os.path.getsize(packed.path)
        # unlike a mmap of Python, it keeps no file open
        block = torch.from_file(packed.path, shared=True, size=size, dtype=torch.uint8)
        os.unlink(packed.path)
    return _Unpickler(io.BytesIO(packed.pickled), block).load()


class _Pickler(pickle.Pickler):
    """Leaves out the bytes of tensors and arrays; views of one tensor stay views of one.

    Attributes:
        size: bytes that were left out.
        blocks: where they begin, and they, by their address.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.size = 0
        self.blocks: dict[int, tuple[int, np.ndarray]] = {}
        self._known: dict[int, Any] = {}

    def persistent_id(self, value: Any) -> Any:
        # what is pickled lives as long as this, so that no id is given twice
        if (pid := self._known.get(id(value))) is None and (pid := self._pid(value)):
            self._known[id(value)] = pid
        return pid

    def _pid(self, value: Any) -> Any:
        if type(value) is torch.Tensor and value.layout is torch.strided:
            storage = value.untyped_storage()
            is_small_part = 2 * value.nbytes < storage.nbytes()
            if is_small_part and storage.data_ptr() not in self.blocks:
                value = value.clone(memory_format=torch.contiguous_format)
                storage = value.untyped_storage()
            block = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            geometry = tuple(value.shape), value.stride(), value.storage_offset()
            return "tensor", self._start(block), storage.nbytes(), value.dtype, geometry
        if type(value) is np.ndarray and value.dtype.kind in "biufc":
            block = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            return "array", self._start(block), block.size, value.dtype.str, value.shape
        return None

    def _start(self, block: np.ndarray) -> int:
        """Where a block begins."""
        address = block.ctypes.data
        if address not in self.blocks:
            self.blocks[address] = self.size, block
            self.size += -(-block.size // _ALIGNED) * _ALIGNED
        return self.blocks[address][0]


def _written(pickler: _Pickler, folder: str) -> str:
    file, path = tempfile.mkstemp(dir=folder)
    try:
        # to write is cheaper than to map, whose pages are cleared first
        for start, block in pickler.blocks.values():
            done = 0
            while done < block.size:
                done += os.pwrite(file, block[done:].data, start + done)
        os.truncate(file, pickler.size)
    except OSError as error:
        os.unlink(path)
        expected = f"room for {pickler.size >> 20} MiB of processed items"
        remedy = "Give the container more shared memory (--shm-size)."
        raise MmkitError(str(Path(folder).parent), expected, str(error), remedy) from error
    finally:
        os.close(file)
    return path


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: torch.Tensor) -> None:
        super().__init__(file)
        self._memory = memory

    def persistent_load(self, pid: Any) -> Any:
        kind, start, size, dtype, geometry = pid
        block = self._memory[start : start + size]
        if kind == "array":
            return block.numpy().view(dtype).reshape(geometry)
        shape, stride, offset = geometry
        whole = block.view(dtype) if size else torch.empty(0, dtype=dtype)
        return whole.as_strided(shape, stride, whole.storage_offset() + offset)
