"""Layouts against an independent evaluator that builds the tokens one by one (tests/unit/naive.py)."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmkit import SpecError, cfg, each, embed, fields, item, literal, tok, where
from mmkit.language.expr import Scope
from mmkit.language.layout import Fixed, layout, nothing
from mmkit.language.vocabulary import Vocabulary

from . import naive
from .common import NAMES, Tokenizer

CONFIG = {"a": 0, "b": 1, "c": 3, "rows": [2, 0, 5]}
ITEM = {"width": 2, "height": 3, "tiles": (4, 1), "none": 0}
ENV = {"cfg": CONFIG, "item": ITEM}


SCOPE = Scope(cfg=SimpleNamespace(**CONFIG), item=SimpleNamespace(**ITEM), tok=Vocabulary(Tokenizer()))
STATIC = Scope(cfg=SCOPE.cfg, tok=SCOPE.tok)


KNOWN = [("cfg", "a"), ("cfg", "b"), ("cfg", "c"), ("item", "width"), ("item", "height"), ("item", "none")]
SEQUENCES = [("cfg", "rows"), ("item", "tiles")]
ROOTS = {"cfg": cfg, "item": item}


@st.composite
def trees(draw, depth: int = 3, loops: int = 0, known=KNOWN, sequences=SEQUENCES):
    """A layout tree over numbers and sequences of these names; shrinks towards one literal token."""
    numbers = st.integers(0, 4) | st.sampled_from(known + [("loop", depth) for depth in range(loops)])
    kind = draw(st.sampled_from(["token", "embed", *["sequence", "repeat", "where", "each", "each"] * bool(depth)]))
    if kind in ("token", "embed"):
        return kind, draw(numbers)
    inner = trees(depth - 1, loops, known, sequences)
    if kind == "sequence":
        return kind, draw(st.lists(inner, max_size=3))
    if kind == "repeat":
        return kind, draw(inner), draw(numbers)
    if kind == "where":
        return kind, draw(numbers), draw(st.integers(0, 3)), draw(inner), draw(inner)
    over = draw(numbers | st.sampled_from(sequences) | st.lists(st.integers(0, 3), max_size=3))
    body = draw(trees(depth - 1, loops + 1, known, sequences))
    around = st.none() | inner
    return kind, over, body, draw(around), draw(around)


def build(tree, loops=(), mark=embed, token=literal, roots=ROOTS):
    """The layout that a tree stands for, written with the public combinators; `mark` makes an embed(), and `token` a
    literal."""

    def value(v):
        if not isinstance(v, tuple):
            return tuple(v) if isinstance(v, list) else v
        where_, name = v
        return loops[name] if where_ == "loop" else getattr(roots[where_], name)

    def part(of, *more):
        return build(of, (*loops, *more), mark, token, roots)

    match tree:
        case ("token", v):
            return token(value(v))
        case ("embed", v):
            return mark(value(v))
        case ("repeat", body, count):
            return part(body) * value(count)
        case ("where", v, limit, then, other):
            return layout(where(value(v) > limit, part(then), part(other)))
        case ("sequence", parts):
            return sum(map(part, parts), nothing)
    _, over, body, sep, last = tree
    options = {name: part(own) for name, own in (("sep", sep), ("last", last)) if own is not None}
    return each(value(over), lambda x: part(body, x), **options)


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
        assert torch.equal(block.is_embed, torch.tensor([embeds for _, embeds in expected]))


@given(trees())
def test_binding_changes_nothing(tree):
    whole = build(tree)
    bound, laid = whole.bind(STATIC), whole.lay(SCOPE)
    assert bound.lay(SCOPE) == laid
    assert bound.lay(Scope(item=SCOPE.item)) == laid, "a bound layout still asks for the config"
    assert bound.bind(STATIC).lay(SCOPE) == laid
    assert pickle.loads(pickle.dumps(bound)).lay(SCOPE) == laid
    assert not any(leaf.root == "cfg" for leaf in bound.dependencies())
    if not any(leaf.root == "item" for leaf in whole.dependencies()):
        assert isinstance(bound, Fixed)
        assert list(bound.find_fixed_parts()) == [laid]
        assert eval(repr(bound), dict(NAMES)).lay(SCOPE) == laid
    assert (bound + literal(1) + 2 * bound).lay(SCOPE).ids == [*laid.ids, 1, *laid.ids, *laid.ids]
    assert bound.lay(SCOPE) == laid, "layouts are reused between requests"


@given(trees())
def test_structure_and_leaves(tree):
    """Two scopes that agree on the leaves give the same layout; loop variables are nobody's leaves."""
    whole = build(tree)
    assert build(tree) == whole == pickle.loads(pickle.dumps(whole))
    assert hash(build(tree)) == hash(whole)
    assert eval(repr(whole), dict(NAMES)).lay(SCOPE) == whole.lay(SCOPE)
    names = {repr(leaf) for leaf in whole.dependencies()}
    assert all(name.startswith(("cfg.", "item.")) for name in names)
    facts = {key: (value if f"item.{key}" in names else None) for key, value in ITEM.items()}
    assert whole.lay(Scope(cfg=SCOPE.cfg, item=SimpleNamespace(**facts))) == whole.lay(SCOPE)


