"""The operations of expressions: their source, what they read, and how they are evaluated.

`Recorded` is an operation with its operands: an `Expr` of `mmkit.language.expr`, which adds the
operators by which an author records one. `_OPERATIONS`, at the end, is the table of all operations:
each has a form for its source, and a compiler. A compiler gets a recorded operation and returns a
function of a `Scope`; it has compiled the operands into it, so that nothing is looked up by name
when a request is evaluated.

What is asked of an expression, or of a part of a declaration with expressions in it:

========================= ==========================================================================
call                      what it returns
========================= ==========================================================================
`evaluate(value, scope)`  the value of one expression: its compiled function, called
`evaluate_all` (of node)  a part or a container with the value of every expression in it
`fold` (of node)          the same declaration with values in place of what is static, see
                          `STATIC`; the rest stays an expression. This is how a spec is bound
`dependencies` (of node)  what it reads
========================= ==========================================================================

`Recorded` has a method for the last three: `_evaluate`, `_fold` and `_dependencies`.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from string import Formatter
from typing import Any, TypeAlias

from ..errors import MmkitError, SpecError
from .node import (
    FUNCTION,
    LOOP,
    Dependency,
    Node,
    build_structure,
    dependencies,
    evaluate_all,
    fold,
)
from .scope import Absent, Scope, to_python
from .vocabulary import AuthorText, fill_template, is_text_of_caller

Compiled: TypeAlias = "Callable[[Scope], Any]"
"""An expression as a function of a `Scope`."""


# -- an operation with its operands ----------------------------------------------------------------


class Recorded(Node):
    """An operation with its operands."""

    # the name of an operation in `_OPERATIONS`
    _op: str
    _args: tuple[Any, ...]

    def __getstate__(self) -> dict[str, Any]:
        # without what is cached: the compiled form is a function that no pickle holds
        return {"_op": self._op, "_args": self._args}

    def __repr__(self) -> str:
        return _OPERATIONS[self._op].write_source(self)

    @cached_property
    def _compiled(self) -> Compiled:
        return _OPERATIONS[self._op].compile(self)

    @cached_property
    def _dependencies(self) -> frozenset[Dependency]:
        if self._op == "get":
            holder, name, default = self._args
            chain = _find_chain(type(self)(".", (holder, name)))
            if chain is not None:
                return dependencies(default) | {replace(chain, expr=self)}
        chain = _find_chain(self)
        if chain is not None:
            return frozenset({chain})
        if self._op == "largest_of":
            over, variable, rank = self._args
            return dependencies(over) | drop_loop_variable(dependencies(rank), variable)
        return dependencies(self._args)

    def _evaluate(self, scope: Scope) -> Any:
        return self._compiled(scope)

    def _fold(self, scope: Scope) -> Any:
        # by identity: to compare expressions would take longer than to fold them. The entry holds
        # the expression, so that no other one gets its id; in a copy of a scope, the ids are others
        folded = scope.folded.get(id(self))
        if folded is None or folded[0] is not self:
            folded = (self, self._fold_uncached(scope))
            scope.folded[id(self)] = folded
        _, result = folded
        return result

    def _fold_uncached(self, scope: Scope) -> Any:
        if all(dependency.root in STATIC for dependency in self._dependencies):
            return self._compiled(scope)
        if self._op == "where":
            condition, then, other = self._args
            holds = fold(condition, scope)
            if isinstance(holds, bool):
                # only the branch that this config chooses: the other one may fail
                return fold(then if holds else other, scope)
        operands = fold(self._args, scope)
        if operands is self._args:
            return self
        return type(self)(self._op, operands)


def evaluate(value: Any, scope: Scope) -> Any:
    """Return the value of an expression in a scope; a constant is its own value.

    Raises:
        SpecError: an attribute, key or root that the scope lacks. The message names the expression.
    """
    if isinstance(value, Recorded):
        return value._compiled(scope)
    return value


def is_operation(value: Any, *ops: str) -> bool:
    """Return whether a value is an expression with one of these operations."""
    return isinstance(value, Recorded) and value._op in ops


# -- what it depends on ----------------------------------------------------------------------------

STATIC = frozenset({"cfg", "proc", "kwargs"})
"""Roots that are known once a spec is bound; the others vary per item.

