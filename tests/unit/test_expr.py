"""Expressions: structure, evaluation against plain Python, folding, and what they refuse."""

import ast
import functools
import operator
import pickle
import re
from dataclasses import replace
from math import ceil, floor
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmkit import (
    SpecError,
    ceil_div,
    cfg,
    each,
    embed,
    fields,
    item,
    kwargs,
    largest_of,
    later,
    maximum,
    minimum,
    proc,
    tok,
    where,
)
from mmkit.language.expr import Expr, Scope, as_expression, evaluate
from mmkit.language.node import dependencies, fold, is_equal_declaration
from mmkit.language.operations import MAX_BITS
from mmkit.language.scope import Fields, to_python
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


class Example(NamedTuple):
    """An expression as a user writes it, a function that computes its value by plain Python, and what it reads."""

    expr: Any
    compute: Any
    reads: frozenset[Any] = frozenset()


class Operation(NamedTuple):
    """An operation on expressions, the same one on functions that compute values, and the number of its operands."""

    record: Any
    compute: Any
    arity: int


def on_values(function):
    """Return the operation on functions that computes all of their values first."""

    def compute(*operands):
        values = [operand() for operand in operands]
        return function(*values)

    return compute


def choose(test, then, other):
    if test():
        return then()
    return other()


def compute_and(left, right):
    """Compute `left & right`, but not the right side where the left is False."""
    value = left()
    if value is False:
        return False
    return value & right()


def compute_or(left, right):
    """Compute `left | right`, but not the right side where the left is True."""
    value = left()
    if value is True:
        return True
    return value | right()


def record_not_and(a, b):
    return ~((a < b) & (a != 2))


def compute_not_and(a, b):
    return not (a < b and a != 2)


def record_larger_or_five(a, b):
    return (a > b) | (b == 5)


def compute_larger_or_five(a, b):
    return a > b or b == 5


def divide_up(a, b):
    return -(-a // b)


COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]

TOTAL = [
    Operation(maximum, on_values(max), 2),
    Operation(minimum, on_values(min), 2),
    Operation(record_not_and, on_values(compute_not_and), 2),
    Operation(record_larger_or_five, on_values(compute_larger_or_five), 2),
    Operation(where, choose, 3),
]
"""Operations that all numbers have."""

for operator_of_two in [operator.add, operator.sub, operator.mul] + COMPARISONS:
    TOTAL.append(Operation(operator_of_two, on_values(operator_of_two), 2))
for operator_of_one in (operator.neg, abs, ceil, floor, round):
    TOTAL.append(Operation(operator_of_one, on_values(operator_of_one), 1))

PARTIAL = [
    Operation(operator.truediv, on_values(operator.truediv), 2),
    Operation(operator.floordiv, on_values(operator.floordiv), 2),
    Operation(operator.mod, on_values(operator.mod), 2),
    Operation(ceil_div, on_values(divide_up), 2),
    Operation(operator.and_, compute_and, 2),
    Operation(operator.or_, compute_or, 2),
]
"""Operations that fail for some numbers."""


def apply(operation, *operands):
    """Return the example of an operation on examples, or the first of them where all are constants, since Python
    computes with these itself."""
    operands = operands[: operation.arity]
    if not any(isinstance(operand.expr, Expr) for operand in operands[:2]):
        return operands[0]

    exprs = []
    functions = []
    reads = frozenset()
    for operand in operands:
        exprs.append(operand.expr)
        functions.append(operand.compute)
        reads |= operand.reads

    def compute():
        return operation.compute(*functions)

    return Example(operation.record(*exprs), compute, reads)


def make_constant(value):
    def compute():
        return value

    return Example(value, compute)


def make_name(root, name, value):
    example = make_constant(value)
    expr = getattr(root, name)
    return Example(expr, example.compute, dependencies(expr))


CONSTANTS = (st.integers(-9, 9) | st.sampled_from([0.5, -1.5, 4.0])).map(make_constant)

NAMES_WITH_VALUES = []
for config_name, config_value in CONFIG.items():
    NAMES_WITH_VALUES.append(make_name(cfg, config_name, config_value))
for fact_name, fact in ITEM.items():
    NAMES_WITH_VALUES.append(make_name(item, fact_name, fact))

