"""Layouts against an independent evaluator that builds the tokens one by one (tests/unit/naive.py)."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmkit import SpecError, cfg, each, embed, fields, item, literal, tok, where
from mmkit.expr import Scope, leaves
from mmkit.layout import Fixed, Layout, Placeholder, layout, nothing
from mmkit.vocabulary import Vocabulary

from . import naive
from .common import NAMES, Tokenizer, leaves_of

CONFIG = {"a": 0, "b": 1, "c": 3, "rows": [2, 0, 5]}
ITEM = {"width": 2, "height": 3, "tiles": (4, 1), "none": 0}
ENV = {"cfg": CONFIG, "item": ITEM}


SCOPE = Scope(cfg=SimpleNamespace(**CONFIG), item=SimpleNamespace(**ITEM), tok=Vocabulary(Tokenizer()))
STATIC = Scope(cfg=SCOPE.cfg, tok=SCOPE.tok)


def numbers(loops: int):
    known = [("cfg", "a"), ("cfg", "b"), ("cfg", "c"), ("item", "width"), ("item", "height"), ("item", "none")]
    return st.integers(0, 4) | st.sampled_from(known + [("loop", depth) for depth in range(loops)])


@st.composite
def trees(draw, depth: int = 3, loops: int = 0, each_allowed: bool = True):
    """A layout tree; shrinks towards one literal token."""
    kinds = ["token", "embed"]
    if depth:
        kinds += ["sequence", "repeat"] + ["each"] * (2 * each_allowed)
    kind = draw(st.sampled_from(kinds))
    if kind in ("token", "embed"):
        return kind, draw(numbers(loops))
    if kind == "sequence":
        parts = trees(depth=depth - 1, loops=loops, each_allowed=each_allowed)
        return kind, draw(st.lists(parts, max_size=3))
    if kind == "repeat":
        return kind, draw(trees(depth=depth - 1, loops=loops, each_allowed=each_allowed)), draw(numbers(loops))
    over = draw(
        numbers(loops)
        | st.sampled_from([("cfg", "rows"), ("item", "tiles")])
        | st.lists(st.integers(0, 3), max_size=3).map(list)
    )
    body = draw(trees(depth=depth - 1, loops=loops + 1))
    around = st.none() | trees(depth=1, loops=loops, each_allowed=False)
    return kind, over, body, draw(around), draw(around)


def build(tree, loops=()):
    """The layout that a tree stands for, written with the public combinators."""

    def value(v):
        if not isinstance(v, tuple):
            return tuple(v) if isinstance(v, list) else v
        where_, name = v
        return loops[name] if where_ == "loop" else getattr({"cfg": cfg, "item": item}[where_], name)

    match tree:
        case ("token", v):
            return literal(value(v))
        case ("embed", v):
            return embed(value(v))
        case ("repeat", body, count):
            return build(body, loops) * value(count)
        case ("sequence", parts):
            layout = nothing
            for part in parts:
                layout += build(part, loops)
            return layout
    _, over, body, sep, last = tree
    options = {name: build(part, loops) for name, part in (("sep", sep), ("last", last)) if part is not None}
    return each(value(over), lambda x: build(body, (*loops, x)), **options)


@given(trees())
def test_agrees_with_the_naive_evaluator(tree):
    block = build(tree).lay(SCOPE)
    expected = naive.lay(tree, ENV)
    assert block.ids == [token for token, _ in expected]
    assert list(block.mask) == [embeds for _, embeds in expected]
    assert len(block) == len(expected)
    assert block.num_embeds == sum(block.mask)
    assert block.embed_ids == {token for token, embeds in expected if embeds}
    if all(block.mask):
        assert block.is_embed is None
    else:
        assert block.is_embed.dtype == torch.bool
        assert block.is_embed.tolist() == [embeds for _, embeds in expected]


@given(trees())
def test_binding_changes_nothing(tree):
    whole = build(tree)
    bound = whole.bind(STATIC)
    assert bound.lay(SCOPE) == whole.lay(SCOPE)
    assert bound.lay(Scope(item=SCOPE.item)) == whole.lay(SCOPE), "a bound layout still asks for the config"
    assert bound.bind(STATIC).lay(SCOPE) == whole.lay(SCOPE)
    assert pickle.loads(pickle.dumps(bound)).lay(SCOPE) == whole.lay(SCOPE)
    assert not any(leaf.root == "cfg" for leaf in bound.leaves())
    if not any(leaf.root == "item" for leaf in whole.leaves()):
        assert isinstance(bound, Fixed)
        assert list(bound.fixed()) == [whole.lay(SCOPE)]
        assert eval(repr(bound), dict(NAMES)).lay(SCOPE) == whole.lay(SCOPE)


@given(trees())
def test_leaves_name_everything_that_varies(tree):
    """Two scopes that agree on the leaves give the same layout; loop variables are nobody's leaves."""
    whole = build(tree)
    names = {repr(leaf) for leaf in whole.leaves()}
    assert all(name.startswith(("cfg.", "item.")) for name in names)
    facts = {key: (value if f"item.{key}" in names else None) for key, value in ITEM.items()}
    assert whole.lay(Scope(cfg=SCOPE.cfg, item=SimpleNamespace(**facts))) == whole.lay(SCOPE)


