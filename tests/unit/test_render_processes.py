"""Items that other processes process: what travels, what comes back, and what an end of one costs."""

import os
import signal
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mmkit import (
    InputError,
    Modality,
    ModelSpec,
    SpecError,
    Tensor,
    already_expanded,
    batched,
    between,
    embed,
    render_processes,
)
from mmkit.bound.calls import Taken
from mmkit.errors import MmkitError
from mmkit.render_processes import Recipe, RenderProcesses
from mmkit.shared_memory import FOLDER, pack, unpack

from .common import CONFIG


def process(items, scope):
    """Some items have no form, and one ends the process."""
    if items[0][0, 0] == -1:
        raise InputError("spec.m[0]", "a number that is not -1", "-1")
    if items[0][0, 0] == -2:
        os._exit(1)
    return {"x": items}


SPEC = ModelSpec(
    "spec",
    Modality(
        "m",
        item=Tensor(shape=(between(1, 3), 2)),
        layout=embed(5),
        update=already_expanded(),
        fields={"x": batched()},
        process=process,
    ),
)
RECIPE = Recipe(SPEC, CONFIG, None, None, {}, None, None)


def items(*first):
    return {"m": Taken([torch.full((1 + i % 3, 2), float(value)) for i, value in enumerate(first)], False, len(first))}


@pytest.fixture(scope="module")
def processes():
    processes = RenderProcesses(RECIPE, 2)
    processes.wait()
    yield processes
    processes.close()


def test_a_refusal_is_the_same(processes):
    """What is processed is, too: tests/path/test_render_processes.py."""
    with pytest.raises(InputError, match=r"spec.m\[0\]: expected a number that is not -1, got -1."):
        processes.process(items(-1)).result(60)


@pytest.mark.parametrize("how", ["by an item", "from outside", "it hangs"])
def test_an_end_costs_one_request(processes, how, monkeypatch):
    """The others are answered meanwhile, and both processes are there again."""
    before = set(processes.pids)
    if how == "from outside":
        os.kill(min(before), signal.SIGKILL)
    if how == "it hangs":
        monkeypatch.setattr(render_processes, "PATIENCE", 3)
        os.kill(min(before), signal.SIGSTOP)
    works = [processes.process(items(-2 if how == "by an item" and i == 3 else i)) for i in range(12)]
    failed = [i for i, work in enumerate(works) if isinstance(work.exception(60), MmkitError)]
    assert failed == [3] if how == "by an item" else len(failed) <= 1
    for i, work in enumerate(works):
        assert i in failed or float(work.result()["m"].data["x"][0][0, 0]) == i
    until = time.monotonic() + 30
    while time.monotonic() < until and not set(processes.pids) - before:
        processes.process(items(1)).exception(60)
    assert (len(processes.pids), len(set(processes.pids) - before)) == (2, 1)


def test_what_another_process_cannot_import_is_refused():
    local = ModelSpec("mine", *SPEC.modalities)
    with pytest.raises(SpecError, match=r"mine, render processes: expected a spec that another process can import"):
        RenderProcesses(Recipe(local, CONFIG, None, None, {}, None, None), 1)


ARRAYS = arrays.arrays(
    st.sampled_from(["f4", "f8", "i8", "u1", "?", "c8"]), arrays.array_shapes(min_dims=0, min_side=0, max_side=5)
)
VIEWS = {
    "itself": lambda array: array,
    "start": lambda array: array[:1],
    "end": lambda array: array[1:],
    "strided": lambda array: array[::2],
    "turned": lambda array: array.T,
    "repeated": lambda array: np.broadcast_to(array, (2, *array.shape)),
    "tensor": torch.from_numpy,
    "start as a tensor": lambda array: torch.from_numpy(array)[:1],
    "turned as a tensor": lambda array: torch.from_numpy(array).movedim(0, -1),
    "repeated as a tensor": lambda array: torch.from_numpy(array).expand(2, *array.shape),
    "half": lambda array: torch.from_numpy(array.real).to(torch.bfloat16),
    "conjugate": lambda array: torch.from_numpy(array).conj(),
}


@given(st.lists(ARRAYS, min_size=1, max_size=3), st.data())
def test_what_travels_is_what_was_sent(bases, data):
    """Views of one array, too, in any order, each as often as it comes."""
    ways = data.draw(st.lists(st.tuples(st.sampled_from(bases), st.sampled_from(list(VIEWS))), max_size=6))
    sent = [VIEWS[way](np.atleast_1d(base)) for base, way in ways]
    sent += sent[:1]
    packed = pack(sent, FOLDER)
    got = unpack(packed)
    assert not packed.path or not os.path.exists(packed.path)
    for one, other in zip(sent, got, strict=True):
        assert (type(one), one.dtype, one.shape) == (type(other), other.dtype, other.shape)
        both = (torch.tensor(value) if isinstance(value, np.ndarray) else value for value in (one, other))
        torch.testing.assert_close(*both, rtol=0, atol=0, equal_nan=True)
