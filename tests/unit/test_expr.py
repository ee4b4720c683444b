"""Expressions: structure, evaluation against plain Python, folding, and what they refuse."""

import operator
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmkit import (
    SpecError,
    call,
    ceil_div,
    cfg,
    equal,
    floor,
    fmt,
    isqrt,
    item,
    maximum,
    minimum,
    option,
    out,
    proc,
    total,
    where,
)
from mmkit.expr import Expr, Scope, evaluate, expression, fold, leaves, plain, root

from .common import NAMES

CONFIG = {"a": 3, "b": 7, "zero": 0, "half": 0.5}
ITEM = {"width": 5, "height": 2, "index": 0}
SCOPE = Scope(cfg=SimpleNamespace(**CONFIG), item=SimpleNamespace(**ITEM))

ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul}
DIVISION = {"/": operator.truediv, "//": operator.floordiv, "%": operator.mod}
COMPARISON = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
OPERATORS = ARITHMETIC | DIVISION | COMPARISON | {"**": operator.pow}
FUNCTIONS = {
    "ceil_div": (ceil_div, lambda a, b: -((-a) // b)),
    "maximum": (maximum, max),
    "minimum": (minimum, min),
    "equal": (equal, operator.eq),
}

constants = st.integers(-9, 9) | st.sampled_from([0.5, -1.5, 4.0])
names = st.sampled_from([("cfg", n) for n in CONFIG] + [("item", n) for n in ITEM])


def trees(*, partial: bool = True, depth: int = 4):
    """Descriptions of expressions. Without `partial`, no operation can fail."""
    operators = list(ARITHMETIC) + (list(DIVISION) if partial else [])
    functions = ["maximum", "minimum"] + (["ceil_div"] if partial else [])

    def extend(inner):
        tests = st.tuples(st.just("binary"), st.sampled_from(list(COMPARISON)), inner, inner) | st.tuples(
            st.just("function"), st.just("equal"), inner, inner
        )
        return st.one_of(
            st.tuples(st.just("binary"), st.sampled_from(operators), inner, inner),
            st.tuples(st.just("binary"), st.just("**"), names, st.integers(0, 3)),
            st.tuples(st.just("function"), st.sampled_from(functions), inner, inner),
            st.tuples(st.just("where"), tests, inner, inner),
        )

    return st.recursive(names | constants, extend, max_leaves=3 * depth).filter(lambda t: isinstance(t, tuple))


def build(tree):
    """The expression that a description stands for, written with operators, as a user would."""
    if not isinstance(tree, tuple):
        return tree
    kind, *rest = tree
    if kind in ("cfg", "item"):
        return getattr({"cfg": cfg, "item": item}[kind], rest[0])
    if kind == "where":
        test, *branches = map(build, rest)
        # a comparison of two constants is decided by Python, and where() refuses its result
        return where(equal(test, True) if isinstance(test, bool) else test, *branches)
    parts = list(map(build, rest[1:]))
    return OPERATORS[rest[0]](*parts) if kind == "binary" else FUNCTIONS[rest[0]][0](*parts)


def compute(tree):
    """The value of a description, by plain Python."""
    if not isinstance(tree, tuple):
        return tree
    kind, *rest = tree
    if kind in ("cfg", "item"):
        return (CONFIG if kind == "cfg" else ITEM)[rest[0]]
    if kind == "where":
        return compute(rest[1]) if compute(rest[0]) else compute(rest[2])
    parts = list(map(compute, rest[1:]))
    return OPERATORS[rest[0]](*parts) if kind == "binary" else FUNCTIONS[rest[0]][1](*parts)


def outcome(call, *args):
    try:
        return call(*args)
    except (ArithmeticError, SpecError):
        return "fails"


def constant_free(tree) -> bool:
    """Python evaluates operations of two constants itself, before mmkit can see them, and may raise then."""
    if not isinstance(tree, tuple) or tree[0] in ("cfg", "item"):
        return True
    parts = tree[2:] if tree[0] in ("binary", "function") else tree[1:]
    return any(isinstance(p, tuple) for p in parts) and all(map(constant_free, parts))


@given(trees().filter(constant_free))
def test_evaluates_like_plain_python(tree):
    assert outcome(evaluate, build(tree), SCOPE) == outcome(compute, tree)


@given(trees(partial=False))
def test_folding_first_changes_nothing(tree):
    folded = fold(build(tree), Scope(cfg=SCOPE.cfg))
    assert evaluate(folded, Scope(item=SCOPE.item)) == compute(tree)
    assert not any(root(leaf) == cfg for leaf in leaves(folded)), "a config value is left to look up"


@given(trees(partial=False))
def test_folding_is_complete_where_nothing_varies(tree):
    expr = build(tree)
    if not any(root(leaf) == item for leaf in leaves(expr)):
        assert fold(expr, Scope(cfg=SCOPE.cfg)) == compute(tree)


@given(trees().filter(constant_free))
def test_structure_survives_repr_pickle_and_hash(tree):
    expr = build(tree)
    again = eval(repr(expr), dict(NAMES))
    assert again == expr
    assert hash(again) == hash(expr)
    assert repr(again) == repr(expr)
    assert pickle.loads(pickle.dumps(expr)) == expr


@given(trees().filter(constant_free))
def test_leaves_are_what_the_value_depends_on(tree):
    def used(t):
        if not isinstance(t, tuple):
            return set()
        if t[0] in ("cfg", "item"):
            return {build(t)}
        return set().union(*map(used, t[1:]))

    assert leaves(build(tree)) == used(tree)


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (cfg.vision_config.image_size // cfg.vision_config.patch_size, None),
        ((cfg.vision.image_size // cfg.vision.patch) ** 2, "(cfg.vision.image_size // cfg.vision.patch) ** 2"),
        (cfg.a - (cfg.b - 1), "cfg.a - (cfg.b - 1)"),
        (cfg.a - cfg.b - 1, "cfg.a - cfg.b - 1"),
        ((cfg.a + cfg.b) * 2, "(cfg.a + cfg.b) * 2"),
        ((cfg.a**2) ** 3, "(cfg.a ** 2) ** 3"),
        (cfg.a ** (cfg.b**3), "cfg.a ** cfg.b ** 3"),
        ((-2) ** cfg.a, "(-2) ** cfg.a"),
        (cfg.a**-2, "cfg.a ** (-2)"),
        (cfg.a / 2 * -3, "cfg.a / 2 * -3"),
        ((cfg.a < 2) < 3, "(cfg.a < 2) < 3"),
        ((cfg.a < 2) >= cfg.b, "(cfg.a < 2) >= cfg.b"),
        ((cfg.a > 2) < 3, "(cfg.a > 2) < 3"),
        ((cfg.a >= 2) <= 3, "(cfg.a >= 2) <= 3"),
        (cfg.a % 2 * 3, "cfg.a % 2 * 3"),
        (cfg.sizes[1:], "cfg.sizes[1:]"),
        (cfg.sizes[:-1:2], "cfg.sizes[:-1:2]"),
        (2 - item.shape[0], "2 - item.shape[0]"),
        ((cfg.a + 1).real, "(cfg.a + 1).real"),
        (out["grid"][1], "out['grid'][1]"),
        (proc.sizes[item.index], "proc.sizes[item.index]"),
        (fmt("<|image_{}|>", item.index + 1), "fmt('<|image_{}|>', item.index + 1)"),
        (isqrt(item.length), "isqrt(item.length)"),
        (total(out.lengths), "total(out.lengths)"),
        (call(isqrt, cfg.n, item.length)[0], "call(isqrt, cfg.n, item.length)[0]"),
        (option("size", cfg.size)["height"], "option('size', cfg.size)['height']"),
        (floor(cfg.a / 2), "floor(cfg.a / 2)"),
    ],
)
def test_repr_is_the_source(expr, text):
    assert repr(expr) == (text or repr(expr))
    assert eval(repr(expr), dict(NAMES)) == expr


def test_functions():
    scope = Scope(cfg=SimpleNamespace(n=17, sizes=[3, 4]))
    assert evaluate(isqrt(cfg.n), scope) == 4
    assert evaluate(total(cfg.sizes), scope) == 7
    assert evaluate(fmt("{}-{}", cfg.n, 2), scope) == "17-2"
    assert evaluate(floor(cfg.n / 10), scope) == 1


def test_calls_are_folded_once_their_arguments_are_known():
    asked = []

    def area(width, height):
        asked.append((width, height))
        return width * height

    made = call(area, cfg.a, item.width)
    assert leaves(made) == {cfg.a, item.width}
    folded = fold(made, SCOPE)
    assert leaves(folded) == {item.width}
    assert evaluate(folded, SCOPE) == CONFIG["a"] * ITEM["width"]
    assert fold(call(area, cfg.a, 2), SCOPE) == 6
    assert asked == [(CONFIG["a"], ITEM["width"]), (CONFIG["a"], 2)]
    assert call(area, 1) == call(area, 1) != call(len, 1)
    with pytest.raises(SpecError, match=r"^call\(int, cfg\.n\) has no value: .* with 'seven'\.$"):
        evaluate(call(int, cfg.n), Scope(cfg=SimpleNamespace(n="seven")))


def test_options_of_a_request():
    size = option("size", cfg.a)
    assert evaluate(size, SCOPE) == fold(size, SCOPE) == CONFIG["a"]
    asked = Scope(cfg=SCOPE.cfg, kwargs={"size": 8, "other": 1})
    assert evaluate(size, asked) == fold(size, asked) == 8
    assert evaluate(option("missing", None), asked) is None
    assert leaves(size) == {cfg.a}


# -- where -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("test", [True, False])
def test_where_never_evaluates_the_other_branch(test):
    def explode(scope):
        raise AssertionError("evaluated")

    branches = (1, explode) if test else (explode, 1)
    scope = Scope(cfg=SimpleNamespace(test=test), item=SimpleNamespace(test=test))
    assert evaluate(where(cfg.test, *branches), scope) == 1
    assert evaluate(where(item.test, *branches), scope) == 1
    assert evaluate(fold(where(item.test, *branches), scope), scope) == 1
    missing = (item.n, cfg.missing) if test else (cfg.missing, item.n)
    assert fold(where(cfg.test, *missing), scope) == item.n


def test_fold_reports_a_missing_attribute_in_a_branch_that_an_item_may_take():
    """Found when the spec is bound rather than at the first request that takes the branch."""
    with pytest.raises(SpecError, match=r"cfg\.missing"):
        fold(where(item.n > 3, cfg.missing, 1), Scope(cfg=SimpleNamespace()))


# -- scopes ----------------------------------------------------------------------------------------------------------


def test_attributes_of_mappings_and_objects():
    scope = Scope(cfg={"a": {"b": 5}}, out={"grid": torch.tensor([2, 3])})
    assert evaluate(cfg.a.b, scope) == 5
    assert evaluate(cfg["a"]["b"], scope) == 5
    assert evaluate(out.grid[1] * 2, scope) == 6
    assert type(evaluate(out.grid[1], scope)) is int
    assert evaluate(out.grid[:1], scope).tolist() == [2]


def test_plain_functions_see_the_scope():
    assert evaluate(expression(lambda s: s.cfg.a * s.item.width), SCOPE) == 15
    assert evaluate(maximum(lambda s: s.cfg.b, cfg.a), SCOPE) == 7
    assert expression(int) is int, "a class is no function of a scope"


def test_plain_functions_are_compared_by_identity_and_never_folded():
    def one(scope):
        return 1

    def other(scope):
        return 1

    assert expression(one) == expression(one) != expression(other)
    assert hash(expression(one)) == hash(expression(one))
    assert isinstance(fold(expression(one), SCOPE), Expr)
    assert leaves(maximum(one, cfg.a)) == {expression(one), cfg.a}
    assert pickle.loads(pickle.dumps(expression(len))) == expression(len)


@pytest.mark.parametrize(
    "name", [name for name in Scope.__dataclass_fields__ if name in ("cfg", "item", "out", "proc")]
)
def test_every_root_reads_its_own_part_of_the_scope(name):
    scope = Scope(**{name: SimpleNamespace(x=name)})
    assert evaluate(getattr(NAMES[name], "x"), scope) == name  # noqa: B009


# -- what Python must not decide -------------------------------------------------------------------------------------


@pytest.mark.parametrize("expr", [cfg, cfg.a, cfg.a + 1, item.shape[0], where(cfg.a, 1, 2), equal(cfg.a, 1)], ids=repr)
def test_no_truth_value_and_no_iteration(expr):
    later = re.escape(f"{expr!r} is only known later and ")
    with pytest.raises(TypeError, match=rf"^{later}has no truth value; use where\(\) or equal\(\), or a function of a"):
        bool(expr)
    with pytest.raises(TypeError, match=rf"^{later}cannot be iterated; use each\(\) in a layout, or a function of a"):
        list(expr)
    with pytest.raises(TypeError):
        1 if expr > 1 else 3  # noqa: B018
    with pytest.raises(TypeError):
        3 in expr  # noqa: B015


def test_operators_refuse_what_is_no_number():
    for other in ("x", None, [1], {}):
        with pytest.raises(TypeError):
            cfg.a + other
        with pytest.raises(TypeError):
            other - cfg.a


def test_numpy_integers_become_plain_numbers():
    assert cfg.a * np.int64(3) == cfg.a * 3
    assert np.int64(3) * cfg.a == 3 * cfg.a


def test_expressions_cannot_be_changed():
    for target in (cfg, cfg.a, cfg.a + 1):
        with pytest.raises((AttributeError, TypeError)):
            target.x = 1


def test_private_attributes_are_not_recorded():
    """pickle, copy, pydantic and IPython probe for these."""
    for name in ("__deepcopy__", "_repr_html_", "__array__"):
        assert not hasattr(cfg.a, name)


def test_slices():
    expr = total(item.shape[1:])
    assert evaluate(expr, Scope(item=SimpleNamespace(shape=(2, 3, 4)))) == 7
    assert leaves(expr) == {item.shape[1:]}
    assert fold(expr, Scope(cfg=SCOPE.cfg)) == expr
    assert hash(expr) == hash(total(item.shape[1:]))


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (torch.tensor(3), 3),
        (np.array([1, 2]), (1, 2)),
        ([[1], [2]], ((1,), (2,))),
        ("x", "x"),
        (None, None),
        (2.5, 2.5),
    ],
)
def test_plain_values_can_be_keys(value, wanted):
    assert plain(value) == wanted
    assert hash(plain(value)) == hash(wanted)
