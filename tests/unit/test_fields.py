"""Fields: splitting and joining, stated shapes and dtypes, and what a plan makes of them."""

import itertools
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmkit
from mmkit import (
    Modality,
    ModelSpec,
    SpecError,
    Tensor,
    batched,
    between,
    cfg,
    embed,
    flat,
    hf,
    in_place,
    item,
    out,
    shared,
)
from mmkit.expr import Scope

WHERE = "spec.modality, fields['x']"
NAMES = {name: getattr(mmkit, name) for name in mmkit.__all__ if name != "MultiModalModel"}

extents = st.lists(st.integers(0, 4), min_size=1, max_size=5)


@given(st.integers(1, 5), st.lists(st.integers(0, 3), max_size=3))
def test_batched_is_undone_by_stacking(count, shape):
    data = torch.arange(count * int(np.prod(shape)), dtype=torch.float32).reshape(count, *shape)
    parts = batched().split(data, None, count, WHERE)
    assert len(parts) == count
    assert torch.equal(torch.stack(parts), data)
    assert batched().split(list(data), None, count, WHERE)[0].tolist() == data[0].tolist()


@given(extents, st.integers(0, 2), st.integers(1, 3), st.booleans())
def test_flat_is_undone_by_concatenating(sizes, dim, width, negative):
    shape = [width] * 3
    shape[dim] = sum(sizes)
    data = torch.arange(int(np.prod(shape))).reshape(shape)
    field = flat(item.n, dim=dim - 3 if negative else dim)
    parts = field.split(data, sizes, len(sizes), WHERE)
    assert [part.shape[dim] for part in parts] == sizes
    assert torch.equal(torch.cat(parts, dim=dim), data)


@given(extents)
def test_flat_lists_are_undone_by_chaining(sizes):
    data = list(range(sum(sizes)))
    parts = flat(item.n).split(data, sizes, len(sizes), WHERE)
    assert list(map(len, parts)) == sizes
    assert list(itertools.chain(*parts)) == data


@given(st.integers(0, 5))
def test_shared_gives_the_whole_to_every_item(count):
    data = torch.arange(3)
    assert all(part is data for part in shared().split(data, None, count, WHERE))
    assert len(shared().split(data, None, count, WHERE)) == count


@given(st.integers(0, 5), st.integers(0, 5))
def test_batched_counts(items, count):
    if items == count:
        assert len(batched().split(torch.zeros(items, 2), None, count, WHERE)) == count
    else:
        with pytest.raises(SpecError, match=f"expected {count} items along the first dimension, got {items}"):
            batched().split(torch.zeros(items, 2), None, count, WHERE)


@given(extents, st.integers(0, 12))
def test_contradictory_sizes_are_refused(sizes, extent):
    for data in (torch.zeros(extent, 2), [0] * extent):
        if sum(sizes) == extent:
            assert len(flat(item.n).split(data, sizes, len(sizes), WHERE)) == len(sizes)
        else:
            with pytest.raises(SpecError, match=f"expected sizes that add up to {extent}, .* got {sum(sizes)}"):
                flat(item.n).split(data, sizes, len(sizes), WHERE)


@pytest.mark.parametrize(
    "split",
    [
        pytest.param(lambda: flat(1, dim=3).split(torch.zeros(2), [1, 1], 2, WHERE), id="no such dim: IndexError"),
        pytest.param(lambda: flat(1, dim=1).split(np.zeros((3, 2)), [1, 2], 2, WHERE), id="numpy is split along dim 0"),
        pytest.param(lambda: batched().split(torch.zeros(()), None, 1, WHERE), id="0-d tensor: TypeError"),
        pytest.param(lambda: batched().split(3, None, 1, WHERE), id="number: TypeError"),
    ],
)
def test_outputs_that_cannot_be_split(split):
    with pytest.raises(SpecError):
        split()


# -- stated shape and dtype ------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=3), st.lists(st.integers(0, 3), max_size=3))
def test_stated_shapes_are_checked(stated, shape):
    field = batched(shape=stated)
    if stated == shape:
        field.check(torch.zeros(shape), Scope(), WHERE)
    else:
        with pytest.raises(SpecError, match="per item, got"):
            field.check(torch.zeros(shape), Scope(), WHERE)


@pytest.mark.parametrize("make", [batched, shared, lambda **options: flat(item.n, **options)])
def test_stated_dtypes_are_checked(make):
    field = make(dtype="float32", shape=(cfg.n, item.n))
    scope = Scope(cfg=SimpleNamespace(n=2), item=SimpleNamespace(n=3))
    for bound in (field, field.bind(Scope(cfg=scope.cfg))):
        bound.check(torch.zeros(2, 3), scope, WHERE)
        with pytest.raises(SpecError, match=r"expected dtype float32, got torch\.float64"):
            bound.check(torch.zeros(2, 3, dtype=torch.float64), scope, WHERE)
        with pytest.raises(SpecError, match=r"expected shape \(2, 3\) per item, got \(3, 2\)"):
            bound.check(torch.zeros(3, 2), scope, WHERE)
        with pytest.raises(SpecError, match="expected dtype float32, got list"):
            bound.check([0.0], scope, WHERE)


def test_shapes_may_be_functions():
    batched(shape=(lambda s: s.item.n,)).check(torch.zeros(3), Scope(item=SimpleNamespace(n=3)), WHERE)


