"""Fields: splitting and joining, stated shapes and dtypes, and what a plan makes of them."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import mmkit.public
from mmkit import (
    Audio,
    SpecError,
    Tensor,
    batched,
    between,
    ceil_div,
    cfg,
    constant,
    derived,
    embed,
    fields,
    flat,
    identity,
    item,
    literal,
    replace,
)
from mmkit.language.expr import Scope
from mmkit.language.field import FIELD_KINDS, Batched, Batching, Constant, Derived, Field, Flat, compact
from mmkit.language.items.facts import AudioFacts
from mmkit.language.modality import FIELD_WORDS
from mmkit.plan.outline import NeedsProcessing, TensorFacts
from tests.profiles import scaled

from .common import bind_plan, make_modality

EMPTY_TABLE = torch.zeros(0, 4)
TABLE_OF_ONE_ROW = torch.arange(4.0).reshape(1, 4)
TABLE_OF_TWO_ROWS = torch.arange(8.0).reshape(2, 4)


@pytest.mark.parametrize(
    "column",
    [
        pytest.param(EMPTY_TABLE[:, 0], id="the first of no rows"),
        pytest.param(EMPTY_TABLE[:, 1], id="another of no rows"),
        pytest.param(TABLE_OF_ONE_ROW[:, 0], id="the first of one row"),
        pytest.param(TABLE_OF_ONE_ROW[:, 1], id="another of one row"),
        pytest.param(TABLE_OF_TWO_ROWS[:, 0], id="the first of two rows"),
        pytest.param(TABLE_OF_TWO_ROWS[:, 1], id="another of two rows"),
        pytest.param(torch.ones(()).expand(1), id="an expanded scalar"),
    ],
)
def test_a_column_of_a_table_can_be_sent(column):
    """A vector of one element keeps its stride in `contiguous()`; vLLM then cannot look at it as bytes."""
    compacted = compact(column)
    assert compacted.flatten().contiguous().view(torch.uint8).numel() == 4 * len(column)
    assert torch.equal(compacted, column)


@pytest.mark.parametrize("value", [torch.ones(()), torch.ones(3), torch.ones(3, 3), [1]])
def test_a_value_that_can_be_sent_stays_as_it_is(value):
    assert compact(value) is value


@given(st.integers(0, 5), st.lists(st.integers(0, 3), max_size=2))
def test_batched_is_undone_by_stacking(count, shape):
    data = torch.arange(count * math.prod(shape)).reshape(count, *shape)
    for form in (data, list(data)):
        parts = batched().split(form, [Scope()] * count)
        assert len(parts) == count
        for part, row in zip(parts, data, strict=True):
            assert torch.equal(part, row)


@given(st.integers(0, 5), st.integers(0, 5), st.lists(st.integers(0, 3), max_size=2))
def test_batched_refuses_another_number_of_items(rows, count, shape):
    assume(rows != count)
    data = torch.zeros(rows, *shape)
    for form in (data, list(data)):
        with pytest.raises(SpecError, match=f"expected {count} items along the first dimension, got {rows}"):
            batched().split(form, [Scope()] * count)


SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=5)


def make_scopes(sizes):
    return [Scope(item=SimpleNamespace(n=size)) for size in sizes]


def make_data(extent, dim):
    """Return a tensor of three dimensions with this extent along one of them."""
    shape = [2, 2, 2]
    shape[dim] = extent
    return torch.arange(4 * extent).reshape(shape)


@given(SIZES, st.integers(-3, 2))
def test_flat_is_undone_by_concatenating(sizes, dim):
    tensor = make_data(sum(sizes), dim)
    parts = flat(item.n, dim=dim).split(tensor, make_scopes(sizes))
    assert torch.equal(torch.cat(parts, dim=dim), tensor)
    assert [part.shape[dim] for part in parts] == sizes


@given(SIZES)
def test_a_flat_list_is_undone_by_joining(sizes):
    data = list(range(sum(sizes)))
    parts = flat(item.n).split(data, make_scopes(sizes))
    joined = []
    for part in parts:
        joined += part
    assert joined == data
    assert [len(part) for part in parts] == sizes


@given(SIZES, st.integers(-3, 2))
def test_flat_refuses_sizes_that_leave_something_over(sizes, dim):
    extent = sum(sizes) + 1
    sentence = f"expected sizes that add up to {extent}, .* got {sum(sizes)}"
    with pytest.raises(SpecError, match=sentence):
        flat(item.n, dim=dim).split(make_data(extent, dim), make_scopes(sizes))
    with pytest.raises(SpecError, match=sentence):
        flat(item.n).split(list(range(extent)), make_scopes(sizes))


# -- stated shape and dtype ------------------------------------------------------------------------------------------


def make_flat(**options):
    return flat(item.n, **options)


@pytest.mark.parametrize("is_bound", [False, True])
@pytest.mark.parametrize("make_field", [batched, make_flat])
@pytest.mark.parametrize(("rows", "lengths"), [(between(1, cfg.n), (1, 2)), (cfg.n, (2,))])
@pytest.mark.parametrize("columns", [item.n, 3])
def test_stated_shapes_and_dtypes_of_an_item(make_field, rows, lengths, columns, is_bound):
    scope = Scope(cfg=SimpleNamespace(n=2), item=SimpleNamespace(n=3))
    field = make_field(dtype="float32", shape=(rows, columns))
    if is_bound:
        field = field.bind(Scope(cfg=scope.cfg))
    for length in lengths:
        field.check(torch.zeros(length, 3), scope, 0)
    with pytest.raises(SpecError, match=r"item 1: expected dtype float32, got float64"):
        field.check(torch.zeros(2, 3, dtype=torch.float64), scope, 1)
    for shape in ((0, 3), (3, 3), (2, 2), (2,), (2, 3, 1), ()):
        with pytest.raises(SpecError, match=r"item 1: expected shape \((1\.\.)?2, 3\) per item, got"):
            field.check(torch.zeros(shape), scope, 1)


def test_a_dtype_or_its_name():
    assert batched(dtype=torch.bfloat16) == batched(dtype="bfloat16")
    assert Tensor(shape=(), dtype=torch.int32) == Tensor(shape=(), dtype="int32")


# -- the kinds of fields ---------------------------------------------------------------------------------------------


def list_kinds(kind):
    """Return the subclasses of a class, and theirs."""
    kinds = []
    for subclass in kind.__subclasses__():
        if subclass.__module__.startswith("mmkit."):
            kinds += [subclass, *list_kinds(subclass)]
    return kinds


def test_every_kind_of_fields_is_listed_and_exported():
    assert set(FIELD_KINDS) == set(list_kinds(Field))
    for kind in FIELD_KINDS:
        assert isinstance(kind.batching, Batching)
        assert getattr(mmkit.public, kind._word) is kind


def test_messages_name_every_kind_of_fields():
    assert FIELD_WORDS == "batched(), flat(), derived() or constant()"


class Wrapped(Batched):
    """A kind of another author: the part of an item is a table of one row, and the item that row."""

    keeps_shape = False

    _word = "wrapped"

    def take_parts(self, values, scopes):
        return [value.unsqueeze(0) for value in values]


ROWS = fields.x.shape[0]

FIELDS_AND_ROWS = {
    Batched: ({"x": batched()}, ROWS),
    Flat: ({"x": flat(item.length)}, ROWS),
    Derived: ({"x": batched(), "y": derived(ceil_div(item.length, 2), dtype="int64")}, fields.y),
    Constant: ({"x": batched(), "y": constant(cfg.n)}, ROWS * fields.y),
    Wrapped: ({"x": Wrapped()}, ROWS),
}
"""Fields for each kind of them, and how many rows an item takes by these."""


@pytest.mark.parametrize("kind", [*FIELD_KINDS, Wrapped])
def test_an_outline_has_the_shapes_of_the_fields(kind):
    """Or it is refused, where a kind of fields changes the shapes of items: it is never another one."""
    declared, rows = FIELDS_AND_ROWS[kind]
    modality = make_modality(
        item=Tensor((between(1, 9), 2)), layout=literal(9) + embed(5) * rows, update=replace(7), fields=declared
    )
    plan = bind_plan(modality)

    @settings(max_examples=scaled(10))
    @given(st.lists(st.integers(1, 9), max_size=3))
    def check(lengths):
        prompt = [3, *[7] * len(lengths)]
        preview = plan.preview(prompt, {"m": [torch.zeros(length, 2) for length in lengths]})
        facts = {"m": [TensorFacts(shape=(length, 2)) for length in lengths]}
        if lengths and not declared["x"].keeps_shape:
            with pytest.raises(NeedsProcessing, match=r"fields\.x\.shape\[0\], which only processing tells"):
                plan.outline(prompt, facts)
            return
        outline = plan.outline(prompt, facts)
        assert outline.prompt_token_ids == preview.prompt_token_ids
        assert outline.placements == preview.placements

    check()


# -- identity ----------------------------------------------------------------------------------------------------------


def test_samples_are_a_field_as_they_are():
    samples = np.linspace(-1, 1, 5, dtype=np.float32)
    modality = make_modality(item=Audio(8, least=2), layout=embed(5) * fields.x.shape[0], process=identity())
    plan = bind_plan(modality)
    preview = plan.preview([5] * 5, {"m": samples})
    field = preview.fields["m"][0]["x"]
    assert field.dtype == torch.float32
    assert field.tolist() == samples.tolist()
    outline = plan.outline([5] * 4, {"m": [AudioFacts(length=4)]})
    assert outline.prompt_token_ids == [5] * 4
