"""Processing of items in several processes.

vLLM processes the items of requests in one thread, and more threads of Python are slower. A spec
is data, so other processes can process items, too: they import the module that declares the spec,
and receive the config and the Hugging Face processor of the model. They need no vLLM.
"""

from __future__ import annotations

import errno
import io
import logging
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
from threading import Lock, Thread
from time import thread_time
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch

from ..errors import MmkitError, SpecError
from ..generate import find_variable
from ..language.items.pictures import decode_pictures, get_undecoded_file, open_undecoded
from ..language.spec import Declaration
from ..plan.bind import bind
from ..plan.parsing import ItemBatch
from ..plan.plan import Plan
from ..plan.processing import ProcessedFields

logger = logging.getLogger(__name__)

NICENESS = 10
"""By how much render processes give way to others, such as the engine and the server."""

PATIENCE = 120.0
"""Seconds without an answer after which a process counts as hanging, and is ended."""

START_TIMEOUT = 300.0
"""Seconds in which a process has to be ready: it imports torch, and the module of the spec."""

_CONTEXT = get_context("spawn")

_MEMORY_FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where files lie in memory; None, the usual temporary folder, where there is no such place."""

_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
"""What the system says when a file finds no room there, or may not be as large."""

_MIN_FILE_SIZE = 2**16
"""Bytes that are worth a file."""

_ALIGNMENT = 64
"""Bytes at whose multiples the parts of a file begin."""

_MAX_SPARE_FILES = 4
"""Files of each process that are kept, to be written again."""


Recipe = Mapping[str, Any]
"""The arguments of `mmkit.plan.bind.bind` by name, for another process: `spec`, which a variable of
a module holds; the tokenizer without the classes that vLLM puts around it."""


def _pickle_recipe(recipe: Recipe, where: str) -> bytes:
    """Return a pickle of a recipe for another process.

    Raises:
        SpecError: it could not import the spec, or the config or the processor cannot be pickled.
    """
    if find_variable(recipe["spec"]) is None:
        remedy = "Assign it to a variable at the top of a module that is not the main one."
        raise SpecError(where, "a spec that another process can import", "another one", remedy)
    file = io.BytesIO()
    try:
        _RecipePickler(file).dump(recipe)
    except Exception as error:
        got = f"{type(error).__name__}: {error}".rstrip(".")
        raise SpecError(where, "a config and a processor that pickle", got) from error
    return file.getvalue()


class _RecipePickler(cloudpickle.Pickler):
    """Pickles a spec as the variable that holds it, and tokenizers without vLLM's derived classes.

    vLLM derives a thread-safe class from a tokenizer's class, in a function; no other process can
    import it.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Declaration):
            variable = find_variable(value)
            if variable:
                return getattr, tuple(variable)
        if hasattr(value, "all_special_tokens") and _is_local(type(value)):
            return _return_value, (_copy_as_plain(value),)
        return super().reducer_override(value)


def _copy_as_plain(tokenizer: Any) -> Any:
    """Return a copy of a tokenizer as one of the first of its classes that can be imported."""
    plain_class: Any = type(tokenizer)
    for base in type(tokenizer).__mro__:
        if not _is_local(base):
            plain_class = base
            break
    copy = plain_class.__new__(plain_class)
    vars(copy).update(vars(tokenizer))
    return copy


def _is_local(cls: type) -> bool:
    """Return whether a class is declared in a function, so that no other process can import it."""
    return "<locals>" in cls.__qualname__


def _return_value(value: Any) -> Any:
    """Return the value: what makes a copied tokenizer in the other process."""
    return value