LEAVES = st.sampled_from(NAMES_WITH_VALUES)
POWER = Operation(operator.pow, on_values(operator.pow), 2)
POWERS = st.builds(apply, st.just(POWER), LEAVES, st.integers(0, 3).map(make_constant))


def is_expression(example):
    return isinstance(example.expr, Expr)


def examples(operations):
    """Return a strategy of expressions of these operations."""

    def extend(inner):
        return st.builds(apply, st.sampled_from(operations), inner, inner, inner)

    return st.recursive(LEAVES | CONSTANTS | POWERS, extend).filter(is_expression)


def compute_or_fail(function, *arguments):
    """Return what a call returns, or "fails"."""
    try:
        return function(*arguments)
    except (ArithmeticError, TypeError, SpecError):
        return "fails"


@given(examples(TOTAL + PARTIAL))
def test_evaluates_like_plain_python(example):
    assert compute_or_fail(evaluate, example.expr, SCOPE) == compute_or_fail(example.compute)
    assert dependencies(example.expr) == example.reads


@given(examples(TOTAL))
def test_folding_first_changes_nothing(example):
    folded = fold(example.expr, STATIC)
    assert evaluate(folded, Scope(item=SCOPE.item)) == example.compute()
    assert not any(leaf.root == "cfg" for leaf in dependencies(folded)), "a config value is left to look up"
    if not any(leaf.root == "item" for leaf in example.reads):
        assert folded == example.compute()


ARITHMETIC = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod]
BINARY = COMPARISONS + ARITHMETIC + [operator.pow, operator.and_, operator.or_]


def look_up(a):
    return a.b[a]


def look_up_in_slice(a):
    return a[1:].b


UNARY = [operator.neg, operator.invert, abs, ceil, floor, round, look_up, look_up_in_slice]


def list_pairs_of_operators():
    """Return expressions in which each operator stands inside each other one, at each side, and beside numbers."""
    a, b, c = cfg.a, item.b, fields.c
    exprs = []
    for outer in BINARY:
        for inner in BINARY:
            exprs += [outer(a, inner(b, c)), outer(inner(a, b), c)]
        for unary in UNARY:
            exprs += [outer(unary(a), b), outer(a, unary(b)), unary(outer(a, b))]
        exprs += [outer(a, 0), outer(a, -2), outer(-2, a), outer(-2.5, a)]
    for outer in UNARY:
        for inner in UNARY:
            exprs.append(outer(inner(a)))
    return exprs


def test_operators_bind_as_in_python():
    """Sources have the parentheses that Python itself writes, and no others."""
    for expr in list_pairs_of_operators():
        assert is_equal_declaration(eval(repr(expr), dict(NAMES)), expr)
        assert ast.unparse(ast.parse(repr(expr))) == repr(expr)


def test_a_number_keeps_its_side_of_an_operator():
    for binary in ARITHMETIC + [operator.pow, operator.and_, operator.or_]:
        assert repr(binary(2, cfg.a)).startswith("2 ")


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


