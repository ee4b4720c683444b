"""Processing of items in several processes.

vLLM processes the items of requests in one thread, and more threads of Python are slower. A spec
is data, so other processes can process items, too: they import the module that declares the spec,
and receive the config and the Hugging Face processor of the model. They need no vLLM.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import local
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch

from .bound.calls import Taken
from .bound.processing import Processed
from .errors import InputError, MmkitError, SpecError
from .generate import module_of
from .plan import Plan
from .shared_memory import FOLDER, Packed, pack, unpack
from .spec import Declaration

NICENESS = 10
"""By how much render processes give way to others, such as the engine and the server."""

PATIENCE = 120.0
"""Seconds without an answer after which a process counts as one that hangs, and is ended."""

START = 300.0
"""Seconds in which a process has to be ready: it gives way to all others, and imports torch."""

_CONTEXT = get_context("spawn")

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""Of glibc's mallopt(3)."""

_BLOCKS = 8
"""Blocks of 16 MiB that Pillow keeps."""


@dataclass(frozen=True)
class Recipe:
    """The arguments of `Plan` for another process.

    Attributes:
        spec: a spec that a variable of a module holds.
        tokenizer: the model's tokenizer, without the classes that vLLM puts around it.
        processor: the model's Hugging Face processor, or None.
    """

    spec: Declaration
    config: Any
    tokenizer: Any
    processor: Any
    kwargs: Mapping[str, Any]
    max_model_len: int | None
    dtype: torch.dtype | None

    def pickled(self) -> bytes:
        """For another process.

        Raises:
            SpecError: it could not import the spec, or the config or the processor cannot be
                pickled.
        """
        where = f"{self.spec.name}, render processes"
        if (home := module_of(self.spec)) is None:
            remedy = "Assign it to a variable at the top of a module that is not the main one."
            raise SpecError(where, "a spec that another process can import", "another one", remedy)
        file = io.BytesIO()
        try:
            _Pickler(file).dump((home[0].__name__, home[1], replace(self, spec=None)))  # type: ignore[arg-type]
        except Exception as error:
            got = f"{type(error).__name__}: {error}".rstrip(".")
            raise SpecError(where, "a config and a processor that pickle", got) from error
        return file.getvalue()

    @staticmethod
    def plan(pickled: bytes) -> Plan:
        """The plan of a recipe from another process."""
        module, variable, recipe = pickle.loads(pickled)
        spec = getattr(import_module(module), variable)
        return Plan(**{**vars(recipe), "spec": spec})