class RenderProcesses:
    """Processes that process items.

    If an item crashes its process, only the request of that item fails. A new process replaces the
    crashed one.

    Args:
        recipe: the recipe of their plan.
        count: the number of processes.

    Raises:
        SpecError: the recipe cannot be pickled.
    """

    def __init__(self, recipe: Recipe, count: int) -> None:
        self._where = f"{recipe['spec'].name}, render processes"
        warn_without_cores(self._where, count, count_cores())
        self._costs = MovingCosts(self._where)
        self._recipe = _pickle_recipe(recipe, self._where)
        self._all: set[_Process] = set()
        self._free: SimpleQueue[_Process] = SimpleQueue()
        # one thread a process: it takes a free one, and waits for its answer
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="mmkit render")
        for _ in range(count):
            self._start_process()

    def wait(self) -> None:
        """Wait until they are ready.

        Raises:
            MmkitError: one of them is not; says why.
        """
        for process in list(self._all):
            process.ready.result(START_TIMEOUT)

    def process(self, items: Mapping[str, ItemBatch]) -> Future[dict[str, ProcessedFields]]:
        """Return the processed fields of the items of a request, as `Plan.compute_fields` does.

        It raises the errors of `Plan.compute_fields`, and MmkitError where the process ended.
        """
        return self._threads.submit(self._run, items)

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [process.pid.result(START_TIMEOUT) for process in list(self._all)]

    def close(self) -> None:
        """End the processes.

        Calls that wait for a process are cancelled.
        """
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._all:
            self._all.pop().end()

    def _start_process(self) -> None:
        process = _Process(self._recipe, self._where, self._costs)
        self._all.add(process)
        self._free.put(process)

    def _run(self, items: Mapping[str, ItemBatch]) -> dict[str, ProcessedFields]:
        process = self._free.get()
        try:
            process.ready.result(START_TIMEOUT)
            return process.process(items)
        except (BrokenExecutor, TimeoutError) as error:
            if process in self._all:  # else they are closed
                self._all.discard(process)
                process.end()
                self._start_process()
            got = "one that ended"
            if isinstance(error, TimeoutError):
                got = f"one that was silent for {PATIENCE:g} s and was ended"
            remedy = "Send the request again; the server's log may tell why."
            raise MmkitError(self._where, "one that answers", got, remedy) from error
        except OSError as error:
            process.make_room()
            if error.errno not in _FULL_ERRORS:
                raise
            folder = _MEMORY_FOLDER or tempfile.gettempdir()
            got = f"none: {error.strerror}"
            remedy = "Make it larger (a container by --shm-size), or send fewer items at once."
            raise MmkitError(self._where, f"room for items in {folder}", got, remedy) from error
        finally:
            if process in self._all:
                self._free.put(process)


