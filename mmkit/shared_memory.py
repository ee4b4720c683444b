"""Python objects from one process to another, the bytes of their tensors and arrays through shared
memory.

They are the out-of-band buffers of pickle protocol 5: each value has bytes of its own, in a file of
a folder in memory, so that no two can be taken for one another; the rest is a pickle. The receiver
maps the file, and removes its name: the memory is freed with the last tensor that lies in it,
whatever happens to the sender.
"""

from __future__ import annotations

import io
import os
import pickle
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .errors import MmkitError

FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where files lie in memory; None, the usual temporary folder, where there is no such place."""

_ALIGNED = 64
"""Bytes: buffers begin at multiples of it, so that any dtype can look at them."""


class Packed(NamedTuple):
    """An object on its way.

    Attributes:
        pickled: all but the bytes of tensors and arrays.
        path: the file with these; empty where there are none.
        sizes: their bytes, one number for each tensor or array.
    """

    pickled: bytes
    path: str
    sizes: Sequence[int]


def pack(value: Any, folder: str) -> Packed:
    """An object, its large parts in a file of the folder.

    Raises:
        MmkitError: the folder has no room for them.
    """
    pickled, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(pickled, protocol=5, buffer_callback=buffers.append).dump(value)
    parts = [buffer.raw() for buffer in buffers]
    path = _written(parts, folder) if any(part.nbytes for part in parts) else ""
    return Packed(pickled.getvalue(), path, [part.nbytes for part in parts])


def unpack(packed: Packed) -> Any:
    """The object. Its tensors and arrays lie in the file, which has no name any more."""
    memory = torch.empty(0, dtype=torch.uint8)
    if packed.path:
        size = os.path.getsize(packed.path)
        # unlike a mmap of Python, it keeps no file open
        memory = torch.from_file(packed.path, shared=True, size=size, dtype=torch.uint8)
        os.unlink(packed.path)
    whole = memory.numpy()
    *starts, _ = _starts(packed.sizes)
    buffers = [whole[i : i + size] for i, size in zip(starts, packed.sizes, strict=True)]
    return pickle.loads(packed.pickled, buffers=buffers)


class _Pickler(pickle.Pickler):
    """Leaves out the bytes of tensors, too; those of arrays numpy leaves out."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or not _is_plain(value):
            return NotImplemented
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(content.data), value.dtype, tuple(value.shape))


def _is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor is its bytes, its dtype and its shape."""
    is_strided = value.layout is torch.strided and value.device.type == "cpu"
    is_lazy = value.is_quantized or value.is_conj() or value.is_neg()
    return is_strided and not is_lazy and value.numel() > 0


def _tensor(content: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.asarray(content, np.uint8)).view(dtype).reshape(shape)


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where each buffer begins in the file, and where the last one ends."""
    return list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))


def _written(parts: Sequence[memoryview], folder: str) -> str:
    *starts, end = _starts([part.nbytes for part in parts])
    file, path = tempfile.mkstemp(dir=folder)
    try:
        # to write is cheaper than to map, whose pages are cleared first
        for start, part in zip(starts, parts, strict=True):
            done = 0
            while done < part.nbytes:
                done += os.pwrite(file, part[done:], start + done)
        os.truncate(file, end)
    except OSError as error:
        os.unlink(path)
        expected = f"room for {end >> 20} MiB of processed items"
        remedy = "Give the container more shared memory (--shm-size)."
        raise MmkitError(str(Path(folder).parent), expected, str(error), remedy) from error
    finally:
        os.close(file)
    return path
