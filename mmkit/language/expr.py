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

An author writes what is here: the operators of `Expr`, the roots, and the functions that make
expressions. `mmkit.language.operations` has what each operation is: its source, what it reads, and
its evaluation in a `Scope` of `mmkit.language.scope`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import SpecError
from .node import Dependency, Node, map_values

# these two also for whoever imports the roots: what evaluates an expression, and in what
from .operations import LoopVariable, Recorded, is_operation
from .operations import evaluate as evaluate
from .scope import Scope as Scope


class Expr(Recorded):
    """A value that is known later: an operation with its operands.

    Build expressions from the roots `cfg`, `item`, `fields`, `proc`, `kwargs` and `tok`.

    Attributes, items and operators record another expression: ``cfg.vision_config.depth``,
    ``cfg.sizes[0]``, ``item.width // 14 + 1``, ``(cfg.n == 2) & (item.width > 9)``.
    """

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


def largest_of(over: Value, by: Callable[[Expr], Any]) -> Expr:
    """Return the element of a list for which `by` is largest; of several, the first.

    ``largest_of(cfg.sizes, by=lambda size: size[0] * size[1])`` is the size of the largest area.

    Args:
        over: a list of at most `MAX_ELEMENTS` elements, now or later.
        by: a function from an expression for an element to what it is compared by: a number, or a
            tuple of numbers, of which the first that differs decides. It is called once.

    Raises:
        SpecError: one inside the `by` of another, which would take the square of the time.
    """
    variable = next_loop_variable()
    if _is_comparing.get():
        raise SpecError("largest_of()", "a by= without largest_of()", "another one in it")
    reset = _is_comparing.set(True)
    try:
        rank = as_expressions(call_for_element(by))
    finally:
        _is_comparing.reset(reset)
    return _record("largest_of", over, variable, rank)


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


_num_open_loops: ContextVar[int] = ContextVar("bodies of loops that are being called", default=0)
"""How many bodies of loops are being called: the depth of the next loop.

An inner loop is made while the body of the outer one is called, and so before the outer one: it
could not ask it for its depth. Without the depth, both would have the same variable. It is a
context variable since several threads may declare specs."""

_is_comparing: ContextVar[bool] = ContextVar("whether a `by` is being called", default=False)


def next_loop_variable() -> LoopVariable:
    """Return the variable of the loop that is made next."""
    return LoopVariable(_num_open_loops.get())


def call_for_element(body: Callable[[Expr], Any]) -> Any:
    """Return what the body of the next loop returns for the current element."""
    variable = next_loop_variable()
    reset = _num_open_loops.set(variable.depth + 1)
    try:
        return body(Expr("loop", (variable,)))
    finally:
        _num_open_loops.reset(reset)


INDEX = Dependency("item", ("index",), item.index)
"""The position of an item among those of its modality in the request."""

COUNT = Dependency("item", ("count",), item.count)
"""The number of these."""


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