@pytest.mark.parametrize(("left", "right"), [(1, 1), (0, 2), (2, 0)])
def test_a_product_that_is_too_long_is_not_computed(left, right):
    """Neither factor is too long, but both together are."""
    scope = Scope(cfg=SimpleNamespace(a=1 << left * MAX_BITS // 2, b=1 << right * MAX_BITS // 2))
    with pytest.raises(SpecError, match=f"a whole number of more than {MAX_BITS} bits"):
        evaluate(cfg.a * cfg.b, scope)


def test_the_scope_of_an_item_has_all_else():
    full = replace(SCOPE, prompt=[1], loop=(2,), counts={"image": 3})
    assert full.for_item("item", "fields") == replace(full, item="item", fields="fields")
    assert full.in_loop(1, 5) == replace(full, loop=(2, 5))
    with pytest.raises(TypeError):
        "<image>" in full.tok  # noqa: B015


def test_a_call_is_folded_once_its_arguments_are_constants():
    calls = []

    def area(width, height):
        calls.append((width, height))
        return width * height

    call = later(area)(cfg.a, item.width)
    assert dependencies(call) == find_leaves(cfg.a, item.width)
    folded = fold(call, SCOPE)
    assert dependencies(folded) == find_leaves(item.width)
    assert evaluate(folded, SCOPE) == evaluate(folded, SCOPE) == 15
    assert later(area)(3, 4) == 12, "nothing is known later"
    assert calls == [(3, 5), (3, 4)]


def test_a_call_of_a_bound_object_is_cached_per_numbers():
    calls = []

    def count(processor, width):
        calls.append(width)
        return width // processor.patch

    call = later(count)(proc, item.width)
    processors = [SimpleNamespace(patch=2), SimpleNamespace(patch=4)]
    folded = [fold(call, Scope(proc=processor)) for processor in processors]
    for _ in range(2):
        values = []
        for bound in folded:
            values += [evaluate(bound, Scope(item=SimpleNamespace(width=width))) for width in (8, 16)]
        assert values == [4, 8, 2, 4]
    assert calls == [8, 16, 8, 16]


@pytest.mark.parametrize("make", [torch.tensor, np.array])
@pytest.mark.parametrize("numbers", [[7, 8, 9], [1.5, 2.5, 3.5], [True, False, True], list(range(40))])
def test_an_element_of_a_vector_is_a_number_if_it_is_whole(make, numbers):
    scope = Scope(fields=Fields(grid=make(numbers)))
    for key in (0, 2, -1):
        value = evaluate(fields.grid[key], scope)
        assert value == numbers[key]
        assert isinstance(value, int) == isinstance(numbers[key], int)
    with pytest.raises(SpecError, match=r"has no value: fields\.grid is"):
        evaluate(fields.grid[len(numbers)], scope)


def test_a_call_has_the_name_of_its_function():
    assert later(divmod).__name__ == "divmod"


def test_a_partial_function_can_be_called_later():
    power_of_two = functools.partial(pow, 2)
    assert evaluate(later(power_of_two)(cfg.a), SCOPE) == 8


def test_equal_arguments_of_other_types_are_other_arguments():
    call = later(repr)(cfg.n)
    values = [evaluate(call, Scope(cfg=SimpleNamespace(n=number))) for number in (1, 1.0, True, 1)]
    assert values == ["1", "1.0", "True", "1"]


def test_calls_are_equal_by_function_and_arguments():
    assert is_equal_declaration(later(sum)(cfg), later(sum)(cfg))
    assert not is_equal_declaration(later(sum)(cfg), later(len)(cfg))


def test_a_call_that_fails_has_no_value():
    with pytest.raises(SpecError, match=r"^later\(int\)\(cfg\.n\) has no value: .* with 'seven'\.$"):
        evaluate(later(int)(cfg.n), Scope(cfg=SimpleNamespace(n="seven")))


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=6), st.integers(-2, 2))
def test_the_largest_of_a_list_is_that_of_python(pairs, factor):
    chosen = largest_of(cfg.pairs, by=lambda pair: (pair[0] * item.factor, -pair[1]))
    scope = Scope(cfg=SimpleNamespace(pairs=pairs), item=SimpleNamespace(factor=factor))
    expected = max(pairs, key=lambda pair: (pair[0] * factor, -pair[1]))
    assert evaluate(chosen, scope) == expected
    folded = fold(chosen, Scope(cfg=scope.cfg))
    assert evaluate(folded, scope) == expected
    assert {repr(dependency) for dependency in dependencies(chosen)} == {"cfg.pairs", "item.factor"}
    assert {repr(dependency) for dependency in dependencies(folded)} == {"item.factor"}
    assert fold(largest_of(cfg.pairs, by=lambda pair: pair[0]), Scope(cfg=scope.cfg)) in pairs


SIZES = [(1, 2), (2, 1), (3, 3)]


@given(st.lists(st.sampled_from([1, 1.0, True, 2**53 + 1, float(2**53 + 1), -1, "no number", None]), max_size=12))
def test_the_largest_of_a_list_is_chosen_anew_for_another_item(factors):
    """What an expression caches for an item is right for the next one, also for a value that is equal."""
    chosen = largest_of(SIZES, by=lambda size: where(item.factor == None, size[1], size[0] * item.factor - 2**53))  # noqa: E711
    for factor in factors:
        scope = Scope(item=SimpleNamespace(factor=factor))
        if isinstance(factor, str):
            with pytest.raises(SpecError, match="has no value"):
                evaluate(chosen, scope)
        elif factor is None:
            assert evaluate(chosen, scope) == (3, 3)
        else:
            assert evaluate(chosen, scope) == max(SIZES, key=lambda size: size[0] * factor - 2**53)


