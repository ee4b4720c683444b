"""Expressions: structure, evaluation against plain Python, folding, and what they refuse."""

import ast
import operator
import pickle
import re
from dataclasses import replace
from functools import partial
from itertools import product
from math import ceil, floor
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmkit import SpecError, ceil_div, cfg, embed, fields, item, kwargs, later, maximum, minimum, proc, tok, where
from mmkit.language.expr import (
    Expr,
    Fields,
    Scope,
    as_expression,
    dependencies,
    evaluate,
    fold,
    is_equal_declaration,
    to_python,
)
from mmkit.language.vocabulary import Vocabulary

from .common import NAMES, Tokenizer, find_leaves

CONFIG = {"a": 3, "b": 7, "zero": 0, "half": 0.5}
ITEM = {"width": 5, "height": 2, "index": 0}
SCOPE = Scope(
    cfg=SimpleNamespace(**CONFIG, kind="qwen", sizes=[3, 4, 5], vision={"size": 8}, image=7, minus=-1),
    proc=SimpleNamespace(sizes=[9]),
    tok=Vocabulary(Tokenizer()),
    item=SimpleNamespace(**ITEM, shape=(2, 3, 4), length=2),
    fields=Fields(grid=torch.tensor([3, 4, 5]), one=3),
    kwargs={"other": 1},
)
STATIC = Scope(cfg=SCOPE.cfg, proc=SCOPE.proc, tok=SCOPE.tok, kwargs=SCOPE.kwargs)

# -- against plain Python --------------------------------------------------------------------------------------------


class Drawn(NamedTuple):
    """An expression as a user writes it, a function that computes its value by plain Python, and what it reads."""

    expr: Any
    value: Any
    reads: frozenset[Any] = frozenset()


def eager(function):
    return lambda *parts: function(*(part() for part in parts))


def chosen(test, then, other):
    return then() if test() else other()


COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
TOTAL = [(op, eager(op), 2) for op in (operator.add, operator.sub, operator.mul, *COMPARISONS)]
TOTAL += [(maximum, eager(max), 2), (minimum, eager(min), 2)]
TOTAL += [(op, eager(op), 1) for op in (operator.neg, abs, ceil, floor, round)]
TOTAL += [(lambda a, b: ~((a < b) & (a != 2)), eager(lambda a, b: not (a < b and a != 2)), 2)]
TOTAL += [(lambda a, b: (a > b) | (b == 5), eager(lambda a, b: a > b or b == 5), 2), (where, chosen, 3)]
PARTIAL = [(op, eager(op), 2) for op in (operator.truediv, operator.floordiv, operator.mod)]
PARTIAL += [(ceil_div, eager(lambda a, b: -(-a // b)), 2)]
PARTIAL += [(operator.and_, lambda a, b: a() if a() is False else a() & b(), 2)]
PARTIAL += [(operator.or_, lambda a, b: a() if a() is True else a() | b(), 2)]


def applied(operation, *parts):
    """An operation on drawn expressions; the first of constants, since Python computes with these itself."""
    recorded, computed, arity = operation
    exprs, values, reads = zip(*parts[:arity], strict=True)
    if not any(isinstance(expr, Expr) for expr in exprs[:2]):
        return parts[0]
    return Drawn(recorded(*exprs), lambda: computed(*values), frozenset().union(*reads))


def constant(value):
    return Drawn(value, lambda: value)


def named(root, name, value):
    expr = getattr(root, name)
    return Drawn(expr, lambda: value, dependencies(expr))


constants = (st.integers(-9, 9) | st.sampled_from([0.5, -1.5, 4.0])).map(constant)
names = st.sampled_from([named(root, *at) for root, own in ((cfg, CONFIG), (item, ITEM)) for at in own.items()])
powers = st.builds(applied, st.just((operator.pow, eager(operator.pow), 2)), names, st.integers(0, 3).map(constant))


def drawn(operations):
    operation = st.sampled_from(operations)
    every = st.recursive(names | constants | powers, lambda inner: st.builds(applied, operation, inner, inner, inner))
    return every.filter(lambda one: isinstance(one.expr, Expr))


def outcome(call, *args):
    try:
        return call(*args)
    except (ArithmeticError, TypeError, SpecError):
        return "fails"


@given(drawn(TOTAL + PARTIAL))
def test_evaluates_like_plain_python(one):
    assert outcome(evaluate, one.expr, SCOPE) == outcome(one.value)
    assert dependencies(one.expr) == one.reads


@given(drawn(TOTAL))
def test_folding_first_changes_nothing(one):
    folded = fold(one.expr, STATIC)
    assert evaluate(folded, Scope(item=SCOPE.item)) == one.value()
    assert not any(leaf.root == "cfg" for leaf in dependencies(folded)), "a config value is left to look up"
    if not any(leaf.root == "item" for leaf in one.reads):
        assert folded == one.value()


BINARY = [*COMPARISONS, operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod]
BINARY += [operator.pow, operator.and_, operator.or_]
UNARY = [operator.neg, operator.invert, abs, ceil, floor, round, lambda a: a.b[a], lambda a: a[1:].b]


def test_operators_bind_as_in_python():
    """Each beside each, with the parentheses that Python itself writes, and no others."""
    a, b, c = cfg.a, item.b, fields.c
    pairs = [way for outer, inner in product(BINARY, BINARY) for way in (outer(a, inner(b, c)), outer(inner(a, b), c))]
    pairs += [way for one, two in product(BINARY, UNARY) for way in (one(two(a), b), one(a, two(b)), two(one(a, b)))]
    pairs += [way for one in BINARY for way in (one(a, 0), one(a, -2), one(-2, a), one(-2.5, a))]
    for expr in (*pairs, *(outer(inner(a)) for outer, inner in product(UNARY, UNARY))):
        assert is_equal_declaration(eval(repr(expr), dict(NAMES)), expr)
        assert ast.unparse(ast.parse(repr(expr))) == repr(expr)
    assert all(repr(one(2, a)).startswith("2 ") for one in BINARY if one not in COMPARISONS)


@pytest.mark.parametrize(
    ("expr", "source", "value"),
    [
        (cfg.a**-2, "cfg.a ** (-2)", 1 / 9),
        ("qwen" == cfg.kind, "cfg.kind == 'qwen'", True),  # noqa: SIM300
        (~cfg.minus, "~cfg.minus", 0),
        (cfg.sizes == (3, 4, 5), "cfg.sizes == (3, 4, 5)", True),
        (fields.grid == cfg.sizes, "fields.grid == cfg.sizes", True),
        (fields.grid != cfg.sizes, "fields.grid != cfg.sizes", False),
        (cfg != None, "cfg != None", True),  # noqa: E711
        ((cfg.kind == "other") & cfg.missing, "(cfg.kind == 'other') & cfg.missing", False),
        ((cfg.kind == "qwen") | cfg.missing, "(cfg.kind == 'qwen') | cfg.missing", True),
        (round(cfg.a / 16, 1), "round(cfg.a / 16, 1)", 0.2),
        (later(divmod)(cfg.b, item.length)[0], "later(divmod)(cfg.b, item.length)[0]", 3),
        (later(sum)(item.shape[1:]), "later(sum)(item.shape[1:])", 7),
        (later(sum)([1], cfg.b), "later(sum)([1], cfg.b)", 1 + SCOPE.cfg.b),
        (cfg.sizes[:-1:2], "cfg.sizes[:-1:2]", (3,)),
        (cfg.vision.size, "cfg.vision.size", 8),
        (cfg.vision.get("size", 7), "cfg.vision.get('size', 7)", 8),
        (cfg.vision.get("none", cfg.a + 2), "cfg.vision.get('none', cfg.a + 2)", 5),
        (kwargs.get("size", cfg.vision)["size"], "kwargs.get('size', cfg.vision)['size']", 8),
        (kwargs.get("none", None), "kwargs.get('none', None)", None),
        (proc.sizes[item.index], "proc.sizes[item.index]", 9),
        (fields.grid[:1], "fields.grid[:1]", (3,)),
        (cfg.image == tok["<image>"], "cfg.image == tok['<image>']", True),
        (tok["<|image_{}|>", item.index + 1], "tok['<|image_{}|>', item.index + 1]", 181),
        (tok.text("a{}", cfg.image), "tok.text('a{}', cfg.image)", (97, 55)),
        (tok.text("a") + tok.text("b"), "tok.text('a') + tok.text('b')", (97, 98)),
        (tok["<image>"] + 1, "tok['<image>'] + 1", 8),
        (tok.has("<{}>", "image"), "tok.has('<{}>', 'image')", True),
        (~tok.has("<none>") | (cfg.a == 2) & (cfg.b != 3), "~tok.has('<none>') | (cfg.a == 2) & (cfg.b != 3)", True),
    ],
    ids=repr,
)
def test_source_and_value(expr, source, value):
    assert repr(expr) == source
    assert is_equal_declaration(eval(source, dict(NAMES)), expr)
    assert to_python(evaluate(expr, SCOPE)) == value
    assert to_python(evaluate(fold(expr, STATIC), SCOPE)) == value
    assert isinstance(value, tuple) or type(evaluate(expr, SCOPE)) is type(value)


def test_the_scope_of_an_item_has_the_rest():
    full = replace(SCOPE, prompt=[1], loop=(2,), counts={"image": 3})
    assert full.for_item("item", "fields") == replace(full, item="item", fields="fields")
    assert full.in_loop(1, 5) == replace(full, loop=(2, 5))
    with pytest.raises(TypeError):
        "<image>" in full.tok  # noqa: B015


def test_calls_are_folded_once_their_arguments_are_known():
    asked = []

    def area(width, height):
        asked.append((width, height))
        return width * height

    call = later(area)(cfg.a, item.width)
    assert dependencies(call) == find_leaves(cfg.a, item.width)
    folded = fold(call, SCOPE)
    assert dependencies(folded) == find_leaves(item.width)
    assert evaluate(folded, SCOPE) == evaluate(folded, SCOPE) == 15
    assert later(area)(3, 4) == 12, "nothing is known later"
    assert asked == [(3, 5), (3, 4)]
    assert later(area).__name__ == "area"
    assert evaluate(later(partial(pow, 2))(cfg.a), SCOPE) == 8
    told = [evaluate(later(repr)(cfg.n), Scope(cfg=SimpleNamespace(n=n))) for n in (1, 1.0, True, 1)]
    assert told == ["1", "1.0", "True", "1"], "equal arguments of other types are other arguments"
    assert is_equal_declaration(later(area)(cfg), later(area)(cfg))
    assert not is_equal_declaration(later(area)(cfg), later(len)(cfg))
    with pytest.raises(SpecError, match=r"^later\(int\)\(cfg\.n\) has no value: .* with 'seven'\.$"):
        evaluate(later(int)(cfg.n), Scope(cfg=SimpleNamespace(n="seven")))


def test_fold_takes_the_branches_that_an_item_may_take():
    """What is missing there is found when the spec is bound rather than at the first request that takes the branch."""
    assert is_equal_declaration(fold(where(cfg.a == 3, item.n, cfg.missing), SCOPE), item.n)
    assert is_equal_declaration(fold(where(cfg.a != 3, cfg.missing, item.n), SCOPE), item.n)
    with pytest.raises(SpecError, match=r"cfg\.missing"):
        fold(where(item.n > 3, cfg.missing, 1), SCOPE)


def test_plain_functions_see_the_scope_and_are_never_folded():
    def one(scope):
        return scope.cfg.a * scope.item.width

    assert evaluate(maximum(one, cfg.b), SCOPE) == 15
    assert evaluate(as_expression(lambda scope: scope.fields.one), SCOPE) == 3
    assert dependencies(maximum(one, cfg.a)) == find_leaves(as_expression(one), cfg.a)
    assert isinstance(fold(as_expression(one), SCOPE), Expr)
    assert is_equal_declaration(as_expression(one), as_expression(one))
    assert not is_equal_declaration(as_expression(one), as_expression(lambda scope: scope.cfg.a * scope.item.width))
    assert is_equal_declaration(pickle.loads(pickle.dumps(as_expression(len))), as_expression(len))
    assert as_expression(int) is int, "a class is no function of a scope"


# -- what Python must not decide -------------------------------------------------------------------------------------

DECISIONS = {
    "has no truth value; use where(), minimum(), maximum(), & | ~, or a function of a Scope": bool,
    "cannot be iterated; use each() in a layout": list,
    "cannot be searched": lambda expr: 3 in expr,
    "cannot be looked up in a set or a dict": lambda expr: {expr: 1},
    "has no length": len,
    "cannot be called": lambda expr: expr(1),
    "has no text": "<{}>".format,
    "is no number": range,
}


@pytest.mark.parametrize("expr", [cfg, cfg.a + 1, item.shape[0], where(cfg.a, 1, 2), tok["<image>"]], ids=repr)
def test_python_decides_nothing(expr):
    for sentence, decide in DECISIONS.items():
        with pytest.raises(TypeError, match=f"^{re.escape(f'{expr!r} is only known later and {sentence}')}"):
            decide(expr)
    with pytest.raises(TypeError, match="a Repeated is no value to compare with"):
        expr == embed(5) * 2  # noqa: B015
    for other in ("x", None, [1], {}, np.int64(3)):
        with pytest.raises(TypeError):
            expr + other
        with pytest.raises(TypeError):
            other - expr
    with pytest.raises((AttributeError, TypeError)):
        expr.x = 1
    for probed in ("__deepcopy__", "_repr_html_", "__array__"):  # by pickle, copy and IPython
        assert not hasattr(expr, probed)


@pytest.mark.parametrize(
    ("combine", "remedy"),
    [
        (lambda: tok["a"] + tok["b"], "Write literal(tok['a'], tok['b']) for one after the other."),
        (lambda: tok["a"] + tok.text("b"), "Write literal(tok['a'], tok.text('b')) for one after the other."),
        (lambda: tok.text("a") + 1, "Write literal(tok.text('a'), 1) for one after the other."),
        (lambda: tok["a"] + cfg.sep_id, "Write literal(tok['a'], cfg.sep_id) for one after the other."),
        (lambda: tok["a"] * cfg.n, "Write literal(tok['a']) * cfg.n to repeat the token."),
        (lambda: 3 * tok["a"], "Write literal(tok['a']) * 3 to repeat the token."),
        (lambda: tok["a"] * tok["b"], "Write literal(tok['a']) * tok['b'] to repeat the token."),
        (lambda: "<image>" in tok, "is only known later; use tok.has('<image>')"),
        (lambda: tok("a"), "tok is not called; write tok[\"<token>\"] or tok.text('a')"),
    ],
)
def test_ids_are_neither_summed_nor_multiplied_nor_searched(combine, remedy):
    with pytest.raises((SpecError, TypeError), match=re.escape(remedy)):
        combine()


@pytest.mark.parametrize(("value", "key"), [(torch.tensor(3), 3), (np.array([[1], [2]]), ((1,), (2,))), ("x", "x")])
def test_plain_values_can_be_keys(value, key):
    assert to_python(value) == key
    assert hash(to_python(value)) == hash(key)
