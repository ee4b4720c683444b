"""Processing of items in several processes.

vLLM processes the items of requests in one thread, and more threads of Python are slower. A spec
is data, so other processes can process items, too: they import the module that declares the spec,
and receive the config and the Hugging Face processor of the model. They need no vLLM.
"""

from __future__ import annotations

import errno
import io
import math
import os
import pickle
import shutil
import signal
import tempfile
import weakref
from collections.abc import Mapping
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from contextlib import suppress
from multiprocessing import get_context, parent_process
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch

from ..errors import MmkitError, SpecError
from ..generate import find_variable
from ..language.spec import Declaration
from ..plan.bind import bind
from ..plan.parsing import Taken
from ..plan.plan import Plan
from ..plan.processing import Processed

NICENESS = 10
"""By how much render processes give way to others, such as the engine and the server."""

PATIENCE = 120.0
"""Seconds without an answer after which a process counts as one that hangs, and is ended."""

START = 300.0
"""Seconds in which a process has to be ready: it imports torch, and the module of the spec."""

_CONTEXT = get_context("spawn")

_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where files lie in memory; None, the usual temporary folder, where there is no such place."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
"""What the system says when a file finds no room there, or may not be as large."""

_LARGE = 2**16
"""Bytes that are worth a file."""

_ALIGNED = 64
"""Bytes at whose multiples the parts of a file begin."""

_SPARE = 4
"""Files of each process that are kept, to be written again."""


Recipe = Mapping[str, Any]
"""The arguments of `mmkit.plan.bind.bind` by name, for another process: `spec`, which a variable of
a module holds; the tokenizer without the classes that vLLM puts around it."""


def _pickled(recipe: Recipe, where: str) -> bytes:
    """A recipe for another process.

    Raises:
        SpecError: it could not import the spec, or the config or the processor cannot be pickled.
    """
    if find_variable(recipe["spec"]) is None:
        remedy = "Assign it to a variable at the top of a module that is not the main one."
        raise SpecError(where, "a spec that another process can import", "another one", remedy)
    file = io.BytesIO()
    try:
        _Pickler(file).dump(recipe)
    except Exception as error:
        got = f"{type(error).__name__}: {error}".rstrip(".")
        raise SpecError(where, "a config and a processor that pickle", got) from error
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):
    """Pickles a spec as the variable that holds it, and tokenizers without the thread-safe classes
    that vLLM derives from their own."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Declaration) and (home := find_variable(value)):
            return getattr, tuple(home)
        kinds = type(value).__mro__
        if not hasattr(value, "all_special_tokens") or not _is_local(kinds[0]):
            return super().reducer_override(value)
        plain: Any = next(kind for kind in kinds if not _is_local(kind))
        copy = plain.__new__(plain)
        vars(copy).update(vars(value))
        return _itself, (copy,)


def _is_local(kind: type) -> bool:
    return "<locals>" in kind.__qualname__


def _itself(value: Any) -> Any:
    return value


class RenderProcesses:
    """Processes that process items. An item that ends its process fails its own request alone;
    another process takes the place.

    Args:
        recipe: the recipe of their plan.
        count: the number of processes.

    Raises:
        SpecError: the recipe cannot be pickled.
    """

    def __init__(self, recipe: Recipe, count: int) -> None:
        self._where = f"{recipe['spec'].name}, render processes"
        self._recipe = _pickled(recipe, self._where)
        self._all, self._free = set[_Process](), SimpleQueue[_Process]()
        # one thread a process: it takes a free one, and waits for its answer
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="mmkit render")
        for _ in range(count):
            self._begin()

    def wait(self) -> None:
        """Return when they are ready.

        Raises:
            MmkitError: one of them is not; says why.
        """
        for process in list(self._all):
            process.ready.result(START)

    def process(self, items: Mapping[str, Taken]) -> Future[dict[str, Processed]]:
        """The processed fields of the items of a request, as `Plan.process` returns them. Its
        errors are those of `Plan.process`, and MmkitError where the process ended."""
        return self._threads.submit(self._run, items)

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [process.pid.result(START) for process in list(self._all)]

    def close(self) -> None:
        """End them. What waits is cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._all:
            self._all.pop().end()

    def _begin(self) -> None:
        process = _Process(self._recipe, self._where)
        self._all.add(process)
        self._free.put(process)

    def _run(self, items: Mapping[str, Taken]) -> dict[str, Processed]:
        process = self._free.get()
        try:
            process.ready.result(START)
            return process.process(items)
        except (BrokenExecutor, TimeoutError) as error:
            if process in self._all:  # else they are closed
                self._all.discard(process)
                process.end()
                self._begin()
            silent = f"one that was silent for {PATIENCE:g} s and was ended"
            got = silent if isinstance(error, TimeoutError) else "one that ended"
            remedy = "Send the request again; the server's log may tell why."
            raise MmkitError(self._where, "one that answers", got, remedy) from error
        except OSError as error:
            process.make_room()
            if error.errno not in _FULL:
                raise
            place = _MEMORY or tempfile.gettempdir()
            got = f"none: {error.strerror}"
            remedy = "Make it larger (a container by --shm-size), or send fewer items at once."
            raise MmkitError(self._where, f"room for items in {place}", got, remedy) from error
        finally:
            if process in self._all:
                self._free.put(process)