def test_the_largest_of_a_list_reads_no_branch_that_is_not_chosen():
    """The absent height is an input of the cache, and needs no value."""
    chosen = largest_of(SIZES, by=lambda size: where(item.tall, size[0] * item.height, -size[0]))
    for _ in range(2):
        assert evaluate(chosen, Scope(item=SimpleNamespace(tall=False))) == (1, 2)
        assert evaluate(chosen, Scope(item=SimpleNamespace(tall=True, height=2))) == (3, 3)


def test_the_largest_of_a_list_by_a_plain_function_is_computed_each_time():
    """Nobody knows what the function reads."""
    chosen = largest_of(SIZES, by=lambda size: as_expression(lambda scope: scope.counts["image"]) * size[0])
    assert evaluate(chosen, Scope(counts={"image": 1})) == (3, 3)
    assert evaluate(chosen, Scope(counts={"image": -1})) == (1, 2)


class LargerTokenizer(Tokenizer):
    def get_vocab(self):
        return {"<image>": 9}


def test_the_largest_of_a_list_by_a_token_is_that_of_the_tokenizer():
    """The id of a token is no dependency: the same expression is folded for two tokenizers."""
    chosen = largest_of([1, 2], by=lambda factor: factor * (tok["<image>"] - 8))
    assert fold(chosen, Scope(tok=Vocabulary(Tokenizer()))) == 1
    assert fold(chosen, Scope(tok=Vocabulary(LargerTokenizer()))) == 2


def test_the_largest_of_a_list_inside_a_loop_reads_the_element_around_it():
    layout = each(cfg.sizes, lambda x: embed(largest_of(cfg.sizes, by=lambda y: -abs(x - y))) * 1)
    assert repr(layout) == "each(cfg.sizes, lambda x: embed(largest_of(cfg.sizes, by=lambda y: -abs(x - y))) * 1)"
    assert layout.bind(STATIC).lay(STATIC).ids == [3, 4, 5]


def test_the_longest_list_has_a_largest_element():
    scope = Scope(cfg=SimpleNamespace(sizes=list(range(1024))))
    assert fold(largest_of(cfg.sizes, by=lambda size: size), scope) == 1023


@pytest.mark.parametrize(
    ("over", "problem"),
    [
        ([], "a list of 0 elements, of 1 to 1024."),
        ([1] * 1025, "a list of 1025 elements, of 1 to 1024."),
        (5, "a int is no list."),
    ],
)
def test_what_has_no_largest_element_has_no_value(over, problem):
    scope = Scope(cfg=SimpleNamespace(sizes=over))
    with pytest.raises(SpecError, match=r"^largest_of\(cfg.sizes, by=lambda x: x\) has no value: ") as caught:
        evaluate(largest_of(cfg.sizes, by=lambda size: size), scope)
    assert str(caught.value).endswith(problem)


def test_fold_takes_the_branches_that_an_item_may_take():
    """What is missing there is found when the spec is bound rather than at the first request that takes the branch."""
    assert is_equal_declaration(fold(where(cfg.a == 3, item.n, cfg.missing), SCOPE), item.n)
    assert is_equal_declaration(fold(where(cfg.a != 3, cfg.missing, item.n), SCOPE), item.n)
    with pytest.raises(SpecError, match=r"cfg\.missing"):
        fold(where(item.n > 3, cfg.missing, 1), SCOPE)


def multiply(scope):
    return scope.cfg.a * scope.item.width


def multiply_too(scope):
    return scope.cfg.a * scope.item.width


def look_up_field(scope):
    return scope.fields.one


def test_plain_functions_see_the_scope():
    assert evaluate(maximum(multiply, cfg.b), SCOPE) == 15
    assert evaluate(as_expression(look_up_field), SCOPE) == 3
    assert dependencies(maximum(multiply, cfg.a)) == find_leaves(as_expression(multiply), cfg.a)


def test_plain_functions_are_never_folded():
    assert isinstance(fold(as_expression(multiply), SCOPE), Expr)


def test_plain_functions_are_equal_by_identity():
    assert is_equal_declaration(as_expression(multiply), as_expression(multiply))
    assert not is_equal_declaration(as_expression(multiply), as_expression(multiply_too))
    assert is_equal_declaration(pickle.loads(pickle.dumps(as_expression(len))), as_expression(len))


def test_a_class_is_no_function_of_a_scope():
    assert as_expression(int) is int