class _Pickler(cloudpickle.Pickler):
    """Pickles tokenizers without the thread-safe classes that vLLM derives from their own."""

    def reducer_override(self, value: Any) -> Any:
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
        self._recipe, self._where = recipe.pickled(), f"{recipe.spec.name}, render processes"
        self._own, self._all = local(), set[_Process]()
        self._is_closed = False
        # each thread waits for a process of its own
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="mmkit render")
        self._started = [self._threads.submit(self._begin) for _ in range(count)]

    def wait(self) -> None:
        """Return when they are ready.

        Raises:
            MmkitError: one of them is not; says why.
        """
        for started in self._started:
            started.result()

    def process(self, items: Mapping[str, Taken]) -> Future[dict[str, Processed]]:
        """The processed fields of the items of a request, as `Plan.process` returns them. Its
        errors are those of `Plan.process`, and MmkitError where the process ended."""
        return self._threads.submit(self._run, items)

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [process.pid for process in list(self._all)]

    def close(self) -> None:
        """End them. What waits is cancelled."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._all):
            process.end()

    def _begin(self) -> None:
        self._new().wait(self._where)

    def _new(self) -> _Process:
        """Another process for this thread. It needs seconds to start; no request waits for it."""
        self._own.process = _Process(self._recipe)
        self._all.add(self._own.process)
        return self._own.process  # type: ignore[no-any-return]

    def _run(self, items: Mapping[str, Taken]) -> dict[str, Processed]:
        sent = {
            name: taken._replace(values=[_sent(value) for value in taken.values])
            for name, taken in items.items()
        }
        process: _Process = self._own.process
        try:
            process.wait(self._where)
            return process.run(sent)
        except (EOFError, OSError) as error:
            self._all.discard(process)
            process.end()
            if not self._is_closed:  # else it was ended on purpose
                self._new()
            remedy = "Send the request again; the server's log may tell why."
            got = "one that ended"
            if isinstance(error, TimeoutError):
                got = f"one that was silent for {error.args[0]:g} s and was ended"
            raise MmkitError(self._where, "one that answers", got, remedy) from error


class _Process:
    """One process, seen from the one that started it."""

    def __init__(self, recipe: bytes) -> None:
        self._folder = tempfile.mkdtemp(prefix="mmkit-render-", dir=FOLDER)
        self._connection, theirs = _CONTEXT.Pipe()
        arguments = theirs, recipe, self._folder
        self._process = _CONTEXT.Process(target=_work, args=arguments, daemon=True)
        self._process.start()
        self._is_ready = False
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def wait(self, where: str) -> None:
        """Return when it is ready."""
        if self._is_ready:
            return
        if (problem := self._received(START)) is not None:
            raise MmkitError(where, "one that starts", problem)
        self._is_ready = True

    def run(self, items: Mapping[str, Taken]) -> dict[str, Processed]:
        self._connection.send(pack(items, self._folder))
        answer = unpack(self._received(PATIENCE))
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    def _received(self, patience: float) -> Any:
        if not self._connection.poll(patience):
            raise TimeoutError(patience)
        return self._connection.recv()

    def end(self) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.join(1)
        self._process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(frozen=True)
class _File:
    """An image as a file, which the other process decodes."""

    content: np.ndarray

    def load(self) -> Any:
        from PIL import Image

        image = Image.open(io.BytesIO(self.content.tobytes()))
        image.load()
        return image


@dataclass(frozen=True)
class _Pixels:
    """An RGB image as its pixels."""

    pixels: np.ndarray

    def load(self) -> Any:
        from PIL import Image

        return Image.fromarray(self.pixels)


def _sent(value: Any) -> Any:
    """An item in the form for another process."""
    if (file := getattr(value, FILE, None)) is not None:
        return _File(np.frombuffer(file, np.uint8))
    if getattr(value, "mode", None) == "RGB":
        return _Pixels(np.asarray(value))
    if type(value) is dict:  # a record
        return {name: _sent(part) for name, part in value.items()}
    return value


FILE = "mmkit_file"
"""Attribute of a PIL image that has not been decoded yet: the bytes of its file."""


def _loaded(value: Any, where: str) -> Any:
    if type(value) is dict:  # a record
        return {name: _loaded(part, f"{where}.{name}") for name, part in value.items()}
    if not isinstance(value, (_File, _Pixels)):
        return value
    try:
        return value.load()
    except (OSError, ValueError, SyntaxError) as error:  # the kinds of formats differ
        raise InputError(where, "an image", str(error).rstrip(".")) from error


def _work(connection: Connection, recipe: bytes, folder: str) -> None:
    """The work of a render process, until the other end is gone."""
    os.nice(NICENESS)
    torch.set_num_threads(1)
    _keep_memory()
    try:
        plan = Recipe.plan(recipe)
        connection.send(None)
        while True:
            connection.send(_answer(plan, connection.recv(), folder))
    except (EOFError, OSError, KeyboardInterrupt):
        pass
    except Exception as error:  # of the spec, or of what its module imports
        connection.send(f"{type(error).__name__}: {error}".rstrip("."))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _keep_memory() -> None:
    """Use the memory of one image for the next: to get it from the system anew takes a tenth of the
    time."""
    with suppress(AttributeError, OSError):  # other C libraries than glibc
        mallopt = ctypes.CDLL(None).mallopt
        for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            mallopt(option, 2**30)
    with suppress(ImportError, AttributeError):
        import_module("PIL._imaging").set_blocks_max(_BLOCKS)


def _answer(plan: Plan, sent: Packed, folder: str) -> Packed:
    try:
        items: dict[str, Taken] = unpack(sent)
        for name, taken in items.items():
            where = plan.modalities[name].where
            values = [_loaded(value, f"{where}[{i}]") for i, value in enumerate(taken.values)]
            items[name] = taken._replace(values=values)
        return pack(plan.process(items), folder)
    except Exception as error:
        with suppress(Exception):
            return pack(error, folder)
        return pack(MmkitError(f"{type(error).__name__}: {error}"), folder)