class _Process:
    """One process, seen from the one that started it.

    Attributes:
        pid: its id.
        ready: done when it can process items; fails where it cannot.
    """

    def __init__(self, recipe: bytes, where: str) -> None:
        self._folder = tempfile.mkdtemp(prefix="mmkit-render-", dir=_MEMORY)
        self._items = _new_file(self._folder)
        self._spare = set[str]()
        self._pool = ProcessPoolExecutor(1, _CONTEXT)
        self.pid = self._pool.submit(os.getpid)
        self.ready = self._pool.submit(_prepare, recipe, where, self._folder)

    def process(self, items: Mapping[str, Taken]) -> dict[str, Processed]:
        sent = _dumped(items, self._items)
        answer = self._pool.submit(_answer, sent, [*self._spare]).result(PATIENCE)
        return {name: [*map(self._loaded, of_items)] for name, of_items in answer.items()}

    def _loaded(self, sent: _Sent) -> Any:
        size = max((end for _, end in sent.spans), default=0)
        memory = torch.from_file(sent.path, shared=True, size=size, dtype=torch.uint8).numpy()
        # what is read refers to this array; new memory takes the kernel longer than a copy
        weakref.finalize(memory, self._release, sent.path).atexit = False
        self._spare.discard(sent.path)
        parts = [memory[begin:end] for begin, end in sent.spans]
        return pickle.loads(sent.pickled, buffers=parts)

    def _release(self, path: str) -> None:
        """A file may be written again."""
        if len(self._spare) < _SPARE:
            self._spare.add(path)
        else:
            Path(path).unlink(missing_ok=True)

    def make_room(self) -> None:
        """Give back the memory of the files that are kept to be written again."""
        os.truncate(self._items, 0)
        while self._spare:
            Path(self._spare.pop()).unlink(missing_ok=True)

    def end(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        with suppress(BrokenExecutor, CancelledError, TimeoutError, ProcessLookupError):
            os.kill(self.pid.result(0), signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)


class _Sent(NamedTuple):
    """A value on its way to another process.

    Attributes:
        pickled: its pickle, without what is large.
        path: of the file that holds what is large.
        spans: where that lies in the file.
    """

    pickled: bytes
    path: str
    spans: list[tuple[int, int]]


def _new_file(folder: str) -> str:
    file, path = tempfile.mkstemp(dir=folder)
    os.close(file)
    return path


def _dumped(value: Any, path: str) -> _Sent:
    """A value for another process; what is large of it goes to a file."""
    large: list[memoryview] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= _LARGE:
            large.append(raw)
        return raw.nbytes < _LARGE

    pickled = io.BytesIO()
    _ItemPickler(pickled, protocol=5, buffer_callback=is_small).dump(value)
    spans: list[tuple[int, int]] = []
    with open(path, "r+b") as file:
        for raw in large:
            begin = math.ceil(file.tell() / _ALIGNED) * _ALIGNED
            file.seek(begin)
            spans.append((begin, begin + file.write(raw)))
    return _Sent(pickled.getvalue(), path, spans)


class _ItemPickler(pickle.Pickler):
    """Pickles tensors and images as arrays, whose memory need not be copied into the pickle."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and value.layout is torch.strided:
            plain = value.detach().resolve_conj().resolve_neg().contiguous()
            data = plain.reshape(-1).view(torch.uint8).numpy()
            return _tensor, (data, value.dtype, value.shape)
        if getattr(value, "mode", None) == "RGB":
            from PIL import Image

            return Image.fromarray, (np.asarray(value),)
        return NotImplemented


def _tensor(data: Any, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).reshape(shape)


_plan: Plan
_folder: str
"""Those of a render process."""


def _prepare(recipe: bytes, where: str, folder: str) -> None:
    """Make this process a render process."""
    torch.set_num_threads(1)
    Thread(target=_end_with_parent, daemon=True).start()
    global _plan, _folder
    _folder = folder
    try:
        _plan = bind(**pickle.loads(recipe))
    except Exception as error:  # of the spec, or of what its module imports
        got = f"{type(error).__name__}: {error}".rstrip(".")
        raise MmkitError(where, "one that starts", got) from error
    os.nice(NICENESS)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(_folder, ignore_errors=True)
    os._exit(1)


def _answer(sent: _Sent, spare: list[str]) -> dict[str, list[_Sent]]:
    """The processed fields of items, each in a file of its own."""
    # copies: the file is written again for the next request
    buffers = [
        np.fromfile(sent.path, np.uint8, end - begin, offset=begin) for begin, end in sent.spans
    ]
    items = pickle.loads(sent.pickled, buffers=buffers)
    done = _plan.process(items)
    paths, written = [*spare], list[str]()
    answers: dict[str, list[_Sent]] = {}
    try:
        for name, fields in done.items():
            answers[name] = []
            for field in fields:
                written.append(paths.pop() if paths else _new_file(_folder))
                answers[name].append(_dumped(field, written[-1]))
    except OSError:  # there is no room; nobody else would remove them
        for path in written:
            Path(path).unlink(missing_ok=True)
        raise
    return answers