@given(trees())
def test_structure_survives_repr_pickle_and_hash(tree):
    whole = build(tree)
    assert build(tree) == whole
    assert hash(build(tree)) == hash(whole)
    assert pickle.loads(pickle.dumps(whole)) == whole
    assert eval(repr(whole), dict(NAMES)).lay(SCOPE) == whole.lay(SCOPE)


@given(trees(depth=2))
def test_evaluating_twice_shares_nothing_that_changes(tree):
    """Layouts are reused between requests; laying one out must not change it."""
    bound = build(tree).bind(STATIC)
    first = bound.lay(SCOPE)
    ids = list(first.ids)
    (bound + literal(1) + bound * 2).lay(SCOPE)
    assert bound.lay(SCOPE).ids == ids == first.ids


@given(st.lists(trees(depth=1), max_size=3), st.integers(0, 3))
def test_sums_and_products(parts, count):
    layouts = list(map(build, parts))
    whole = nothing
    for part in layouts:
        whole = whole + part
    ids = [token for part in parts for token, _ in naive.lay(part, ENV)]
    assert whole.lay(SCOPE).ids == ids
    assert (whole * count).lay(SCOPE) == (count * whole).lay(SCOPE)
    assert (whole * count).lay(SCOPE).ids == ids * count


# -- single combinators ----------------------------------------------------------------------------------------------


def lay(value, **facts):
    return layout(value).lay(Scope(cfg=SimpleNamespace(**CONFIG), item=SimpleNamespace(**facts), tok=SCOPE.tok))


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        (5, [5]),
        ([5, 6], [5, 6]),
        ((5, 6), [5, 6]),
        ([], []),
        (nothing, []),
        (cfg.c, [3]),
        (cfg.rows, [2, 0, 5]),
        ([cfg.c, 5], [3, 5]),
        (lambda s: [s.cfg.c, 9], [3, 9]),
        (lambda s: embed(4) * 2, [4, 4]),
        (lambda s: nothing, []),
        (where(cfg.b, embed(1), literal(2)), [1]),
        (where(cfg.a, embed(1), literal(2) * 2), [2, 2]),
        (tok["<image>"], [7]),
        (tok.text("ab"), [97, 98]),
        (tok.text(""), []),
        (literal(tok["<image>"], [1, 2], tok.text("a") * 2), [7, 1, 2, 97, 97]),
        ([1, 2] + embed(3), [1, 2, 3]),  # noqa: RUF005
        (np.int64(4), [4]),
        (embed(np.int64(4)) * np.int64(2), [4, 4]),
        (embed(torch.tensor(4)) * torch.tensor(2), [4, 4]),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_can_be_a_layout(value, ids):
    assert lay(value).ids == ids
    assert layout(value).bind(STATIC).lay(SCOPE).ids == ids


def test_a_function_or_where_may_choose_an_embedding_layout():
    for value in (lambda s: embed(4) * s.item.width, where(item.width > 1, embed(4) * item.width, literal(0))):
        block = lay(value, width=2)
        assert (block.ids, block.num_embeds) == ([4, 4], 2)


def test_each_over_numbers_and_sequences():
    assert lay(each(3, lambda x: literal(x + 10))).ids == [10, 11, 12]
    assert lay(each(item.sizes, lambda x: embed(1) * x + 2), sizes=(2, 0, 1)).ids == [1, 1, 2, 2, 1, 2]
    assert lay(each(item.grid, lambda g: embed(1) * g[0] + literal(9) * g[1]), grid=[(1, 2), (0, 1)]).ids == [
        1,
        9,
        9,
        9,
    ]
    assert lay(each(lambda s: range(s.item.n), literal), n=2).ids == [0, 1]
    assert lay(each(item.n, lambda x: 5), n=np.int64(2)).ids == [5, 5]


def test_each_nests():
    grid = each(2, lambda y: each(3, lambda x: literal(10 * y + x), sep=99, last=literal(y)), sep=77)
    assert lay(grid).ids == [0, 99, 1, 99, 2, 0, 77, 10, 99, 11, 99, 12, 1]
    triangle = each(item.n, lambda y: each(y + 1, lambda x: embed(x)))
    assert lay(triangle, n=3).ids == [0, 0, 1, 0, 1, 2]
    assert triangle.bind(STATIC).lay(Scope(item=SimpleNamespace(n=3))).ids == [0, 0, 1, 0, 1, 2]