def test_between_in_the_shape_of_a_field():
    field = batched(shape=(between(1, cfg.n), item.n)).bind(Scope(cfg=SimpleNamespace(n=8)))
    scope = Scope(item=SimpleNamespace(n=2))
    field.check(torch.zeros(3, 2), scope, WHERE)
    for shape in ((0, 2), (9, 2), (3, 3), (3,)):
        with pytest.raises(SpecError, match=r"expected shape \(1\.\.8, 2\) per item, got"):
            field.check(torch.zeros(shape), scope, WHERE)


def test_unknown_dtypes_are_refused():
    for dtype in ("flaot32", "float", "nn", torch.float32):
        with pytest.raises(SpecError, match="dtype of a field"):
            batched(dtype=dtype)


@pytest.mark.parametrize(
    "field",
    [
        batched(),
        shared(dtype="int64"),
        flat(item.n),
        flat(out.n * 2, dim=1, keep_on_cpu=True),
        batched(shape=(), dtype="float32"),
        batched(shape=(cfg.n, 3), keep_on_cpu=True),
        flat(3, shape=[cfg.n]),
    ],
    ids=repr,
)
def test_structure(field):
    assert eval(repr(field), dict(NAMES)) == field
    assert pickle.loads(pickle.dumps(field)) == field
    assert hash(pickle.loads(pickle.dumps(field))) == hash(field)


# -- in a plan -------------------------------------------------------------------------------------------------------


def plan(fields, process=None, **config):
    shape = (between(0, 8), 2)
    spec = ModelSpec(
        "spec",
        Modality("x", item=Tensor(shape=shape), layout=embed(5), update=in_place(), fields=fields, process=process),
    )
    return spec.bind(SimpleNamespace(vocab_size=10, **config)).modalities["x"]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_processing_ragged_items(lengths):
    """Law L8, for a process that returns one field of each kind; and L5, against each item on its own."""
    fields = {
        "rows": flat(out.count * 2, dim=1, shape=(2, out.count * 2), dtype="float32"),
        "count": batched(shape=(), dtype="int64"),
        "table": shared(shape=(3,)),
    }

    def process(items, scope):
        return {
            "rows": torch.cat([x.repeat(2, 1).T for x in items], dim=1),
            "count": torch.tensor([len(x) for x in items]),
            "table": torch.arange(scope.cfg.n),
        }

    modality = plan(fields, process, n=3)
    items = [torch.full((n, 2), float(i)) for i, n in enumerate(lengths)]
    made = modality.process(items)
    assert made.sizes == {"rows": [2 * n for n in lengths]}
    assert torch.equal(torch.cat([part["rows"] for part in made.parts], dim=1), made.data["rows"])
    for value, part in zip(items, made.parts, strict=True):
        (alone,) = modality.process([value]).parts
        assert alone.keys() == part.keys() == fields.keys()
        assert all(torch.equal(alone[name], part[name]) for name in fields)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.booleans())
def test_identity_passes_items_on(lengths, batch):
    modality = plan({"x": batched() if batch else flat(item.length)})
    items = [torch.full((n, 2), float(i)) for i, n in enumerate(lengths)]
    made = modality.process(items)
    assert [part["x"].tolist() for part in made.parts] == [value.tolist() for value in items]


def test_unpadding():
    """A processor that pads to the largest of the batch must not be seen (law L5)."""
    spec = ModelSpec(
        "spec",
        Modality(
            "x",
            item=Tensor(shape=(between(1, 8),)),
            layout=embed(5),
            update=in_place(),
            fields={"x": batched(shape=(item.length,)), "n": batched()},
            process=hf(outputs={"lengths": "n", "values": "x"}, unpad={"x": out.n}),
        ),
    )
    modality = spec.bind(SimpleNamespace(vocab_size=10)).modalities["x"]
    padded = {"values": torch.tensor([[1.0, 0.0], [2.0, 3.0]]), "lengths": torch.tensor([1, 2])}
    made = modality.finish(padded, [torch.zeros(1), torch.zeros(2)])
    assert [part["x"].tolist() for part in made.parts] == [[1.0], [2.0, 3.0]]
    assert [value.tolist() for value in made.data["x"]] == [[1.0], [2.0, 3.0]]


def test_missing_and_undeclared_outputs_are_refused():
    items = [torch.zeros(1, 2)]
    with pytest.raises(SpecError, match="expected the fields"):
        plan({"x": batched()}, lambda items, scope: {}).process(items)
    with pytest.raises(SpecError, match="expected the fields"):
        plan({"x": batched()}, lambda items, scope: {"x": None}).process(items)
    with pytest.raises(SpecError, match="declared fields"):
        plan({"x": batched()}, lambda items, scope: {"x": items, "y": items}).process(items)


@pytest.mark.parametrize("result", [None, 3], ids=repr)
def test_a_process_that_returns_no_dict(result):
    with pytest.raises(SpecError):
        plan({"x": batched()}, lambda items, scope: result).process([torch.zeros(1, 2)])


@pytest.mark.parametrize(
    "size", [lambda s: 2.5, lambda s: "x", lambda s: [1, 2], lambda s: -1], ids=["2.5", "text", "list", "-1"]
)
def test_sizes_of_flat_fields_are_whole_numbers(size):
    with pytest.raises(SpecError):
        plan({"x": flat(size)}).process([torch.zeros(2, 2)])
