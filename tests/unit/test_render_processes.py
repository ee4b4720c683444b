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

from mmkit import InputError, Modality, ModelSpec, SpecError, Tensor, already_expanded, batched, between, embed
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


@pytest.mark.parametrize("how", ["by an item", "from outside"])
def test_an_end_costs_one_request(processes, how):
    """The others are answered meanwhile, and both processes are there again."""
    before = set(processes.pids)
    if how == "from outside":
        os.kill(min(before), signal.SIGKILL)
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
    st.sampled_from(["f4", "f8", "i8", "u1", "?"]), arrays.array_shapes(min_dims=0, min_side=0, max_side=4)
)


@given(ARRAYS, st.lists(st.integers(0, 9), max_size=3), st.data())
def test_what_travels_is_what_was_sent(array, rest, data):
    """Views too: they share memory there as they do here."""
    tensor = torch.from_numpy(array.copy())
    view = tensor.movedim(0, -1) if tensor.ndim else tensor
    part = tensor[data.draw(st.integers(0, len(tensor))) :] if tensor.ndim else tensor
    half = tensor.to(torch.bfloat16)
    sent = {"array": array, "tensor": tensor, "view": view, "part": part, "rest": rest, "half": half}
    packed = pack(sent, FOLDER)
    got = unpack(packed)
    assert not packed.path or not os.path.exists(packed.path)
    np.testing.assert_array_equal(got["array"], array)
    assert (got["array"].dtype, got["rest"]) == (array.dtype, rest)
    for name in ("tensor", "view", "part", "half"):
        one, other = sent[name], got[name]
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
    if tensor.numel():
        got["tensor"].zero_()
        assert not got["view"].any()