# -- single combinators ----------------------------------------------------------------------------------------------

FACTS = SimpleNamespace(width=2, grid=[(1, 2), (0, 1)], n=np.int64(2))
WITH_FIELDS = Scope(
    cfg=SCOPE.cfg, tok=SCOPE.tok, item=FACTS, fields={"n": torch.tensor(3), "ids": torch.tensor([1, 2])}
)


def nested(*outer):
    return each([len(outer)], lambda x: nested(*outer, x)) if len(outer) < 8 else literal(outer)


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        (5, [5]),
        ([5, 6], [5, 6]),
        (nothing, []),
        ([cfg.c, 5], [3, 5]),
        (lambda s: [s.cfg.c, 9], [3, 9]),
        (lambda s: embed(4) * s.item.width, [4, 4]),
        (tok["<image>"] + where(cfg.a, embed(1), literal(2) * 2) + tok["<image>"], [7, 2, 2, 7]),
        (tok["<image>"], [7]),
        (tok.text("ab"), [97, 98]),
        (tok.text(""), []),
        (literal(tok["<image>"], [1, 2], tok.text("a") * 2), [7, 1, 2, 97, 97]),
        ([1, 2] + embed(3), [1, 2, 3]),
        (np.int64(4), [4]),
        (embed(np.int64(4)) * np.int64(2), [4, 4]),
        (embed(torch.tensor(4)) * torch.tensor(2), [4, 4]),
        (embed(1) * fields.n, [1, 1, 1]),
        (fields.ids, [1, 2]),
        (lambda s: s.fields["ids"].numpy(), [1, 2]),
        (lambda s: torch.tensor([]), []),
        (each(fields.n, lambda x: 5), [5, 5, 5]),
        (each(lambda s: range(s.item.n), literal), [0, 1]),
        (each(item.grid, lambda g: embed(1) * g[0] + literal(9) * g[1]), [1, 9, 9, 9]),
        (each(item.n, lambda y: each(y + 1, lambda x: embed(x))), [0, 0, 1]),
        (nested(), list(range(8))),
        (eval(repr(nested()), dict(NAMES)), list(range(8))),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_can_be_a_layout(value, ids):
    laid = layout(value).lay(WITH_FIELDS)
    assert laid.ids == ids
    assert layout(value).bind(STATIC).lay(WITH_FIELDS) == laid


def test_each_restores_its_depth_after_an_error():
    with pytest.raises(ZeroDivisionError):
        each(2, lambda x: literal(1 // 0))
    assert each(2, lambda x: literal(x)) == each(2, lambda y: literal(y))
    assert repr(each(2, lambda y: literal(y))) == "each(2, lambda x: x)"


# -- refusals --------------------------------------------------------------------------------------------------------

BAD_NUMBERS = [-1, 1.0, 2.5, True, False, None, "3", float("nan"), np.float32(1), np.bool_(True), -(2**70)]
SEQUENCES = [[1], torch.tensor([1, 2])]


@pytest.mark.parametrize("bad", BAD_NUMBERS + SEQUENCES, ids=repr)
def test_bad_ids_and_counts_are_refused(bad):
    scope = Scope(cfg=SimpleNamespace(bad=bad), item=SimpleNamespace(bad=bad))
    number = r"\.bad: expected {}, a whole number >= 0, got"
    for at in (cfg.bad, item.bad):
        with pytest.raises(SpecError, match=number.format("a token id")):
            embed(at).lay(scope)
        with pytest.raises(SpecError, match=number.format("a repetition count")):
            (embed(1) * at).lay(scope)
    if not isinstance(bad, (list, torch.Tensor)):
        with pytest.raises(SpecError, match=number.format("a token id")):
            (literal(cfg.bad) + 1).bind(scope)
        with pytest.raises(SpecError, match=number.format(r"the number of elements of each\(\), or a sequence")):
            each(cfg.bad, lambda x: 1).lay(scope)


def test_equal_layouts():
    assert literal([1, 2]) == literal((1, 2)) == layout([1, 2])
    assert hash(each([1, 2], literal)) == hash(each((1, 2), literal))
    assert nothing + embed(1) == embed(1), "a sequence of one part is that part"
    assert embed(tok["<image>"]) == embed(tok["<image>"]) != literal(tok["<image>"])