class _Process:
    """One process, seen from the process that started it.

    Attributes:
        pid: its id.
        ready: done when it can process items; fails where it cannot.
    """

    def __init__(self, recipe: bytes, where: str, costs: MovingCosts) -> None:
        self._costs = costs
        self._folder = tempfile.mkdtemp(prefix="mmkit-render-", dir=_MEMORY_FOLDER)
        self._items_file = _make_file(self._folder)
        self._spare_files: set[str] = set()
        self._pool = ProcessPoolExecutor(1, _CONTEXT)
        self.pid = self._pool.submit(os.getpid)
        self.ready = self._pool.submit(_start_worker, recipe, where, self._folder)

    def process(self, items: Mapping[str, ItemBatch]) -> dict[str, ProcessedFields]:
        """Return the processed fields of items, by modality.

        Raises:
            BrokenExecutor: the process ended.
            TimeoutError: it did not answer in time.
            OSError: there is no room for the items.
        """
        start = thread_time()
        message = _write_message(items, self._items_file)
        moving = thread_time() - start
        future = self._pool.submit(_process_in_worker, message, list(self._spare_files))
        answer = future.result(PATIENCE)
        start = thread_time()
        fields: dict[str, ProcessedFields] = {}
        for name, messages in answer.fields.items():
            fields[name] = [self._receive_answer(message) for message in messages]
        moving += thread_time() - start
        self._costs.add(answer.processing_seconds, moving + answer.moving_seconds)
        return fields

    def _receive_answer(self, message: _Message) -> Any:
        size = max((span.end for span in message.spans), default=0)
        memory = torch.from_file(message.path, shared=True, size=size, dtype=torch.uint8).numpy()
        # the value refers to this array, and the file is written again once nobody has the value:
        # new memory takes the kernel longer than a copy
        weakref.finalize(memory, self._release_file, message.path).atexit = False
        self._spare_files.discard(message.path)
        buffers = [memory[span.begin : span.end] for span in message.spans]
        return pickle.loads(message.pickle, buffers=buffers)

    def _release_file(self, path: str) -> None:
        """Keep a file that nobody reads any more for reuse, or remove it."""
        if len(self._spare_files) < _MAX_SPARE_FILES:
            self._spare_files.add(path)
        else:
            Path(path).unlink(missing_ok=True)

    def make_room(self) -> None:
        """Free the memory of the files that are kept for reuse."""
        os.truncate(self._items_file, 0)
        while self._spare_files:
            Path(self._spare_files.pop()).unlink(missing_ok=True)

    def end(self) -> None:
        """Kill the process, and remove its files."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with suppress(BrokenExecutor, CancelledError, TimeoutError, ProcessLookupError):
            os.kill(self.pid.result(0), signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)


# -- whether they help -----------------------------------------------------------------------------


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def warn_without_cores(where: str, count: int, num_cores: int) -> None:
    """Say in the log when there are too few processes or cores for a gain."""
    if count < 2 or num_cores < 2:
        logger.warning(
            "%s: %d on %d core(s) cannot make the server faster: items travel to another process, "
            "and nothing more is done at once. Use at least two, on as many cores, or none.",
            where,
            count,
            num_cores,
        )


class MovingCosts:
    """What the processes save the server, and what it costs to move items there and fields back.

    The server is slower with them where they move for as long as they process: it is measured on
    the requests that come, since the size of a caller's photographs is not in a spec.

    Args:
        where: names the processes in the log.
    """

    WINDOW = 64
    """Requests that are compared at a time."""

    LARGEST_SHARE = 0.5
    """The processor time for moving, as a share of that for processing, above which the log says
    that the processes do not help. On two cores, 0.2 is a gain of a half (InternVL's tiles), and
    0.9 a loss of a quarter (LLaVA's photographs)."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._lock = Lock()
        self._count = 0
        self._processing = 0.0
        self._moving = 0.0
        self._has_warned = False

    def add(self, processing: float, moving: float) -> None:
        """Add the processor time of a request, and say once in the log if the processes cost more.

        Args:
            processing: seconds in which its items were processed.
            moving: seconds in which its items and fields were written, copied and read.
        """
        with self._lock:
            self._count += 1
            self._processing += processing
            self._moving += moving
            if self._count < self.WINDOW:
                return
            if self._moving > self.LARGEST_SHARE * self._processing and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s: of the last %d requests, moving the items took %.1f ms each, and "
                    "processing them %.1f ms. The server may be faster without render processes.",
                    self._where,
                    self._count,
                    1000 * self._moving / self._count,
                    1000 * self._processing / self._count,
                )
            self._count = 0
            self._processing = 0.0
            self._moving = 0.0


# -- messages --------------------------------------------------------------------------------------


class _Span(NamedTuple):
    """The bytes of a file from `begin` to before `end`."""

    begin: int
    end: int


class _Message(NamedTuple):
    """A value on its way to another process.

    Attributes:
        pickle: its pickle, without its large buffers.
        path: the file that holds these.
        spans: where each lies in the file.
    """

    pickle: bytes
    path: str
    spans: list[_Span]


class _Answer(NamedTuple):
    """The processed fields of a request, on their way to the server.

    Attributes:
        fields: by modality, a message for each item.
        processing_seconds: of the processor, in which they were processed.
        moving_seconds: of the processor, in which the items were read and the fields written.
    """

    fields: dict[str, list[_Message]]
    processing_seconds: float
    moving_seconds: float


def _make_file(folder: str) -> str:
    file, path = tempfile.mkstemp(dir=folder)
    os.close(file)
    return path


def _write_message(value: Any, path: str) -> _Message:
    """Return a value for another process; its large buffers go to a file."""
    large_buffers: list[memoryview] = []

    def keep_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _MIN_FILE_SIZE:
            return True
        large_buffers.append(raw)
        return False

    stream = io.BytesIO()
    _ItemPickler(stream, protocol=5, buffer_callback=keep_in_pickle).dump(value)
    spans: list[_Span] = []
    with open(path, "r+b") as file:
        for raw in large_buffers:
            begin = math.ceil(file.tell() / _ALIGNMENT) * _ALIGNMENT
            file.seek(begin)
            size = file.write(raw)
            spans.append(_Span(begin, begin + size))
    return _Message(stream.getvalue(), path, spans)


class _ItemPickler(pickle.Pickler):
    """Pickles tensors and images as arrays, whose memory need not be copied into the pickle.

    An image that is not decoded yet is pickled as its file, which is a few percent of its pixels.
    """

    def reducer_override(self, value: Any) -> Any:
        file = get_undecoded_file(value)
        if file is not None:
            return _open_undecoded, (pickle.PickleBuffer(file),)
        if type(value) is torch.Tensor and value.layout is torch.strided:
            plain = value.detach().resolve_conj().resolve_neg().contiguous()
            data = plain.reshape(-1).view(torch.uint8).numpy()
            return _make_tensor, (data, value.dtype, value.shape)
        if getattr(value, "mode", None) == "RGB":
            from PIL import Image

            return Image.fromarray, (np.asarray(value),)
        return NotImplemented


def _open_undecoded(file: Any) -> Any:
    return open_undecoded(bytes(file))


def _make_tensor(data: Any, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).reshape(shape)


# -- in a render process ---------------------------------------------------------------------------


class _Worker:
    """What a render process has.

    Args:
        plan: processes the items.
        folder: holds the files of its answers.
    """

    def __init__(self, plan: Plan, folder: str) -> None:
        self._plan = plan
        self._folder = folder

    def process(self, message: _Message, spare_files: list[str]) -> _Answer:
        """Return the processed fields of items, each in a file of its own.

        Args:
            message: the items.
            spare_files: may be written again.
        """
        begin = thread_time()
        # copies: the file is written again for the next request
        buffers = []
        for span in message.spans:
            size = span.end - span.begin
            buffers.append(np.fromfile(message.path, np.uint8, size, offset=span.begin))
        items = pickle.loads(message.pickle, buffers=buffers)
        start = thread_time()
        for name, batch in items.items():
            for position, value in enumerate(batch.values):
                where = f"{self._plan.modalities[name].where}[{batch.index_of(position)}]"
                decode_pictures(value, where)
        fields_by_modality = self._plan.compute_fields(items)
        processing = thread_time() - start
        answers = self._write_answers(fields_by_modality, spare_files)
        return _Answer(answers, processing, thread_time() - begin - processing)

    def _write_answers(
        self, fields_by_modality: Mapping[str, ProcessedFields], spare_files: list[str]
    ) -> dict[str, list[_Message]]:
        """Write the fields of each item to a file."""
        paths: list[str] = []
        answers: dict[str, list[_Message]] = {}
        try:
            for name, fields in fields_by_modality.items():
                answers[name] = []
                for fields_of_item in fields:
                    path = spare_files.pop() if spare_files else _make_file(self._folder)
                    paths.append(path)
                    answers[name].append(_write_message(fields_of_item, path))
        except OSError:  # there is no room; nobody else would remove them
            for path in paths:
                Path(path).unlink(missing_ok=True)
            raise
        return answers


_worker: _Worker
"""The worker of this process: a pool of processes can call functions of a module only."""


def _start_worker(recipe: bytes, where: str, folder: str) -> None:
    """Make this process a render process."""
    torch.set_num_threads(1)
    Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    global _worker
    try:
        _worker = _Worker(bind(**pickle.loads(recipe)), folder)
    except Exception as error:  # of the spec, or of what its module imports
        got = f"{type(error).__name__}: {error}".rstrip(".")
        raise MmkitError(where, "one that starts", got) from error
    os.nice(NICENESS)


def _process_in_worker(message: _Message, spare_files: list[str]) -> _Answer:
    """Return the processed fields of items; see `_Worker.process`."""
    return _worker.process(message, spare_files)


def _end_with_parent(folder: str) -> None:
    """End this process when the server has ended, also where it was killed."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
