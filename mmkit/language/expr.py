"""Expressions: values that are known later.

An expression records attribute access, indexing, comparisons and arithmetic on a few roots. mmkit
evaluates it when the roots have values:

========  ==========================================================================================
`cfg`     the Hugging Face config of the model, with its nested configs
`item`    facts of one raw item: `index`, `count` (items of its modality in the request), and by
          item type `shape`, `length`, `text`, `width`, `height`, `frames`; `rows` of an embedding
`fields`  the processed fields of that item, by name
`proc`    the attributes of the model's Hugging Face processor
`kwargs`  the request's `mm_processor_kwargs`, merged with those of the engine
`tok`     the tokenizer: ``tok["<image>"]`` is the id of one token, ``tok.text("some text")`` the
          ids of a text, ``tok.has("<image>")`` whether the vocabulary has a token
========  ==========================================================================================

Every operator records, ``==`` and ``&`` included, so nothing about an expression can be decided
while a spec is written: a recorded comparison has no truth value and no hash, and raises where
Python asks for one (`if`, `in`, `and`, a set). `is_equal_declaration` compares two expressions. The
`repr` of an expression is its source.

A plain function of one `Scope` may stand wherever an expression may. A function is opaque: mmkit
compares functions by identity, and never evaluates one ahead of time.

The file in its order: `Expr` and the roots, the functions that make expressions, what an expression
depends on, the `Scope` in which it is evaluated, and the table of operations with their source and
their evaluation.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, wraps
from string import Formatter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import MmkitError, SpecError
from .node import (
    FUNCTION,
    LOOP,
    Dependency,
    Node,
    build_structure,
    dependencies,
    fold,
    is_equal_declaration,
    map_values,
)
from .vocabulary import AuthorText, fill_template, is_text_of_caller


class Expr(Node):
    """A value that is known later: an operation with its operands.

    Build expressions from the roots `cfg`, `item`, `fields`, `proc`, `kwargs` and `tok`.

    Attributes, items and operators record another expression: ``cfg.vision_config.depth``,
    ``cfg.sizes[0]``, ``item.width // 14 + 1``, ``(cfg.n == 2) & (item.width > 9)``.
    """

    # the name of an operation in `_OPERATIONS`
    _op: str
    _args: tuple[Any, ...]

    # numpy then leaves `array + expression` to the operators below
    __array_ufunc__ = None

    def __getattr__(self, name: str) -> Expr:
        if name.startswith("_"):  # pickle, copy and IPython probe for these
            raise AttributeError(name)
        return Expr(".", (self, name))

    def __getitem__(self, key: Any) -> Expr:
        return Expr("[]", (self, key))

    def get(self, name: str, default: Value) -> Expr:
        """Return the attribute or entry of that name, or a default where there is none.

        ``kwargs.get("size", proc.size)``, ``cfg.vision_config.get("merge_size", 2)``.
        """
        return _record("get", self, name, default)

    def __add__(self, other: Operand) -> Expr:
        return _record_pair("+", self, other)

    def __radd__(self, other: Operand) -> Expr:
        return _record_pair("+", other, self)

    def __sub__(self, other: Operand) -> Expr:
        return _record_pair("-", self, other)

    def __rsub__(self, other: Operand) -> Expr:
        return _record_pair("-", other, self)

    def __mul__(self, other: Operand) -> Expr:
        return _record_pair("*", self, other)

    def __rmul__(self, other: Operand) -> Expr:
        return _record_pair("*", other, self)

    def __truediv__(self, other: Operand) -> Expr:
        return _record_pair("/", self, other)

    def __rtruediv__(self, other: Operand) -> Expr:
        return _record_pair("/", other, self)

    def __floordiv__(self, other: Operand) -> Expr:
        return _record_pair("//", self, other)

    def __rfloordiv__(self, other: Operand) -> Expr:
        return _record_pair("//", other, self)

    def __mod__(self, other: Operand) -> Expr:
        return _record_pair("%", self, other)

    def __rmod__(self, other: Operand) -> Expr:
        return _record_pair("%", other, self)

    def __pow__(self, other: Operand) -> Expr:
        return _record_pair("**", self, other)

    def __rpow__(self, other: Operand) -> Expr:
        return _record_pair("**", other, self)

    def __and__(self, other: Operand) -> Expr:
        return _record_pair("&", self, other)

    def __rand__(self, other: Operand) -> Expr:
        return _record_pair("&", other, self)

    def __or__(self, other: Operand) -> Expr:
        return _record_pair("|", self, other)

    def __ror__(self, other: Operand) -> Expr:
        return _record_pair("|", other, self)

    def __lt__(self, other: Operand) -> Expr:
        return _record_pair("<", self, other)

    def __le__(self, other: Operand) -> Expr:
        return _record_pair("<=", self, other)

    def __gt__(self, other: Operand) -> Expr:
        return _record_pair(">", self, other)

    def __ge__(self, other: Operand) -> Expr:
        return _record_pair(">=", self, other)

    def __eq__(self, other: object) -> Expr:  # type: ignore[override]
        return _record_comparison("==", self, other)

    def __ne__(self, other: object) -> Expr:  # type: ignore[override]
        return _record_comparison("!=", self, other)

    def __neg__(self) -> Expr:
        return Expr("neg", (self,))

    def __invert__(self) -> Expr:
        return Expr("~", (self,))

    def __abs__(self) -> Expr:
        return Expr("abs", (self,))

    def __floor__(self) -> Expr:
        return Expr("floor", (self,))

    def __ceil__(self) -> Expr:
        return Expr("ceil", (self,))

    def __round__(self, *digits: Any) -> Expr:
        return Expr("round", (self, *digits))

    # Python asks these for an answer at once, which would be wrong. Type checkers do not see them,
    # and refuse `len(expr)` and the like.
    if not TYPE_CHECKING:

        def __bool__(self):
            raise _make_known_later_error(
                self, "has no truth value; use where(), minimum(), maximum(), & | ~"
            )

        def __hash__(self):
            raise _make_known_later_error(
                self, "cannot be looked up in a set or a dict; use later(table.get)(...)"
            )

        def __iter__(self):
            raise _make_known_later_error(self, "cannot be iterated; use each() in a layout")

        def __contains__(self, value):
            raise _make_known_later_error(self, "cannot be searched; use later(function)(...)")

        def __len__(self):
            raise _make_known_later_error(self, "has no length; use later(len)(...)")

        def __call__(self, *args, **kwargs):
            raise _make_known_later_error(self, "cannot be called; use later(function)(...)")

        def __format__(self, form):
            raise _make_known_later_error(
                self, 'has no text; use tok["...{}", value], tok.text("...{}", value)'
            )

        def __int__(self):
            raise _make_known_later_error(
                self, "is no number; use math.floor(), ceil_div(), //, later(int)(...)"
            )

        __float__ = __index__ = __int__

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
            chain = _find_chain(Expr(".", (holder, name)))
            if chain is not None:
                return dependencies(default) | {replace(chain, expr=self)}
        chain = _find_chain(self)
        if chain is not None:
            return frozenset({chain})
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
        return Expr(self._op, operands)


class Tokenizer:
    """The root `tok`: the ids of tokens and texts in the model's tokenizer.

    They are known once a spec is bound.

    ``tok["<image>"]`` is the id of one token, ``tok.text("some text")`` the ids of a text, and
    ``tok.has("<image>")`` whether the vocabulary has a token. Each takes a template for what
    depends on the item: ``tok["<|image_{}|>", item.index + 1]``.
    """

    def __getitem__(self, text: str | Expr | tuple[Any, ...]) -> Expr:
        """Return the id of one token of the vocabulary."""
        if isinstance(text, tuple):
            return _record("tok[]", *text)
        return _record("tok[]", text)

    def text(self, text: str | Expr, *values: Value) -> Expr:
        """Return the ids of a text.

        The special tokens with which the tokenizer surrounds texts are left out.

        Special tokens that the text spells become these tokens. A value that is a string is encoded
        as plain text, so that no caller writes a special token, unless the config or the processor
        states it.
        """
        return _record("tok.text", text, *values)

    def has(self, text: str | Expr, *values: Value) -> Expr:
        """Return whether the vocabulary has a token."""
        return _record("tok.has", text, *values)

    if not TYPE_CHECKING:

        def __contains__(self, text):
            raise TypeError(f"{text!r} in tok is only known later; use tok.has({text!r})")

        def __call__(self, *text):
            texts = ", ".join(repr(part) for part in text)
            raise TypeError(f'tok is not called; write tok["<token>"] or tok.text({texts})')

    def __repr__(self) -> str:
        return "tok"


def _make_root(name: str, doc: str) -> Expr:
    root = Expr("root", (name,))
    root._set(__doc__=doc)  # what help(mmkit.cfg) shows
    return root


cfg = _make_root(
    "cfg",
    """The Hugging Face config of the model, with its nested configs.

    An attribute is one of the config: ``cfg.image_token_id``, ``cfg.vision_config.patch_size``.
    ``cfg.get("merge_size", 2)`` has a default. Known once a spec is bound.
    """,
)

item = _make_root(
    "item",
    """Facts of one raw item, before it is processed.

    ``item.index`` is its position among the items of its modality in the request, and
    ``item.count`` the number of these. By item type there are ``item.shape`` and ``item.length``
    of a Tensor, ``item.length`` of Audio and of Text, ``item.text`` of a Text, ``item.width`` and
    ``item.height`` of an Image, and these, ``item.frames`` and ``item.metadata`` of a Video. A
    Record has the facts of each part by its name: ``item.genes.length``; an `optional` part that is
    absent is false. A List has ``item.length`` and ``item.elements``, the facts of each. For an
    item that comes as embeddings, the root has ``item.rows``, their number. Layouts, updates and
    fields read it.
    """,
)

fields = _make_root(
    "fields",
    """The processed fields of one item, by name.

    ``fields.grid[0] * fields.grid[1]`` reads what the processor, or the function of the spec,
    returned for that item in the field `grid`. Layouts, updates and derived fields read it.
    """,
)

proc = _make_root(
    "proc",
    """The model's Hugging Face processor: its attributes, and those of its parts.

    ``proc.image_processor.size`` reads one. It has no value for a model without a processor. Known
    once a spec is bound.
    """,
)

kwargs = _make_root(
    "kwargs",
    """The request's `mm_processor_kwargs`, merged with those of the engine.

    ``kwargs.crops`` reads one, ``kwargs.get("size", proc.size)`` has a default for requests
    without it.
    """,
)

tok = Tokenizer()


Operand: TypeAlias = "Expr | int | float"
"""What stands on either side of an operator."""

Value: TypeAlias = (
    "Expr | int | float | str | tuple[Any, ...] | list[Any] | Callable[[Scope], Any] | None"
)
"""A constant, an `Expr`, or a function of one `Scope`."""

Count: TypeAlias = "Expr | int | Callable[[Scope], Any]"
"""A whole number >= 0, now or later."""

Condition: TypeAlias = "Expr | bool | Callable[[Scope], Any]"
"""A truth value, now or later."""

Compiled: TypeAlias = "Callable[[Scope], Any]"
"""An expression as a function of a `Scope`."""


# -- functions that make expressions ---------------------------------------------------------------


def ceil_div(a: Value, b: Value) -> Expr:
    """Return `a / b`, rounded up to an integer: ``-(-a // b)``."""
    return _record("ceil_div", a, b)


def minimum(*args: Value) -> Expr:
    """Return the smallest of the arguments."""
    return _record("minimum", *args)


def maximum(*args: Value) -> Expr:
    """Return the largest of the arguments."""
    return _record("maximum", *args)


def later(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for arguments that are known later; also a decorator.

    ``later(best_grid)(item.width, item.height)[0]`` is an expression.

    A call with an expression among its arguments is recorded; any other call is made. Unlike the
    result of a plain function of a `Scope`, the result depends on the arguments only, so mmkit
    caches layouts that use it per geometry, and results for plain numbers and strings beside
    objects that the spec is bound to, such as `proc`. The function must return the same for the
    same arguments.
    """

    def call(*args: Any) -> Any:
        for arg in args:
            if isinstance(arg, Expr):
                return Expr("later", (function, *args))
        return function(*args)

    if hasattr(function, "__name__"):
        call = wraps(function)(call)
    call.function = function  # type: ignore[attr-defined]
    call.is_later = True  # type: ignore[attr-defined]
    return call


def unwrap_later(function: Any) -> Any:
    """Return the function that `later` was called with; any other function as it is."""
    if getattr(function, "is_later", False) is True:
        return function.function
    return function


def where(test: Condition, then: Value | Node, other: Value | Node) -> Expr:
    """Return `then` if `test` holds, else `other`; only the chosen value is evaluated."""
    return _record("where", _record("truth", test), then, other)


def as_expression(value: Any) -> Any:
    """Return an expression for a plain function of a `Scope`, and any other value as it is."""
    is_function = callable(value) and not isinstance(value, (Expr, type))
    if is_function:
        return Expr("function", (value,))
    return value


def as_expressions(value: Any) -> Any:
    """Return a container with an expression in place of each plain function of a `Scope`."""
    return map_values(as_expression, value)


def as_expression_tuple(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return a tuple of values, with an expression in place of each plain function."""
    return tuple([as_expression(value) for value in values])


def _record(op: str, *operands: Any) -> Expr:
    """Return an expression with this operation; operands may be plain functions of a `Scope`."""
    return Expr(op, as_expression_tuple(operands))


def _record_pair(op: str, left: Any, right: Any) -> Expr:
    """Return an expression with an operator.

    If an operand is no number, return NotImplemented, so that Python asks the other operand, for
    example a layout.
    """
    if not isinstance(left, (Expr, int, float)) or not isinstance(right, (Expr, int, float)):
        return NotImplemented  # type: ignore[no-any-return]
    if op in ("*", "+"):
        _refuse_token_arithmetic(op, left, right)
    return Expr(op, (left, right))


def _record_comparison(op: str, left: Expr, right: object) -> Expr:
    if not isinstance(right, (Expr, int, float, str, bytes, tuple, list, type(None))):
        problem = f"a {type(right).__name__} is no value to compare with"
        raise TypeError(f"{left!r} {op} {right!r}: {problem}")
    return Expr(op, (left, right))


def _make_known_later_error(expr: Expr, problem: str) -> TypeError:
    return TypeError(f"{expr!r} is only known later and {problem}, or a function of a Scope")


def _refuse_token_arithmetic(op: str, left: Any, right: Any) -> None:
    """Refuse arithmetic on tokens that was meant for a layout.

    Adding a number to the id of a token is allowed and gives the next id.

    Raises:
        SpecError: a token is multiplied, or tokens or texts are added.
    """
    operands = (left, right)
    num_tokens = sum(is_operation(operand, "tok[]") for operand in operands)
    num_texts = sum(is_operation(operand, "tok.text") for operand in operands)
    if num_tokens + num_texts == 0 or _has_layout(left) or _has_layout(right):
        return
    if op == "*" and num_tokens:
        token, count = operands if is_operation(left, "tok[]") else (right, left)
        remedy = f"Write literal({token!r}) * {count!r} to repeat the token."
        raise SpecError(f"{left!r} * {right!r}", "a layout to repeat", "the id of a token", remedy)
    are_expressions = isinstance(left, Expr) and isinstance(right, Expr)
    if op == "+" and (num_texts == 1 or (num_tokens and are_expressions)):
        remedy = f"Write literal({left!r}, {right!r}) for one after the other."
        raise SpecError(f"{left!r} + {right!r}", "layouts", "ids, which are not added", remedy)


def _has_layout(value: Any) -> bool:
    """Return whether a value is a layout, or an expression with one, as a choice of layouts is."""
    if isinstance(value, Expr) and value._args:
        return any(_has_layout(operand) for operand in value._args)
    return isinstance(value, Node)


def is_operation(value: Any, *ops: str) -> bool:
    """Return whether a value is an expression with one of these operations."""
    return isinstance(value, Expr) and value._op in ops


# -- what an expression depends on -----------------------------------------------------------------

STATIC = frozenset({"cfg", "proc", "kwargs"})
"""Roots that are known once a spec is bound; the others vary per item."""


@dataclass(frozen=True, slots=True)
class LoopVariable:
    """The current element of an `each`, in the layout of that element.

    Attributes:
        depth: the number of `each` around that `each`.
    """

    depth: int

    def __repr__(self) -> str:
        if self.depth < len(_LOOP_NAMES):
            return _LOOP_NAMES[self.depth]
        return f"x{self.depth}"


_LOOP_NAMES = "xyzuvw"

INDEX = Dependency("item", ("index",), item.index)
"""The position of an item among those of its modality in the request."""

COUNT = Dependency("item", ("count",), item.count)
"""The number of these."""


def _find_chain(value: Expr) -> Dependency | None:
    """Return what an expression reads if it is one chain or one plain function.

    Return None for any other operation.
    """
    if is_operation(value, "function"):
        return Dependency(FUNCTION, value._args, value)
    start = value
    keys: list[Any] = []
    while is_operation(start, ".", "[]"):
        start, key = start._args
        if isinstance(key, Expr):
            return None
        keys.append(build_structure(key))
    keys.reverse()
    if is_operation(start, "root"):
        (name,) = start._args
        return Dependency(name, tuple(keys), value)
    if is_operation(start, "loop"):
        return Dependency(LOOP, start._args + tuple(keys), value)
    return None


# -- evaluation ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scope:
    """The values of the roots: the argument of a plain function in place of an expression.

    Attributes:
        cfg: Hugging Face config, or None before binding.
        proc: Hugging Face processor, or None where the model has none.
        tok: `mmkit.language.vocabulary.Vocabulary`: ``tok[token]`` is an id, ``tok.text(text)``
            a list of ids; None without a tokenizer.
        item: facts of the current item.
        fields: processed fields of the current item.
        prompt: the caller's token ids.
        counts: number of items of the request by modality, for functions that rewrite prompts.
        kwargs: the request's `mm_processor_kwargs`, merged with those of the engine.
        loop: values of the loop variables of enclosing `each` layouts, outermost first.
        folded: expressions that were folded in this scope, with their results, by the identity of
            the expression: the parts of a spec share expressions.
    """

    cfg: Any = None
    proc: Any = None
    tok: Any = None
    item: Any = None
    fields: Any = None
    prompt: Any = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loop: tuple[Any, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    folded: dict[int, tuple[Expr, Any]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def for_item(self, item: Any, fields: Mapping[str, Any] | None) -> Scope:
        """Return this scope for one item."""
        # faster than dataclasses.replace, once per item
        return Scope(
            self.cfg,
            self.proc,
            self.tok,
            item,
            fields,
            self.prompt,
            self.kwargs,
            self.loop,
            self.counts,
        )

    def in_loop(self, depth: int, value: Any) -> Scope:
        """Return this scope inside an `each` at that depth, whose current element is `value`."""
        outer = self.loop[:depth]
        # an `each` that was bound without the outer ones sees none of their elements
        missing = (None,) * (depth - len(outer))
        return replace(self, loop=(*outer, *missing, value))


class Fields(dict[str, Any]):
    """The processed fields of one item: ``fields.grid`` is ``fields["grid"]``."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the processed fields lack {name!r}; they have {sorted(self)}")


class Absent(SimpleNamespace):
    """The facts of an optional part that an item leaves out: false, and without attributes."""

    def __bool__(self) -> bool:
        return False


def evaluate(value: Any, scope: Scope) -> Any:
    """Return the value of an expression in a scope; a constant is its own value.

    Raises:
        SpecError: an attribute, key or root that the scope lacks. The message names the expression.
    """
    if isinstance(value, Expr):
        return value._compiled(scope)
    return value


def holds(value: Value, scope: Scope) -> bool:
    """Return whether a condition holds.

    Raises:
        SpecError: as for `evaluate`, or a value without a truth value, for example a tensor of
            several elements.
    """
    return bool(evaluate(as_condition(value), scope))


def as_condition(value: Value) -> Expr:
    """Return the expression whose value is whether a condition holds; see `holds`."""
    return _record("truth", value)


def to_python(value: Any) -> Any:
    """Return a Python number or tuple for a tensor or array, and any other value as it is."""
    if hasattr(type(value), "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return tuple([to_python(element) for element in value])
    return value


# -- operations: source ----------------------------------------------------------------------------

# How tightly operations bind, as in Python.
_NAME = -1
"""The level of an operand that is a name, and no value."""
_ANY = 0
_COMPARISON = 1
_UNARY = 7
_ATOM = 9


@dataclass(frozen=True)
class Operation:
    """An operation.

    Attributes:
        compile: a function that compiles an expression with this operation.
        form: its source: braces for each operand, and ``{rest}`` for those that follow, separated
            by commas.
        operand_levels: how tightly each operand has to bind; the last level also counts for those
            that follow.
        level: how tightly the whole binds.
    """

    compile: Callable[[Expr], Compiled]
    form: str
    operand_levels: tuple[int, ...] = (_ANY,)
    level: int = _ATOM

    def write_source(self, expr: Expr) -> str:
        """Write the source of an expression with this operation."""
        sources: list[str] = []
        for position, operand in enumerate(expr._args):
            last = len(self.operand_levels) - 1
            level = self.operand_levels[min(position, last)]
            sources.append(write_operand(operand, level))
        num_braces = self.form.count("{}")
        return self.form.format(*sources, rest=", ".join(sources[num_braces:]))


def write_operand(value: Any, level: int = _ATOM) -> str:
    """Write the source of an operand, in parentheses if it binds less tightly than `level`."""
    if level == _NAME:
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
    if isinstance(value, Expr):
        return _OPERATIONS[value._op].level
    if isinstance(value, (int, float)) and value < 0:
        return _UNARY
    return _ATOM


# -- operations: evaluation ------------------------------------------------------------------------

_FAILURES = (ArithmeticError, TypeError, ValueError, LookupError, RuntimeError)
"""Errors of an operation on values that it cannot take."""

Explain: TypeAlias = Callable[..., str]
"""A function that says what is wrong where an operation fails, of its expression, the error and the
values of its operands."""


def _compile_operand(value: Any) -> Compiled:
    if isinstance(value, Expr):
        return value._compiled

    def get_constant(scope: Scope) -> Any:
        return value

    return get_constant


def _no_value(expr: Expr, problem: object) -> SpecError:
    return SpecError(f"{expr!r} has no value: {problem}.")


def _explain_values(expr: Expr, error: Exception, *values: Any) -> str:
    """Explain a failure by the error and the values of the operands."""
    return f"{error}, with {', '.join([_shorten(value) for value in values])}"


def _shorten(value: Any) -> str:
    text = repr(value)
    if len(text) <= 80:
        return text
    return f"{text[:77]}..."


def _strict(
    function: Callable[..., Any], explain: Explain = _explain_values
) -> Callable[[Expr], Compiled]:
    """Return the compiler of an operation that computes a function of the values of all operands.

    Args:
        function: the function.
        explain: says what is wrong where the function fails.
    """

    def compile(expr: Expr) -> Compiled:
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
) -> Callable[[Expr], Compiled]:
    """Return the compiler of an operation like `and`, with a function of two operands.

    Args:
        function: the function.
        decisive: the first value that is the result itself; the second operand may have no value
            then.
    """

    def compile(expr: Expr) -> Compiled:
        call = _guard_call(expr, function, _explain_values)
        first, second = [_compile_operand(arg) for arg in expr._args]

        def compute(scope: Scope) -> Any:
            value = first(scope)
            if value is decisive:
                return value
            return call(value, second(scope))

        return compute

    return compile


def _guard_call(expr: Expr, function: Callable[..., Any], explain: Explain) -> Callable[..., Any]:
    """Return a function whose failures name an expression."""

    def call(*values: Any) -> Any:
        try:
            return function(*values)
        except MmkitError:  # of a processor that loads when it is asked for
            raise
        except _FAILURES as error:
            raise _no_value(expr, explain(expr, error, *values)) from error

    return call


# roots, attributes, elements

_WHY_ABSENT = {
    "cfg": "the spec is not bound to a config",
    "proc": "the model has no Hugging Face processor",
    "item": "it describes one raw item and is only known inside layout, update, fields and process",
    "fields": "it holds the processed fields of one item and is only known after processing",
}


def _compile_root(expr: Expr) -> Compiled:
    (name,) = expr._args

    def get_root(scope: Scope) -> Any:
        value = getattr(scope, name)
        if value is None:
            raise SpecError(f"{name} has no value here: {_WHY_ABSENT[name]}.")
        return value

    return get_root


def _compile_loop(expr: Expr) -> Compiled:
    (variable,) = expr._args
    depth = variable.depth

    def get_element(scope: Scope) -> Any:
        return scope.loop[depth]

    return get_element


def _compile_function(expr: Expr) -> Compiled:
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


def _compile_attribute(expr: Expr) -> Compiled:
    holder_arg, name = expr._args
    get_holder = _compile_operand(holder_arg)

    def get_attribute(scope: Scope) -> Any:
        holder = get_holder(scope)
        try:
            value = _look_up(holder, name)
        except MmkitError:  # of a processor that loads when it is asked for
            raise
        except _FAILURES as error:
            raise _no_value(expr, _explain_missing(holder_arg, holder, name)) from error
        if value is _MISSING:
            raise _no_value(expr, _explain_missing(holder_arg, holder, name))
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
    if is_equal_declaration(holder_arg, fields):
        problem = f"the processed fields lack {name!r}"
    else:
        problem = f"{kind.__name__} has no attribute {name!r}"
    if names:
        problem += f". It has: {', '.join([str(name) for name in names])}"
    return problem


def _compile_get(expr: Expr) -> Compiled:
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
    return holder.ndim == 1 and len(holder) <= _MAX_LISTED


def _explain_element(expr: Expr, error: Exception, holder: Any, key: Any) -> str:
    return f"{expr._args[0]!r} is {_shorten(holder)}"


def _compile_where(expr: Expr) -> Compiled:
    holds, then, other = [_compile_operand(arg) for arg in expr._args]

    def choose(scope: Scope) -> Any:
        if holds(scope):
            return then(scope)
        return other(scope)

    return choose


# calls of `later`

_CACHEABLE_TYPES = frozenset({bool, int, float, str, type(None)})
"""Types of arguments for which the result of a recorded call is cached: equal values of these types
are interchangeable."""


_MAX_CACHED_CALLS = 256
"""Results that are cached of each recorded call."""


def _compile_call(expr: Expr) -> Compiled:
    """Compile a recorded call. Its results for numbers and strings are cached.

    Operands that are constants may be any objects, for example the Hugging Face processor that the
    spec is bound to: a result is cached with the expression, in which they are always the same.
    """
    function, *args = expr._args
    positions: list[int] = []
    operands: list[Compiled] = []
    for position, arg in enumerate(args):
        if isinstance(arg, Expr):
            positions.append(position)
            operands.append(arg._compiled)

    def list_arguments(values: Iterable[Any]) -> list[Any]:
        arguments = list(args)
        for position, value in zip(positions, values, strict=True):
            arguments[position] = value
        return arguments

    @lru_cache(maxsize=_MAX_CACHED_CALLS, typed=True)
    def call_cached(*values: Any) -> Any:
        return function(*list_arguments(values))

    def call(*values: Any) -> Any:
        for value in values:
            if type(value) not in _CACHEABLE_TYPES:
                return function(*list_arguments(values))
        return call_cached(*values)

    def explain(expr: Expr, error: Exception, *values: Any) -> str:
        return _explain_values(expr, error, *list_arguments(values))

    guarded_call = _guard_call(expr, call, explain)

    def compute(scope: Scope) -> Any:
        return guarded_call(*[operand(scope) for operand in operands])

    return compute


# the tokenizer

Question: TypeAlias = Callable[[Expr, Any, str, list[Any]], Any]
"""A question to the vocabulary, of the expression that asks it, the vocabulary, a text or template,
and the values that fill the template."""


def _ask_vocabulary(ask: Question) -> Callable[[Expr], Compiled]:
    """Return the compiler of an operation that asks the vocabulary about a text."""

    def compile(expr: Expr) -> Compiled:
        template, *args = expr._args
        are_of_author = [_is_of_author(arg) for arg in args]

        def compute(scope: Scope) -> Any:
            if scope.tok is None:
                remedy = "Use a token id from cfg instead"
                raise _no_value(expr, f"the model runs without a tokenizer. {remedy}")
            text = to_python(evaluate(template, scope))
            values: list[Any] = []
            for arg, is_of_author in zip(args, are_of_author, strict=True):
                value = to_python(evaluate(arg, scope))
                if not isinstance(value, (str, int, float)):
                    got = f"a {type(value).__name__}"
                    raise _no_value(expr, f"{arg!r} is neither a text nor a number but {got}")
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


def _check_template(expr: Expr, template: str) -> None:
    """Refuse a template that makes a text of any length of one value, as ``{:>3000000000}`` does.

    Raises:
        SpecError: it does.
    """
    for _, _, form, _ in Formatter().parse(template):
        if form and ("{" in form or _LONG_NUMBER.search(form)):
            raise _no_value(expr, f"the width {form!r} in the template is no number below 10000")


def _find_id(expr: Expr, vocabulary: Any, template: str, values: list[Any]) -> Any:
    return vocabulary[fill_template(template, *values)]


def _has_token(expr: Expr, vocabulary: Any, template: str, values: list[Any]) -> Any:
    return vocabulary.has(template, *values)


def _encode_text(expr: Expr, vocabulary: Any, template: str, values: list[Any]) -> Any:
    ids = vocabulary.text(template, *values)
    unknown = vocabulary.unknown_id
    # a caller's text becomes unknown tokens where a prompt does
    if unknown not in ids or any(is_text_of_caller(value) for value in values):
        return ids
    text = fill_template(template, *values)
    if vocabulary.decode([unknown]) in text:
        return ids
    problem = f"the tokenizer has no token for a part of {text!r}, as for other texts"
    raise _no_value(expr, f"{problem}. Use a text that it knows")


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


def _comparison(sign: str, function: Callable[[Any, Any], Any]) -> Operation:
    # both operands bind more tightly: Python would chain two comparisons
    levels = (_COMPARISON + 1, _COMPARISON + 1)
    return Operation(_strict(function), f"{{}} {sign} {{}}", levels, _COMPARISON)


def _arithmetic(sign: str, level: int, function: Callable[[Any, Any], Any]) -> Operation:
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
    "==": _comparison("==", _is_equal),
    "!=": _comparison("!=", _is_unequal),
    "<": _comparison("<", operator.lt),
    "<=": _comparison("<=", operator.le),
    ">": _comparison(">", operator.gt),
    ">=": _comparison(">=", operator.ge),
    "|": Operation(_short_circuit(operator.or_, True), "{} | {}", (2, 3), 2),
    "&": Operation(_short_circuit(operator.and_, False), "{} & {}", (3, 4), 3),
    "+": _arithmetic("+", 5, operator.add),
    "-": _arithmetic("-", 5, operator.sub),
    "*": _arithmetic("*", 6, _multiply),
    "/": _arithmetic("/", 6, operator.truediv),
    "//": _arithmetic("//", 6, operator.floordiv),
    "%": _arithmetic("%", 6, _remainder),
    # of powers, Python computes the right one first
    "**": Operation(_strict(_power), "{} ** {}", (9, 8), 8),
}
"""The operations by name."""