# -- what Python must not decide -------------------------------------------------------------------------------------


def search(expr):
    return 3 in expr


def look_up_in_a_dict(expr):
    return {expr: 1}


def call(expr):
    return expr(1)


def write_into_a_text(expr):
    return f"<{expr}>"


DECISIONS = {
    "has no truth value; use where(), minimum(), maximum(), & | ~, or a function of a Scope": bool,
    "cannot be iterated; use each() in a layout": list,
    "cannot be searched": search,
    "cannot be looked up in a set or a dict": look_up_in_a_dict,
    "has no length": len,
    "cannot be called": call,
    "has no text": write_into_a_text,
    "is no number": range,
}

EXPRESSIONS = [cfg, cfg.a + 1, item.shape[0], where(cfg.a, 1, 2), tok["<image>"]]


@pytest.mark.parametrize("expr", EXPRESSIONS, ids=repr)
@pytest.mark.parametrize("sentence", DECISIONS)
def test_python_decides_nothing(expr, sentence):
    decide = DECISIONS[sentence]
    message = f"{expr!r} is only known later and {sentence}"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        decide(expr)


@pytest.mark.parametrize("expr", EXPRESSIONS, ids=repr)
def test_a_layout_is_no_value_to_compare_with(expr):
    with pytest.raises(TypeError, match="a Repeated is no value to compare with"):
        expr == embed(5) * 2  # noqa: B015


@pytest.mark.parametrize("expr", EXPRESSIONS, ids=repr)
@pytest.mark.parametrize("other", ["x", None, [1], {}, np.int64(3)], ids=repr)
def test_only_numbers_are_added(expr, other):
    with pytest.raises(TypeError):
        expr + other
    with pytest.raises(TypeError):
        other - expr


@pytest.mark.parametrize("expr", EXPRESSIONS, ids=repr)
def test_an_expression_has_no_attribute_to_set(expr):
    with pytest.raises((AttributeError, TypeError)):
        expr.x = 1


@pytest.mark.parametrize("expr", EXPRESSIONS, ids=repr)
@pytest.mark.parametrize("name", ["__deepcopy__", "_repr_html_", "__array__"])
def test_an_expression_has_no_attribute_that_a_library_probes(expr, name):
    """Pickle, copy and IPython look for these."""
    assert not hasattr(expr, name)


def add_tokens():
    return tok["a"] + tok["b"]


def add_token_and_text():
    return tok["a"] + tok.text("b")


def add_text_and_number():
    return tok.text("a") + 1


def add_token_and_id_of_the_config():
    return tok["a"] + cfg.sep_id


def multiply_token_by_expression():
    return tok["a"] * cfg.n


def multiply_number_by_token():
    return 3 * tok["a"]


def multiply_tokens():
    return tok["a"] * tok["b"]


def search_tokenizer():
    return "<image>" in tok


def call_tokenizer():
    return tok("a")


@pytest.mark.parametrize(
    ("combine", "remedy"),
    [
        (add_tokens, "Write literal(tok['a'], tok['b']) for one after the other."),
        (add_token_and_text, "Write literal(tok['a'], tok.text('b')) for one after the other."),
        (add_text_and_number, "Write literal(tok.text('a'), 1) for one after the other."),
        (add_token_and_id_of_the_config, "Write literal(tok['a'], cfg.sep_id) for one after the other."),
        (multiply_token_by_expression, "Write literal(tok['a']) * cfg.n to repeat the token."),
        (multiply_number_by_token, "Write literal(tok['a']) * 3 to repeat the token."),
        (multiply_tokens, "Write literal(tok['a']) * tok['b'] to repeat the token."),
        (search_tokenizer, "is only known later; use tok.has('<image>')"),
        (call_tokenizer, "tok is not called; write tok[\"<token>\"] or tok.text('a')"),
    ],
)
def test_ids_are_neither_summed_nor_multiplied_nor_searched(combine, remedy):
    with pytest.raises((SpecError, TypeError), match=re.escape(remedy)):
        combine()


@pytest.mark.parametrize(("value", "key"), [(torch.tensor(3), 3), (np.array([[1], [2]]), ((1,), (2,))), ("x", "x")])
def test_plain_values_can_be_keys(value, key):
    assert to_python(value) == key
    assert hash(to_python(value)) == hash(key)
