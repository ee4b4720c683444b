"""Expressions: structure, evaluation against plain Python, folding, and what they refuse."""

import operator
import pickle
import re
from math import ceil, floor, isqrt
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmkit import SpecError, ceil_div, cfg, embed, fields, item, kwargs, later, maximum, minimum, proc, tok, where
from mmkit.expr import Expr, Fields, Scope, evaluate, expression, fold, leaves, plain, same, structure
from mmkit.vocabulary import Vocabulary

from .common import NAMES, Tokenizer, leaves_of

CONFIG = {"a": 3, "b": 7, "zero": 0, "half": 0.5}
ITEM = {"width": 5, "height": 2, "index": 0}
SCOPE = Scope(cfg=SimpleNamespace(**CONFIG), item=SimpleNamespace(**ITEM))

ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul}
DIVISION = {"/": operator.truediv, "//": operator.floordiv, "%": operator.mod}
COMPARISON = {"==": operator.eq, "!=": operator.ne}
COMPARISON |= {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
LOGIC = {"&": operator.and_, "|": operator.or_}
OPERATORS = ARITHMETIC | DIVISION | COMPARISON | LOGIC | {"**": operator.pow}
FUNCTIONS = {
    "ceil_div": (ceil_div, lambda a, b: -((-a) // b)),
    "maximum": (maximum, max),
    "minimum": (minimum, min),
}

constants = st.integers(-9, 9) | st.sampled_from([0.5, -1.5, 4.0])
names = st.sampled_from([("cfg", n) for n in CONFIG] + [("item", n) for n in ITEM])


def trees(*, partial: bool = True, depth: int = 4):
    """Descriptions of expressions. Without `partial`, no operation can fail."""
    operators = list(ARITHMETIC) + (list(DIVISION) if partial else [])
    functions = ["maximum", "minimum"] + (["ceil_div"] if partial else [])

    def extend(inner):
        compared = st.tuples(st.just("binary"), st.sampled_from(list(COMPARISON)), inner, inner)
        other = st.tuples(st.just("binary"), st.sampled_from(list(COMPARISON)), names, constants)
        logic = st.tuples(st.just("binary"), st.sampled_from(list(LOGIC)), compared, other)
        tests = st.builds(lambda test, negated: ("not", test) if negated else test, logic, st.booleans())

        return st.one_of(
            st.tuples(st.just("binary"), st.sampled_from(operators), inner, inner),
            st.tuples(st.just("binary"), st.just("**"), names, st.integers(0, 3)),
            st.tuples(st.just("function"), st.sampled_from(functions), inner, inner),
            st.tuples(st.just("minus"), inner),
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
        return where(*map(build, rest))
    if kind == "minus":
        return -build(rest[0])
    if kind == "not":
        test = build(rest[0])
        return not test if isinstance(test, bool) else ~test
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
    if kind == "minus":
        return -compute(rest[0])
    if kind == "not":
        return not compute(rest[0])
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
    assert not any(leaf.root == "cfg" for leaf in leaves(folded)), "a config value is left to look up"


@given(trees(partial=False))
def test_folding_is_complete_where_nothing_varies(tree):
    expr = build(tree)
    if not any(leaf.root == "item" for leaf in leaves(expr)):
        assert fold(expr, Scope(cfg=SCOPE.cfg)) == compute(tree)


@given(trees().filter(constant_free))
def test_structure_survives_repr_pickle_and_hash(tree):
    expr = build(tree)
    again = eval(repr(expr), dict(NAMES))
    assert same(again, expr)
    assert hash(structure(again)) == hash(structure(expr))
    assert repr(again) == repr(expr)
    assert same(pickle.loads(pickle.dumps(expr)), expr)


@given(trees().filter(constant_free))
def test_leaves_are_what_the_value_depends_on(tree):
    def used(t):
        if not isinstance(t, tuple):
            return set()
        if t[0] in ("cfg", "item"):
            return leaves(build(t))
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
        (fields["grid"][1], "fields['grid'][1]"),
        (proc.sizes[item.index], "proc.sizes[item.index]"),
        (tok["<|image_{}|>", item.index + 1], "tok['<|image_{}|>', item.index + 1]"),
        (tok.text("Frame {}: ", item.index), "tok.text('Frame {}: ', item.index)"),
        (~tok.has("<image>") | (cfg.a == 2) & (cfg.b != 3), "~tok.has('<image>') | (cfg.a == 2) & (cfg.b != 3)"),
        (-(cfg.a**2), "-cfg.a ** 2"),
        ((-cfg.a) ** 2, "(-cfg.a) ** 2"),
        (~(cfg.a == "full"), "~(cfg.a == 'full')"),
        ((cfg.a == 1) == (cfg.b == 2), "(cfg.a == 1) == (cfg.b == 2)"),
        (ceil(cfg.a / 2), "ceil(cfg.a / 2)"),
        (abs(cfg.a), "abs(cfg.a)"),
        (round(cfg.a / 2, 1), "round(cfg.a / 2, 1)"),
        (later(divmod)(cfg.n, item.length)[0], "later(divmod)(cfg.n, item.length)[0]"),
        (kwargs.get("size", cfg.size)["height"], "kwargs.get('size', cfg.size)['height']"),
        (floor(cfg.a / 2), "floor(cfg.a / 2)"),
    ],
)
def test_repr_is_the_source(expr, text):
    assert repr(expr) == (text or repr(expr))
    assert same(eval(repr(expr), dict(NAMES)), expr)


def test_functions():
    scope = Scope(cfg=SimpleNamespace(n=17, sizes=[3, 4]))
    assert evaluate(later(isqrt)(cfg.n), scope) == 4
    assert evaluate(floor(cfg.n / 10), scope) == 1
    assert evaluate(ceil(cfg.n / 10), scope) == 2
    assert evaluate(round(cfg.n / 10), scope) == 2
    assert evaluate(abs(3 - cfg.n), scope) == 14


def test_values_are_compared_by_what_they_are():
    scope = Scope(cfg=SimpleNamespace(kind="qwen", sizes=[3, 4]), fields=Fields(grid=torch.tensor([3, 4])))
    for test in (cfg.kind == "qwen", "qwen" == cfg.kind, cfg.sizes == (3, 4), fields.grid == cfg.sizes, cfg != None):  # noqa: E711, SIM300
        assert evaluate(test, scope) is True
        assert evaluate(~test, scope) is False
    assert evaluate((cfg.kind == "other") & cfg.missing, scope) is False, "as `and`"
    assert evaluate((cfg.kind == "qwen") | cfg.missing, scope) is True, "as `or`"
    with pytest.raises(TypeError, match="a Repeated is no value to compare with"):
        cfg.a == embed(5) * 2  # noqa: B015


def test_tokens():
    scope = Scope(tok=Vocabulary(Tokenizer()), cfg=SimpleNamespace(image=7), item=SimpleNamespace(index=0))
    assert evaluate(cfg.image == tok["<image>"], scope) is True
    assert evaluate(where(tok["<image>"] == 8, 3, 1), scope) == 1
    assert evaluate(tok["<image>"] + 1, scope) == 8
    assert evaluate(tok["<|image_{}|>", item.index + 1], scope) == scope.tok["<|image_{}|>", 1] == 181
    assert evaluate(tok.text("a{}", cfg.image), scope) == scope.tok.text("a{}", 7) == [97, 55]
    assert evaluate(tok.has("<{}>", "image"), scope) is scope.tok.has("<image>") is True
    assert evaluate(tok.has("<none>"), scope) is scope.tok.has("<none>") is False


def test_calls_are_folded_once_their_arguments_are_known():
    asked = []

    def area(width, height):
        asked.append((width, height))
        return width * height

    call = later(area)(cfg.a, item.width)
    assert leaves(call) == leaves_of(cfg.a, item.width)
    folded = fold(call, SCOPE)
    assert leaves(folded) == leaves_of(item.width)
    assert evaluate(folded, SCOPE) == CONFIG["a"] * ITEM["width"]
    assert fold(later(area)(cfg.a, 2), SCOPE) == 6
    assert later(area)(3, 4) == 12, "nothing is known later"
    asked.pop()
    assert asked == [(CONFIG["a"], ITEM["width"]), (CONFIG["a"], 2)]
    assert same(later(area)(cfg), later(area)(cfg))
    assert not same(later(area)(cfg), later(len)(cfg))
    with pytest.raises(SpecError, match=r"^later\(int\)\(cfg\.n\) has no value: .* with 'seven'\.$"):
        evaluate(later(int)(cfg.n), Scope(cfg=SimpleNamespace(n="seven")))


def test_options_of_a_request():
    size = kwargs.get("size", cfg.a)
    assert evaluate(size, SCOPE) == fold(size, SCOPE) == CONFIG["a"]
    asked = Scope(cfg=SCOPE.cfg, kwargs={"size": 8, "other": 1})
    assert evaluate(size, asked) == fold(size, asked) == 8
    assert evaluate(kwargs.get("missing", None), asked) is None
    for read in (size, size["height"], size + 1):
        assert {repr(leaf) for leaf in leaves(read)} == {repr(size), "cfg.a"}
    assert evaluate(kwargs["size"], asked) == 8


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
    assert same(fold(where(cfg.test, *missing), scope), item.n)


def test_fold_reports_a_missing_attribute_in_a_branch_that_an_item_may_take():
    """Found when the spec is bound rather than at the first request that takes the branch."""
    with pytest.raises(SpecError, match=r"cfg\.missing"):
        fold(where(item.n > 3, cfg.missing, 1), Scope(cfg=SimpleNamespace()))


# -- scopes ----------------------------------------------------------------------------------------------------------


def test_attributes_of_mappings_and_objects():
    scope = Scope(cfg={"a": {"b": 5}}, fields=Fields(grid=torch.tensor([2, 3])))
    assert evaluate(cfg.a.b, scope) == 5
    assert evaluate(cfg["a"]["b"], scope) == 5
    assert evaluate(cfg.a.get("b", 7), scope) == 5
    assert evaluate(cfg.a.get("c", cfg.a.b + 2), scope) == fold(cfg.a.get("c", 7), scope) == 7
    assert evaluate(fields.grid[1] * 2, scope) == 6
    assert type(evaluate(fields.grid[1], scope)) is int
    assert evaluate(fields.grid[:1], scope).tolist() == [2]


def test_plain_functions_see_the_scope():
    assert evaluate(expression(lambda s: s.cfg.a * s.item.width), SCOPE) == 15
    assert evaluate(maximum(lambda s: s.cfg.b, cfg.a), SCOPE) == 7
    assert expression(int) is int, "a class is no function of a scope"


def test_plain_functions_are_compared_by_identity_and_never_folded():
    def one(scope):
        return 1

    def other(scope):
        return 1

    assert same(expression(one), expression(one))
    assert not same(expression(one), expression(other))
    assert isinstance(fold(expression(one), SCOPE), Expr)
    assert leaves(maximum(one, cfg.a)) == leaves_of(expression(one), cfg.a)
    assert same(pickle.loads(pickle.dumps(expression(len))), expression(len))


@pytest.mark.parametrize(
    "name", [name for name in Scope.__dataclass_fields__ if name in ("cfg", "item", "fields", "proc")]
)
def test_every_root_reads_its_own_part_of_the_scope(name):
    scope = Scope(**{name: SimpleNamespace(x=name)})
    assert evaluate(getattr(NAMES[name], "x"), scope) == name  # noqa: B009


# -- what Python must not decide -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expr", [cfg, cfg.a, cfg.a + 1, item.shape[0], where(cfg.a, 1, 2), cfg.a == 1, tok["<image>"]], ids=repr
)
def test_python_decides_nothing(expr):
    opening = re.escape(f"{expr!r} is only known later and ")
    decisions = {
        r"has no truth value; use where\(\), minimum\(\), maximum\(\), & \| ~, or a function of a Scope": lambda: bool(
            expr
        ),
        r"cannot be iterated; use each\(\) in a layout": lambda: list(expr),
        "cannot be searched": lambda: 3 in expr,
        "cannot be looked up in a set or a dict": lambda: {expr: 1},
        "has no length": lambda: len(expr),
        "cannot be called": lambda: expr(1),
        "has no text": lambda: f"<{expr}>",
        "is no number": lambda: range(expr),
    }
    for sentence, decide in decisions.items():
        with pytest.raises(TypeError, match=f"^{opening}{sentence}"):
            decide()


def test_what_would_silently_be_false():
    for decide in (
        lambda: cfg.kind in ("qwen", "llama"),
        lambda: cfg.kind in {"qwen", "llama"},
        lambda: {"qwen": 1}.get(cfg.kind),
        lambda: 1 if cfg.kind == "qwen" else 2,
        lambda: cfg.a == 1 and cfg.b == 2,
        lambda: not cfg.a,
        lambda: 1 < cfg.a < 3,
        lambda: min(cfg.a, 3),
        lambda: "<image>" in tok,
        lambda: tok("text"),
    ):
        with pytest.raises(TypeError, match=r"only known later|tok is not called"):
            decide()


def test_ids_are_neither_summed_nor_multiplied():
    for combine, remedy in (
        (lambda: tok["a"] + tok["b"], r"Write literal\(tok\['a'\], tok\['b'\]\)"),
        (lambda: tok["a"] + tok.text("b"), r"Write literal\("),
        (lambda: tok["a"] + cfg.sep_id, r"Write literal\(tok\['a'\], cfg\.sep_id\)"),
        (lambda: tok["a"] * cfg.n, r"Write literal\(tok\['a'\]\) \* cfg\.n"),
        (lambda: 3 * tok["a"], r"Write literal\(tok\['a'\]\) \* 3"),
    ):
        with pytest.raises(SpecError, match=remedy):
            combine()


def test_operators_refuse_what_is_no_number():
    for other in ("x", None, [1], {}):
        with pytest.raises(TypeError):
            cfg.a + other
        with pytest.raises(TypeError):
            other - cfg.a


def test_numpy_integers_become_plain_numbers():
    assert evaluate(cfg.a * 3.0, SCOPE) == 9.0
    with pytest.raises(TypeError):
        np.int64(3) * cfg.a


def test_expressions_cannot_be_changed():
    for target in (cfg, cfg.a, cfg.a + 1):
        with pytest.raises((AttributeError, TypeError)):
            target.x = 1


def test_private_attributes_are_not_recorded():
    """pickle, copy, pydantic and IPython probe for these."""
    for name in ("__deepcopy__", "_repr_html_", "__array__"):
        assert not hasattr(cfg.a, name)


def test_slices():
    expr = later(sum)(item.shape[1:])
    assert evaluate(expr, Scope(item=SimpleNamespace(shape=(2, 3, 4)))) == 7
    assert leaves(expr) == leaves_of(item.shape[1:])
    assert same(fold(expr, Scope(cfg=SCOPE.cfg)), expr)
    assert hash(structure(expr)) == hash(structure(later(sum)(item.shape[1:])))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(3), 3),
        (np.array([1, 2]), (1, 2)),
        ([[1], [2]], ((1,), (2,))),
        ("x", "x"),
        (None, None),
        (2.5, 2.5),
    ],
)
def test_plain_values_can_be_keys(value, expected):
    assert plain(value) == expected
    assert hash(plain(value)) == hash(expected)