The root `tok` is known then, too. It is no `Dependency`: the id of a token depends on the operands
of ``tok[...]`` only, so that it is static where they are."""


@dataclass(frozen=True, slots=True)
class LoopVariable:
    """The current element of a loop: of an `each`, or of a `largest_of`.

    Attributes:
        depth: the number of loops around that loop.
    """

    depth: int

    def __repr__(self) -> str:
        if self.depth < len(_LOOP_NAMES):
            return _LOOP_NAMES[self.depth]
        return f"x{self.depth}"


_LOOP_NAMES = "xyzuvw"


def drop_loop_variable(
    body_dependencies: Iterable[Dependency], variable: LoopVariable
) -> frozenset[Dependency]:
    """Return what the body of a loop depends on, but for the element of the loop."""
    others: set[Dependency] = set()
    for dependency in body_dependencies:
        if dependency.root != LOOP or dependency.keys[0] != variable:
            others.add(dependency)
    return frozenset(others)


def _find_chain(value: Recorded) -> Dependency | None:
    """Return what an expression reads if it is one chain or one plain function.

    Return None for any other operation.
    """
    if is_operation(value, "function"):
        return Dependency(FUNCTION, value._args, value)
    start: Any = value
    keys: list[Any] = []
    while is_operation(start, ".", "[]"):
        start, key = start._args
        if isinstance(key, Recorded):
            return None
        keys.append(build_structure(key))
    keys.reverse()
    if is_operation(start, "root"):
        (name,) = start._args
        return Dependency(name, tuple(keys), value)
    if is_operation(start, "loop"):
        return Dependency(LOOP, start._args + tuple(keys), value)
    return None


# -- source ----------------------------------------------------------------------------------------

# How tightly operations bind, as in Python.
_ANY = 0
_COMPARISON = 1
_UNARY = 7
_ATOM = 9

_NAME = None
"""In place of a level: the operand is a name, and no value."""


@dataclass(frozen=True)
class Operation:
    """An operation.

    Attributes:
        compile: a function that compiles an expression with this operation.
        form: its source: braces for each operand, and ``{rest}`` for those that follow, separated
            by commas.
        operand_levels: how tightly each operand has to bind, or `_NAME`; the last one also counts
            for those that follow.
        level: how tightly the whole binds.
    """

    compile: Callable[[Recorded], Compiled]
    form: str
    operand_levels: tuple[int | None, ...] = (_ANY,)
    level: int = _ATOM

    def write_source(self, expr: Recorded) -> str:
        """Write the source of an expression with this operation."""
        sources: list[str] = []
        for position, operand in enumerate(expr._args):
            last = len(self.operand_levels) - 1
            level = self.operand_levels[min(position, last)]
            sources.append(write_operand(operand, level))
        num_braces = self.form.count("{}")
        return self.form.format(*sources, rest=", ".join(sources[num_braces:]))


def write_operand(value: Any, level: int | None = _ATOM) -> str:
    """Write the source of an operand, in parentheses if it binds less tightly than `level`."""
    if level is None:
        return _write_name(value)
    if isinstance(value, slice):
        return _write_slice(value)
    if _find_level(value) < level:
        return f"({value!r})"
    return repr(value)


def _write_name(value: Any) -> str:
    if isinstance(value, str):
        return value
    return getattr(value, "__qualname__", repr(value))


def _write_slice(value: slice) -> str:
    ends = [value.start, value.stop]
    if value.step is not None:
        ends.append(value.step)
    return ":".join(["" if end is None else repr(end) for end in ends])


def _find_level(value: Any) -> int:
    """Return how tightly a value binds in its source."""
    if isinstance(value, Recorded):
        return _OPERATIONS[value._op].level
    if isinstance(value, (int, float)) and value < 0:
        return _UNARY
    return _ATOM


# -- evaluation ------------------------------------------------------------------------------------

_FAILURES = (ArithmeticError, TypeError, ValueError, LookupError, RuntimeError)
"""Errors of an operation on values that it cannot take."""

Explain: TypeAlias = Callable[..., str]
"""A function that says what is wrong where an operation fails, of its expression, the error and the
values of its operands."""


def _compile_operand(value: Any) -> Compiled:
    if isinstance(value, Recorded):
        return value._compiled

    def get_constant(scope: Scope) -> Any:
        return value

    return get_constant


def _make_no_value_error(expr: Recorded, problem: object) -> SpecError:
    return SpecError(f"{expr!r} has no value: {problem}.")


def _explain_values(expr: Recorded, error: Exception, *values: Any) -> str:
    """Explain a failure by the error and the values of the operands."""
    return f"{error}, with {', '.join([_shorten(value) for value in values])}"


def _shorten(value: Any) -> str:
    text = repr(value)
    if len(text) <= 80:
        return text
    return f"{text[:77]}..."


def _strict(
    function: Callable[..., Any], explain: Explain = _explain_values
) -> Callable[[Recorded], Compiled]:
    """Return the compiler of an operation that computes a function of the values of all operands.

    Args:
        function: the function.
        explain: says what is wrong where the function fails.
    """

    def compile(expr: Recorded) -> Compiled:
        call = _guard_call(expr, function, explain)
        operands = [_compile_operand(arg) for arg in expr._args]

        if len(operands) == 2:
            # the usual case, faster without a list
            first, second = operands

            def compute_pair(scope: Scope) -> Any:
                return call(first(scope), second(scope))

            return compute_pair

        def compute(scope: Scope) -> Any:
            values = [operand(scope) for operand in operands]
            return call(*values)

        return compute

    return compile


def _short_circuit(
    function: Callable[[Any, Any], Any], decisive: bool
) -> Callable[[Recorded], Compiled]:
    """Return the compiler of an operation like `and`, with a function of two operands.

    Args:
        function: the function.
        decisive: the first value that is the result itself; the second operand may have no value
            then.
    """

    def compile(expr: Recorded) -> Compiled:
        call = _guard_call(expr, function, _explain_values)
        first, second = [_compile_operand(arg) for arg in expr._args]

        def compute(scope: Scope) -> Any:
            value = first(scope)
            if value is decisive:
                return value
            return call(value, second(scope))

        return compute

    return compile


def _guard_call(
    expr: Recorded, function: Callable[..., Any], explain: Explain
) -> Callable[..., Any]:
    """Return a function whose failures name an expression."""

    def call(*values: Any) -> Any:
        try:
            return function(*values)
        except MmkitError:  # of a processor that loads when it is asked for
            raise
        except _FAILURES as error:
            raise _make_no_value_error(expr, explain(expr, error, *values)) from error

    return call


# cached results

_CACHEABLE_TYPES = frozenset({bool, int, float, str, type(None)})
"""Types of values by which a result is cached: equal values of one of these types are
interchangeable."""

_MAX_CACHED_RESULTS = 256
"""Results that are cached of each expression."""

_NOT_CACHED: Any = object()
"""In place of a result that is not cached."""

ComputeOfValues: TypeAlias = "Callable[[Scope, list[Any]], Any]"
"""A function of a scope, and of values that were read in it."""


def _cache_by_values(compute: ComputeOfValues) -> ComputeOfValues:
    """Return `compute` with its results cached by the vocabulary, the values and their types.

    Nothing else may decide a result. Nothing is cached for values other than numbers and strings.
    """
    results: dict[tuple[Any, ...], Any] = {}

    def compute_cached(scope: Scope, values: list[Any]) -> Any:
        # with the types, since 1 and 1.0 are equal
        key = (scope.tok, *values, *map(type, values))
        try:
            result = results.get(key, _NOT_CACHED)
        except TypeError:  # a value without a hash
            return compute(scope, values)
        if result is _NOT_CACHED:
            result = compute(scope, values)
            # here, and not for every result: no other values are in a key
            if _CACHEABLE_TYPES.issuperset(map(type, values)):
                if len(results) >= _MAX_CACHED_RESULTS:
                    results.clear()
                results[key] = result
        return result

    return compute_cached


# roots, attributes, elements

_WHY_ABSENT = {
    "cfg": "the spec is not bound to a config",
    "proc": "the model has no Hugging Face processor",
    "item": "it describes one raw item and is only known inside layout, update, fields and process",
    "fields": "it holds the processed fields of one item and is only known after processing",
}


def _compile_root(expr: Recorded) -> Compiled:
    (name,) = expr._args

    def get_root(scope: Scope) -> Any:
        value = getattr(scope, name)
        if value is None:
            raise SpecError(f"{name} has no value here: {_WHY_ABSENT[name]}.")
        return value

    return get_root


def _compile_loop(expr: Recorded) -> Compiled:
    (variable,) = expr._args
    depth = variable.depth

    def get_element(scope: Scope) -> Any:
        return scope.loop[depth]

    return get_element


def _compile_function(expr: Recorded) -> Compiled:
    (function,) = expr._args
    return function  # type: ignore[no-any-return]


_MISSING: Any = object()
"""What `_look_up` returns where there is nothing."""


@lru_cache(maxsize=256)
def _is_mapping(kind: Any) -> bool:
    return issubclass(kind, Mapping)


def _look_up(holder: Any, name: str) -> Any:
    """Return the entry of a mapping, or the attribute of anything else.

    Return `_MISSING` where there is none.
    """
    kind: Any = type(holder)
    if _is_mapping(kind):
        return holder.get(name, _MISSING)
    return getattr(holder, name, _MISSING)


def _compile_attribute(expr: Recorded) -> Compiled:
    holder_arg, name = expr._args
    get_holder = _compile_operand(holder_arg)

    def get_attribute(scope: Scope) -> Any:
        holder = get_holder(scope)
        try:
            value = _look_up(holder, name)
        except MmkitError:  # of a processor that loads when it is asked for
            raise
        except _FAILURES as error:
            raise _make_no_value_error(expr, _explain_missing(holder_arg, holder, name)) from error
        if value is _MISSING:
            raise _make_no_value_error(expr, _explain_missing(holder_arg, holder, name))
        return value

    return get_attribute


def _explain_missing(holder_arg: Any, holder: Any, name: str) -> str:
    """Explain that a value has no such attribute or entry, with those that it has."""
    kind: Any = type(holder)
    if kind is Absent:
        remedy = f"Choose by where({holder_arg!r}, ..., [])"
        return f"{holder_arg!r} is absent. {remedy}"
    if _is_mapping(kind):
        names = sorted(holder)
    else:
        public = [attribute for attribute in dir(holder) if not attribute.startswith("_")]
        names = difflib.get_close_matches(name, public)
    if is_operation(holder_arg, "root") and holder_arg._args == ("fields",):
        problem = f"the processed fields lack {name!r}"
    else:
        problem = f"{kind.__name__} has no attribute {name!r}"
    if names:
        problem += f". It has: {', '.join([str(name) for name in names])}"
    return problem


def _compile_get(expr: Recorded) -> Compiled:
    get_holder, get_name, get_default = [_compile_operand(arg) for arg in expr._args]

    def get_entry(scope: Scope) -> Any:
        value = _look_up(get_holder(scope), get_name(scope))
        if value is _MISSING:
            return get_default(scope)
        return value

    return get_entry


_MAX_LISTED = 16
"""Elements of the longest vector of which one is read as that of a list."""


def _get_element(holder: Any, key: Any) -> Any:
    if type(key) is int and _is_short_vector(holder):
        # such as a grid: to index a tensor takes ten times as long
        elements = holder.tolist()
        if -len(elements) <= key < len(elements) and isinstance(elements[key], int):
            return elements[key]
    element = holder[key]
    if getattr(element, "ndim", None) != 0:
        return element
    # Python computes with whole numbers faster than a tensor does, and exactly
    number = element.item()
    if isinstance(number, int):
        return number
    return element


def _is_short_vector(holder: Any) -> bool:
    """Return whether a value is a tensor or an array of one dimension with a few elements."""
    if not hasattr(type(holder), "tolist"):  # as of tensors and arrays
        return False
    if holder.ndim != 1:
        return False
    length: int = holder.shape[0]  # `len` of a tensor calls functions of torch in Python
    return length <= _MAX_LISTED


def _explain_element(expr: Recorded, error: Exception, holder: Any, key: Any) -> str:
    return f"{expr._args[0]!r} is {_shorten(holder)}"


def _compile_where(expr: Recorded) -> Compiled:
    holds, then, other = [_compile_operand(arg) for arg in expr._args]

    def choose(scope: Scope) -> Any:
        if holds(scope):
            return then(scope)
        return other(scope)

    return choose


MAX_ELEMENTS = 1024
"""Elements of the longest list of `largest_of`: a config may hold a list of any length."""


def _compile_largest_of(expr: Recorded) -> Compiled:
    """Compile the choice of an element. The element is cached by what the choice reads.

    Many items have the same size, and the ranks of a few resolutions take longer than all else that
    is evaluated for an item.
    """
    over, variable, rank = expr._args
    get_elements = _compile_operand(over)

    def find_largest(scope: Scope) -> Any:
        elements = to_python(get_elements(scope))
        if not isinstance(elements, tuple):
            raise TypeError(f"a {type(elements).__name__} is no list")
        if not 0 < len(elements) <= MAX_ELEMENTS:
            raise ValueError(f"a list of {len(elements)} elements, of 1 to {MAX_ELEMENTS}")
        ranks: list[Any] = []
        for element in elements:
            inner = scope.in_loop(variable.depth, element)
            ranks.append(to_python(evaluate_all(rank, inner)))
        return elements[ranks.index(max(ranks))]

    return _guard_call(expr, _cache_by_dependencies(expr, find_largest), _explain_largest)


def _cache_by_dependencies(expr: Recorded, compute: Compiled) -> Compiled:
    """Return `compute` of an expression, with its results cached by what the expression reads.

    Nothing is cached where the expression calls a plain function, which may read anything, nor
    where something has no value in this scope: only one branch of a `where` is evaluated, and the
    other one may read what is absent.
    """
    readers: list[Compiled] = []
    for dependency in expr._dependencies:
        if dependency.root == FUNCTION:
            return compute
        readers.append(_compile_operand(dependency.expr))

    def compute_of_values(scope: Scope, values: list[Any]) -> Any:
        return compute(scope)

    compute_cached = _cache_by_values(compute_of_values)

    def read_and_compute(scope: Scope) -> Any:
        try:
            values = [reader(scope) for reader in readers]
        except SpecError:
            return compute(scope)
        return compute_cached(scope, values)

    return read_and_compute


def _explain_largest(expr: Recorded, error: Exception, scope: Scope) -> str:
    return str(error)


# calls of `later`


def _compile_call(expr: Recorded) -> Compiled:
    """Compile a recorded call. Its results for numbers and strings are cached.

    Operands that are constants may be any objects, for example the Hugging Face processor that the
    spec is bound to: a result is cached with the expression, in which they are always the same.
    """
    function, *args = expr._args
    positions: list[int] = []
    operands: list[Compiled] = []
    for position, arg in enumerate(args):
        if isinstance(arg, Recorded):
            positions.append(position)
            operands.append(arg._compiled)

    def list_arguments(values: Iterable[Any]) -> list[Any]:
        arguments = list(args)
        for position, value in zip(positions, values, strict=True):
            arguments[position] = value
        return arguments

    def call(scope: Scope, values: list[Any]) -> Any:
        return function(*list_arguments(values))

    def explain(expr: Recorded, error: Exception, scope: Scope, values: list[Any]) -> str:
        return _explain_values(expr, error, *list_arguments(values))

    guarded_call = _guard_call(expr, _cache_by_values(call), explain)

    def compute(scope: Scope) -> Any:
        return guarded_call(scope, [operand(scope) for operand in operands])

    return compute


# the tokenizer

Question: TypeAlias = Callable[[Recorded, Any, str, list[Any]], Any]
"""A question to the vocabulary, of the expression that asks it, the vocabulary, a text or template,
and the values that fill the template."""


def _ask_vocabulary(ask: Question) -> Callable[[Recorded], Compiled]:
    """Return the compiler of an operation that asks the vocabulary about a text."""

    def compile(expr: Recorded) -> Compiled:
        template, *args = expr._args
        are_of_author = [_is_of_author(arg) for arg in args]

        def compute(scope: Scope) -> Any:
            if scope.tok is None:
                remedy = "Use a token id from cfg instead"
                raise _make_no_value_error(expr, f"the model runs without a tokenizer. {remedy}")
            text = to_python(evaluate(template, scope))
            values: list[Any] = []
            for arg, is_of_author in zip(args, are_of_author, strict=True):
                value = to_python(evaluate(arg, scope))
                if not isinstance(value, (str, int, float)):
                    got = f"a {type(value).__name__}"
                    raise _make_no_value_error(
                        expr, f"{arg!r} is neither a text nor a number but {got}"
                    )
                if is_of_author and isinstance(value, str):
                    value = AuthorText(value)
                values.append(value)
            if values:
                _check_template(expr, text)
            return ask(expr, scope.tok, text, values)

        return compute

    return compile


def _is_of_author(value: Any) -> bool:
    """Return whether the author of a spec, or of a checkpoint, wrote a value.

    It is a constant, or one of the config and the processor. Any other text may be a caller's.
    """
    return all(dependency.root in ("cfg", "proc") for dependency in dependencies(value))


_LONG_NUMBER = re.compile(r"\d{5}")


def _check_template(expr: Recorded, template: str) -> None:
    """Refuse a template that makes a text of any length of one value, as ``{:>3000000000}`` does.

    Raises:
        SpecError: it does.
    """
    for _, _, form, _ in Formatter().parse(template):
        if form and ("{" in form or _LONG_NUMBER.search(form)):
            raise _make_no_value_error(
                expr, f"the width {form!r} in the template is no number below 10000"
            )


def _find_id(expr: Recorded, vocabulary: Any, template: str, values: list[Any]) -> Any:
    return vocabulary[fill_template(template, *values)]


def _has_token(expr: Recorded, vocabulary: Any, template: str, values: list[Any]) -> Any:
    return vocabulary.has(template, *values)


def _encode_text(expr: Recorded, vocabulary: Any, template: str, values: list[Any]) -> Any:
    ids = vocabulary.text(template, *values)
    unknown = vocabulary.unknown_id
    # a caller's text becomes unknown tokens where a prompt does
    if unknown not in ids or any(is_text_of_caller(value) for value in values):
        return ids
    text = fill_template(template, *values)
    if vocabulary.decode([unknown]) in text:
        return ids
    problem = f"the tokenizer has no token for a part of {text!r}, as for other texts"
    raise _make_no_value_error(expr, f"{problem}. Use a text that it knows")


# arithmetic

MAX_BITS = 4096
"""The bits of the largest whole number: a config may hold any numbers, and a power of two of them
takes all time and memory."""

MAX_LENGTH = 1 << 22
"""The elements of the longest list or text that `*` makes."""


def _invert(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return ~value


def _ceil_div(a: Any, b: Any) -> Any:
    return -(-a // b)


def _is_equal(a: Any, b: Any) -> Any:
    # tensors and lists are compared by their elements
    return to_python(a) == to_python(b)


def _is_unequal(a: Any, b: Any) -> Any:
    return to_python(a) != to_python(b)


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1:
        _check_bits(base.bit_length() * exponent)
    return base**exponent


def _multiply(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        _check_bits(a.bit_length() + b.bit_length())
        return a * b
    _check_repetition(a, b)
    _check_repetition(b, a)
    return a * b


def _check_repetition(sequence: Any, count: Any) -> None:
    """Refuse to repeat a sequence until it is too long.

    Raises:
        ValueError: it would be.
    """
    if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(count, int):
        length = len(sequence) * count
        if length > MAX_LENGTH:
            raise ValueError(f"a list or text of {length} elements, of at most {MAX_LENGTH}")


def _remainder(a: Any, b: Any) -> Any:
    if isinstance(a, (str, bytes)):  # which Python would take for a format, of any width
        raise TypeError("a text has no remainder")
    return a % b


def _round(value: Any, *digits: Any) -> Any:
    for count in digits:
        if isinstance(count, int) and abs(count) > MAX_BITS:
            raise ValueError(f"a number of more than {MAX_BITS} digits")
    return round(value, *digits)


def _check_bits(bits: int) -> None:
    """Refuse to compute a whole number that is too long.

    Raises:
        OverflowError: it is.
    """
    if bits > MAX_BITS:
        raise OverflowError(f"a whole number of more than {MAX_BITS} bits")


# -- the table of operations -----------------------------------------------------------------------


def _make_comparison(sign: str, function: Callable[[Any, Any], Any]) -> Operation:
    # both operands bind more tightly: Python would chain two comparisons
    levels = (_COMPARISON + 1, _COMPARISON + 1)
    return Operation(_strict(function), f"{{}} {sign} {{}}", levels, _COMPARISON)


def _make_arithmetic(sign: str, level: int, function: Callable[[Any, Any], Any]) -> Operation:
    # of operators that bind alike, Python computes the left one first
    return Operation(_strict(function), f"{{}} {sign} {{}}", (level, level + 1), level)


_OPERATIONS = {
    "root": Operation(_compile_root, "{}", (_NAME,)),
    "loop": Operation(_compile_loop, "{}", (_NAME,)),
    "function": Operation(_compile_function, "{}", (_NAME,)),
    ".": Operation(_compile_attribute, "{}.{}", (_ATOM, _NAME)),
    "[]": Operation(_strict(_get_element, _explain_element), "{}[{}]", (_ATOM, _ANY)),
    "get": Operation(_compile_get, "{}.get({rest})", (_ATOM, _ANY)),
    "where": Operation(_compile_where, "where({rest})"),
    "truth": Operation(_strict(bool), "{}"),
    "largest_of": Operation(
        _compile_largest_of, "largest_of({}, by=lambda {}: {})", (_ANY, _NAME, _ANY)
    ),
    "later": Operation(_compile_call, "later({})({rest})", (_NAME, _ANY)),
    "tok[]": Operation(_ask_vocabulary(_find_id), "tok[{rest}]"),
    "tok.text": Operation(_ask_vocabulary(_encode_text), "tok.text({rest})"),
    "tok.has": Operation(_ask_vocabulary(_has_token), "tok.has({rest})"),
    "neg": Operation(_strict(operator.neg), "-{}", (_UNARY,), _UNARY),
    "~": Operation(_strict(_invert), "~{}", (_UNARY,), _UNARY),
    "abs": Operation(_strict(abs), "abs({rest})"),
    "ceil": Operation(_strict(math.ceil), "ceil({rest})"),
    "ceil_div": Operation(_strict(_ceil_div), "ceil_div({rest})"),
    "floor": Operation(_strict(math.floor), "floor({rest})"),
    "maximum": Operation(_strict(max), "maximum({rest})"),
    "minimum": Operation(_strict(min), "minimum({rest})"),
    "round": Operation(_strict(_round), "round({rest})"),
    "==": _make_comparison("==", _is_equal),
    "!=": _make_comparison("!=", _is_unequal),
    "<": _make_comparison("<", operator.lt),
    "<=": _make_comparison("<=", operator.le),
    ">": _make_comparison(">", operator.gt),
    ">=": _make_comparison(">=", operator.ge),
    "|": Operation(_short_circuit(operator.or_, True), "{} | {}", (2, 3), 2),
    "&": Operation(_short_circuit(operator.and_, False), "{} & {}", (3, 4), 3),
    "+": _make_arithmetic("+", 5, operator.add),
    "-": _make_arithmetic("-", 5, operator.sub),
    "*": _make_arithmetic("*", 6, _multiply),
    "/": _make_arithmetic("/", 6, operator.truediv),
    "//": _make_arithmetic("//", 6, operator.floordiv),
    "%": _make_arithmetic("%", 6, _remainder),
    # of powers, Python computes the right one first
    "**": Operation(_strict(_power), "{} ** {}", (9, 8), 8),
}
"""The operations by name."""
