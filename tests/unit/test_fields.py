"""Fields: splitting and joining, stated shapes and dtypes, and what a plan makes of them."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmkit import SpecError, Tensor, batched, between, cfg, flat, item
from mmkit.language.expr import Scope
from mmkit.language.field import compact

TABLES = [torch.arange(4.0 * rows).reshape(rows, 4) for rows in range(3)]


@pytest.mark.parametrize("column", [*(table[:, i] for table in TABLES for i in (0, 1)), torch.ones(()).expand(1)])
def test_a_column_of_a_table_can_be_sent(column):
    """A vector of one element keeps its stride in `contiguous()`; vLLM then cannot look at it as bytes."""
    sent = compact(column)
    assert sent.flatten().contiguous().view(torch.uint8).numel() == 4 * len(column)
    assert torch.equal(sent, column)
    for other in (torch.ones(()), torch.ones(3), torch.ones(3, 3), [1]):
        assert compact(other) is other


@given(st.integers(0, 5), st.integers(0, 5), st.lists(st.integers(0, 3), max_size=2))
def test_batched_is_undone_by_stacking(items, count, shape):
    data = torch.arange(items * int(np.prod(shape))).reshape(items, *shape)
    for form in (data, list(data)):
        if items == count:
            parts = batched().split(form, [Scope()] * count)
            assert len(parts) == count
            assert all(torch.equal(part, row) for part, row in zip(parts, data, strict=True))
        else:
            with pytest.raises(SpecError, match=f"expected {count} items along the first dimension, got {items}"):
                batched().split(form, [Scope()] * count)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(-3, 2), st.integers(0, 1))
def test_flat_is_undone_by_concatenating(sizes, dim, surplus):
    shape = [2, 2, 2]
    shape[dim] = extent = sum(sizes) + surplus
    tensor = torch.arange(4 * extent).reshape(shape)
    scopes = [Scope(item=SimpleNamespace(n=size)) for size in sizes]
    for data, field in ((tensor, flat(item.n, dim=dim)), (list(range(extent)), flat(item.n))):
        if surplus:
            with pytest.raises(SpecError, match=f"expected sizes that add up to {extent}, .* got {sum(sizes)}"):
                field.split(data, scopes)
        else:
            parts = field.split(data, scopes)
            joined = torch.cat(parts, dim=dim).tolist() if data is tensor else [*itertools.chain(*parts)]
            assert joined == (tensor.tolist() if data is tensor else data)
            assert [part.shape[dim] if data is tensor else len(part) for part in parts] == sizes


# -- stated shape and dtype ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [batched, lambda **options: flat(item.n, **options)])
@pytest.mark.parametrize(("rows", "lengths"), [(between(1, cfg.n), (1, 2)), (cfg.n, (2,))])
@pytest.mark.parametrize("columns", [item.n, 3])
def test_stated_shapes_and_dtypes_of_an_item(make, rows, lengths, columns):
    field = make(dtype="float32", shape=(rows, columns))
    scope = Scope(cfg=SimpleNamespace(n=2), item=SimpleNamespace(n=3))
    for bound in (field, field.bind(Scope(cfg=scope.cfg))):
        for length in lengths:
            bound.check(torch.zeros(length, 3), scope, 0)
        with pytest.raises(SpecError, match=r"item 1: expected dtype float32, got float64"):
            bound.check(torch.zeros(2, 3, dtype=torch.float64), scope, 1)
        for shape in ((0, 3), (3, 3), (2, 2), (2,), (2, 3, 1), ()):
            with pytest.raises(SpecError, match=r"item 1: expected shape \((1\.\.)?2, 3\) per item, got"):
                bound.check(torch.zeros(shape), scope, 1)


def test_a_dtype_or_its_name():
    assert batched(dtype=torch.bfloat16) == batched(dtype="bfloat16")
    assert Tensor(shape=(), dtype=torch.int32) == Tensor(shape=(), dtype="int32")