def test_loops_have_names_of_their_own():
    def nested(*outer):
        return each([len(outer)], lambda x: nested(*outer, x)) if len(outer) < 8 else literal(outer)

    deep = nested()
    assert lay(deep).ids == lay(eval(repr(deep), dict(NAMES))).ids == list(range(8))


def test_siblings_may_use_the_same_variable():
    both = each(2, lambda x: literal(x)) + each(2, lambda x: literal(x + 5))
    assert lay(both).ids == [0, 1, 5, 6]
    assert lay(each(2, lambda y: each(2, lambda x: literal(x)) + each(2, lambda x: literal(y + 5)))).ids == [
        *[0, 1, 5, 5],
        *[0, 1, 6, 6],
    ]


@pytest.mark.parametrize("place", ["body", "sep"])
def test_a_prepared_layout_keeps_its_own_loop_variable(place):
    row = each(3, lambda y: literal(y))
    if place == "body":
        assert lay(each(2, lambda x: row + literal(x + 100))).ids == [0, 1, 2, 100, 0, 1, 2, 101]
    else:
        assert lay(each(2, lambda x: literal(50), sep=row)).ids == [50, 0, 1, 2, 50]


def test_an_inner_each_of_its_own():
    nested = each(item.n, lambda y: each(2, lambda x: embed(x)))
    assert nested.bind(STATIC).lay(Scope(item=SimpleNamespace(n=2))).ids == [0, 1, 0, 1]


def test_each_over_a_processed_count():
    scope = Scope(fields={"n": torch.tensor(3)})
    assert (embed(1) * fields.n).lay(scope).ids == [1, 1, 1]
    assert each(fields.n, lambda x: embed(1)).lay(scope).ids == [1, 1, 1]


def test_each_restores_its_depth_after_an_error():
    def broken(x):
        raise KeyError("body")

    with pytest.raises(KeyError):
        each(2, broken)
    assert each(2, lambda x: literal(x)) == each(2, lambda y: literal(y))
    assert repr(each(2, lambda y: literal(y))) == "each(2, lambda x: x)"


# -- refusals --------------------------------------------------------------------------------------------------------

BAD_NUMBERS = [-1, 1.0, 2.5, True, False, None, "3", float("nan"), np.float32(1), np.bool_(True), -(2**70), [1], {}]


@pytest.mark.parametrize("bad", BAD_NUMBERS, ids=repr)
def test_bad_ids_and_counts_are_refused(bad):
    scope = Scope(cfg=SimpleNamespace(bad=bad), item=SimpleNamespace(bad=bad))
    for at in (cfg.bad, item.bad):
        with pytest.raises(SpecError, match=r"\.bad: expected a token id, a whole number >= 0, got"):
            embed(at).lay(scope)
        with pytest.raises(SpecError, match=r"\.bad: expected a repetition count, a whole number >= 0, got"):
            (embed(1) * at).lay(scope)
    if not isinstance(bad, list):
        with pytest.raises(SpecError, match=r"cfg\.bad: expected a token id, a whole number"):
            (literal(cfg.bad) + 1).bind(scope)
    if not isinstance(bad, (list, dict)):
        with pytest.raises(SpecError, match=r"expected the number of elements of each\(\), or a sequence, a whole"):
            each(cfg.bad, lambda x: 1).lay(scope)


@pytest.mark.parametrize(
    "make", [lambda: embed(1) * fields.n, lambda: embed(fields.n), lambda: literal(fields.n[None])]
)
def test_tensors_of_several_elements_are_refused(make):
    with pytest.raises(SpecError, match=r"fields\.n"):
        make().lay(Scope(fields={"n": torch.tensor([1, 2])}))


@pytest.mark.parametrize("make", [torch.tensor, np.array, list])
def test_ids_of_a_field(make):
    assert literal(fields.n).lay(Scope(fields={"n": make([1, 2])})).ids == [1, 2]
    assert literal(lambda s: s.fields["n"]).lay(Scope(fields={"n": make([])})).ids == []


def test_embed_takes_tokens_apart():
    assert embed(tok["<image>"]) == embed(tok["<image>"])
    assert lay(embed(tok["<image>"])) == Placeholder([7], b"\x01")


def test_lists_of_ids_can_be_hashed():
    assert literal([1, 2]) == literal((1, 2)) == layout([1, 2])
    assert hash(literal([1, 2])) == hash(layout([1, 2]))
    assert hash(each([1, 2], literal)) == hash(each((1, 2), literal))


def test_a_sequence_of_one_part_is_that_part():
    assert nothing + embed(1) == embed(1)


def test_layouts_have_no_length_and_no_truth_to_get_wrong():
    assert isinstance(nothing, Layout)
    with pytest.raises(TypeError):
        len(embed(1))


def test_leaves_of_layouts_inside_where():
    assert leaves(where(item.n, embed(cfg.b), literal(1))) == leaves_of(item.n, cfg.b)
