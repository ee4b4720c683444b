"""Values that are known later.

An expression records attribute access, indexing and arithmetic on a few roots and is evaluated when the roots have
values:

========  ==========================================================================================
`cfg`     the Hugging Face config of the model, with its nested configs
`item`    facts of one raw item: `index`, `count` (items of its modality in the request), and by item type `shape`,
          `length`, `width`, `height`, `frames`
`out`     the processed fields of that item, by field name
`proc`    the attributes of the model's Hugging Face processor
`prompt`  the caller's token ids, for `ModelSpec(prompt=...)`
`tok`     the tokenizer: ``tok["<image>"]`` is one token, ``tok("some text")`` its encoding (see `mmkit.layout`)
========  ==========================================================================================

Expressions are immutable data: ``==`` compares two expressions by structure (`equal` records a comparison of values),
they can be hashed, and their `repr` is the source they were written in. A plain function of one `Scope` is accepted
wherever an expression is; it is opaque, so it is compared by identity and never evaluated ahead of time.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, TypeAlias, dataclass_transform

from .errors import SpecError

Value: TypeAlias = Any
"""A constant, an `Expr`, or a function of one `Scope`."""

STATIC = frozenset({"cfg", "proc"})
"""Roots that are known once a spec is bound; the others vary per item."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The values of the roots; what a plain function gets in place of an expression.

    Attributes:
        cfg: Hugging Face config, or None before binding.
        proc: Hugging Face processor, or None where the model has none.
        tok: `mmkit.vocabulary.Vocabulary`: ``tok[token]`` is an id, ``tok(text)`` a list of ids; None without a
            tokenizer.
        item: facts of the current item.
        out: processed fields of the current item.
        prompt: the caller's token ids.
        kwargs: the request's `mm_processor_kwargs`, merged with those of the engine.
        loop: values of the loop variables of enclosing `each` layouts, outermost first.
    """

    cfg: Any = None
    proc: Any = None
    tok: Any = None
    item: Any = None
    out: Any = None
    prompt: Any = None
    kwargs: Mapping[str, Any] | None = None
    loop: tuple[Any, ...] = ()

    def of(self, item: Any, out: Mapping[str, Any] | None) -> Scope:
        """This scope for one item: `dataclasses.replace`, which each item of each request would wait for."""
        return Scope(self.cfg, self.proc, self.tok, item, out, self.prompt, self.kwargs, self.loop)

    def looped(self, depth: int, value: Any) -> Scope:
        """This scope inside an `each` at that depth, whose current element is `value`."""
        outer = (*self.loop, *[None] * depth)[:depth]  # an each that was bound on its own sees no outer elements
        return replace(self, loop=(*outer, value))


_BINARY: Mapping[str, tuple[Callable[[Any, Any], Any], int]] = {
    "+": (operator.add, 5),
    "-": (operator.sub, 5),
    "*": (operator.mul, 6),
    "/": (operator.truediv, 6),
    "//": (operator.floordiv, 6),
    "%": (operator.mod, 6),
    "**": (operator.pow, 8),
    "<": (operator.lt, 3),
    "<=": (operator.le, 3),
    ">": (operator.gt, 3),
    ">=": (operator.ge, 3),
}

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "ceil_div": lambda a, b: -(-a // b),
    "equal": operator.eq,
    "maximum": max,
    "minimum": min,
    "floor": math.floor,
    "isqrt": math.isqrt,
    "total": sum,
    "fmt": lambda template, *args: template.format(*args),
}

_ABSENT = {
    "cfg": "the spec is not bound to a config",
    "proc": "the model has no Hugging Face processor",
    "item": "it describes one raw item and is only known inside layout, update, fields and process",
    "out": "it holds the processed fields of one item and is only known after processing",
    "prompt": "it is the token ids of one request and is only known inside prompt and decoder_prompt",
}

_MISSING = object()


@dataclass_transform(frozen_default=True)
class Node:
    """Base of expressions and layouts: immutable data, compared by structure. Every subclass is a frozen dataclass."""

    __match_args__: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, repr=False)(cls)

    def _parts(self) -> Iterator[Any]:
        """The values of the fields; those of a tuple one by one."""
        for name in self.__match_args__:
            part = getattr(self, name)
            yield from part if isinstance(part, tuple) else (part,)

    def _changed(self, change: Callable[[Any], Any]) -> Any:
        """The same node with every part after a function."""
        fields = [getattr(self, name) for name in self.__match_args__]
        return type(self)(*(tuple(map(change, f)) if isinstance(f, tuple) else change(f) for f in fields))


class Expr(Node):
    """Base of all expressions. Build them from the roots; see the module's docstring. Operators: `_BINARY`."""

    def __getattr__(self, name: str) -> Expr:
        if name.startswith("_"):  # pickle, copy, pydantic and IPython probe for these
            raise AttributeError(name)
        return Attribute(self, name)

    def __getitem__(self, key: Any) -> Expr:
        return Index(self, Slice(key.start, key.stop, key.step) if isinstance(key, slice) else key)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(self._later("cannot be iterated; use each() in a layout"))

    def __bool__(self) -> bool:
        raise TypeError(self._later("has no truth value; use where() or equal()"))

    def _no_number(self, *_: Any) -> Any:
        raise TypeError(self._later("is no number yet; use floor(), ceil_div(), //, or call(int, ...)"))

    # what int(), float(), round(), range() and the functions of math ask for
    __int__ = __float__ = __index__ = __round__ = _no_number

    def _value(self, scope: Scope) -> Any:
        raise NotImplementedError

    def _later(self, problem: str) -> str:
        return f"{self!r} is only known later and {problem}, or a function of a Scope"


class Root(Expr):
    """One of `cfg`, `proc`, `item`, `out`, `prompt`."""

    _name: str

    def _value(self, scope: Scope) -> Any:
        value = getattr(scope, self._name)
        if value is None:
            raise SpecError(f"{self._name} has no value here: {_ABSENT[self._name]}.")
        return value

    def __repr__(self) -> str:
        return self._name


class Loop(Expr):
    """The current element of an enclosing `each`; depth 0 is the outermost."""

    _depth: int

    def _value(self, scope: Scope) -> Any:
        return scope.loop[self._depth]

    def __repr__(self) -> str:
        return "xyzuvw"[self._depth] if self._depth < 6 else f"x{self._depth}"


class Attribute(Expr):
    _base: Expr
    _name: str

    def _value(self, scope: Scope) -> Any:
        holder, name = evaluate(self._base, scope), self._name
        keyed = type(holder) is dict or isinstance(holder, Mapping)  # of processed fields, the first
        value = holder.get(name, _MISSING) if keyed else getattr(holder, name, _MISSING)
        if value is not _MISSING:
            return value
        lack = "the processed fields lack" if root(self) == out else f"{type(holder).__name__} has no attribute"
        public = [n for n in dir(holder) if not n.startswith("_")]
        known = sorted(holder) if keyed else difflib.get_close_matches(name, public)
        hint = f" It has: {', '.join(map(str, known))}." if known else ""
        raise SpecError(f"{self!r} has no value: {lack} {name!r}.{hint}")

    def __repr__(self) -> str:
        return f"{_wrap(self._base, 9)}.{self._name}"


class Index(Expr):
    _base: Expr
    _key: Any

    def _value(self, scope: Scope) -> Any:
        holder, key = evaluate(self._base, scope), self._key
        index = slice(key.start, key.stop, key.step) if isinstance(key, Slice) else evaluate(key, scope)
        try:
            found = holder[index]
        except (KeyError, IndexError, TypeError) as error:
            raise SpecError(f"{self!r} has no value: {self._base!r} is {_brief(holder)}.") from error
        if getattr(found, "ndim", None) != 0:
            return found
        number = found.item()  # Python computes with whole numbers faster than a tensor does, and exactly
        return number if isinstance(number, int) else found

    def __repr__(self) -> str:
        return f"{_wrap(self._base, 9)}[{self._key!r}]"


class Slice(Node):
    """A slice as a key: unlike Python's, it can be hashed."""

    start: Any
    stop: Any
    step: Any

    def __repr__(self) -> str:
        ends = ["" if end is None else repr(end) for end in (self.start, self.stop, self.step)]
        return ":".join(ends if ends[2] else ends[:2])


class Binary(Expr):
    _op: str
    _left: Any
    _right: Any

    def _value(self, scope: Scope) -> Any:
        return _compute(self, _BINARY[self._op][0], evaluate(self._left, scope), evaluate(self._right, scope))

    def __repr__(self) -> str:
        level = _BINARY[self._op][1]
        left, right = (level + 1, level) if self._op == "**" else (level, level + 1)
        left += level == _COMPARISON  # Python would chain two comparisons
        return f"{_wrap(self._left, left)} {self._op} {_wrap(self._right, right)}"


class Function(Expr):
    _name: str
    _args: tuple[Any, ...]

    def _value(self, scope: Scope) -> Any:
        return _compute(self, _FUNCTIONS[self._name], *[evaluate(arg, scope) for arg in self._args])

    def __repr__(self) -> str:
        return f"{self._name}({', '.join(map(repr, self._args))})"


class Call(Expr):
    """A call of a function outside this module."""

    _function: Callable[..., Any]
    _args: tuple[Any, ...]

    def _value(self, scope: Scope) -> Any:
        args = [evaluate(arg, scope) for arg in self._args]
        kept = all(type(arg) in _KEPT for arg in args)
        return _compute(self, partial(_kept_call, self._function) if kept else self._function, *args)

    def __repr__(self) -> str:
        function = getattr(self._function, "__qualname__", repr(self._function))
        return f"call({', '.join([function, *map(repr, self._args)])})"


class Option(Expr):
    """An entry of the request's `mm_processor_kwargs`."""

    _name: str
    _default: Any

    def _value(self, scope: Scope) -> Any:
        kwargs = scope.kwargs or {}
        return kwargs[self._name] if self._name in kwargs else evaluate(self._default, scope)

    def __repr__(self) -> str:
        return f"option({self._name!r}, {self._default!r})"


class Where(Expr):
    _test: Any
    _then: Any
    _other: Any

    def _value(self, scope: Scope) -> Any:
        return evaluate(self._then if evaluate(self._test, scope) else self._other, scope)

    def __repr__(self) -> str:
        return f"where({self._test!r}, {self._then!r}, {self._other!r})"


class Token(Expr):
    """The id of one token of the vocabulary."""

    _text: Any

    def _value(self, scope: Scope) -> Any:
        return _vocabulary(scope, self)[evaluate(self._text, scope)]

    def __repr__(self) -> str:
        return f"tok[{self._text!r}]"


class Text(Expr):
    """The ids of a text, encoded without special tokens."""

    _text: Any

    def _value(self, scope: Scope) -> Any:
        return _vocabulary(scope, self)(evaluate(self._text, scope))

    def __repr__(self) -> str:
        return f"tok({self._text!r})"


class Opaque(Expr):
    """A plain function of one `Scope`."""

    _function: Callable[[Scope], Any]

    def _value(self, scope: Scope) -> Any:
        return self._function(scope)

    def __repr__(self) -> str:
        return getattr(self._function, "__qualname__", repr(self._function))


_COMPARISON = _BINARY["<"][1]


def _wrap(value: Any, level: int) -> str:
    """The source of an operand, in parentheses if it binds less tightly than `level`."""
    inner = _BINARY[value._op][1] if isinstance(value, Binary) else 9
    if isinstance(value, (int, float)) and value < 0:
        inner = 7  # unary minus
    return f"({value!r})" if inner < level else repr(value)


def _recorded(op: str, *, swapped: bool = False) -> Callable[[Expr, Any], Any]:
    """The method of `Expr` that records an operator."""

    def record(self: Expr, other: Any) -> Any:
        if not isinstance(other, (Expr, int, float)):
            return NotImplemented
        return Binary(op, other, self) if swapped else Binary(op, self, other)

    return record


for _op, (_operator, _) in _BINARY.items():  # Python asks for __radd__, never for the __rlt__ that this makes as well
    setattr(Expr, f"__{_operator.__name__}__", _recorded(_op))
    setattr(Expr, f"__r{_operator.__name__}__", _recorded(_op, swapped=True))


cfg: Any = Root("cfg")
item: Any = Root("item")
out: Any = Root("out")
prompt: Any = Root("prompt")
proc: Any = Root("proc")


def ceil_div(a: Value, b: Value) -> Any:
    """`a / b`, rounded up to an integer: ``-(-a // b)``."""
    return _function("ceil_div", a, b)


def minimum(*args: Value) -> Any:
    """The smallest of the arguments."""
    return _function("minimum", *args)


def maximum(*args: Value) -> Any:
    """The largest of the arguments."""
    return _function("maximum", *args)


def equal(a: Value, b: Value) -> Any:
    """Whether two values are equal. (``==`` compares the expressions themselves.)"""
    return _function("equal", a, b)


def floor(a: Value) -> Any:
    """A real number, rounded down to an integer."""
    return _function("floor", a)


def isqrt(a: Value) -> Any:
    """The integer square root, rounded down."""
    return _function("isqrt", a)


def total(values: Value) -> Any:
    """The sum of a sequence."""
    return _function("total", values)


def fmt(template: str, *args: Value) -> Any:
    """``template.format(*args)``, for text that depends on the item: ``tok[fmt("<|image_{}|>", item.index + 1)]``."""
    return _function("fmt", template, *args)


def call(function: Callable[..., Any], *args: Value) -> Any:
    """``function(*args)``, once the arguments are known: ``call(best_grid, item.width, item.height)[0]``.

    Unlike a plain function of a `Scope`, its result is known to depend on the arguments alone, so layouts that use it
    are kept per geometry, as are results for plain numbers and strings. The function must return the same for the same
    arguments.
    """
    return Call(function, tuple(map(expression, args)))


def option(name: str, default: Value) -> Any:
    """The request's (or the engine's) ``mm_processor_kwargs[name]``, or a default:
    ``option("size", proc.image_processor.size)``."""
    return Option(name, expression(default))


def where(test: Value, then: Value, other: Value) -> Any:
    """`then` if `test` holds, else `other`; only the chosen one is evaluated.

    Raises:
        SpecError: `test` is a bool, as ``==`` between expressions makes one.
    """
    if isinstance(test, bool):
        raise SpecError("where()", "an expression", repr(test), "Compare with equal(a, b), not with ==.")
    return Where(*map(expression, (test, then, other)))


def _function(name: str, *args: Value) -> Any:
    return Function(name, tuple(map(expression, args)))


def expression(value: Value) -> Any:
    """Make a plain function an `Opaque` expression; return everything else as it is."""
    if callable(value) and not isinstance(value, (Expr, type)):
        return Opaque(value)
    return value


def leaves(value: Value) -> frozenset[Expr]:
    """The longest chains of attributes and constant indices that start at a root or loop variable, and opaque
    functions.

    ``leaves(cfg.a.b + item.width * 2) == {cfg.a.b, item.width}``. They name everything that the value depends on.
    """
    if not isinstance(value, Expr):
        return value.leaves() if hasattr(value, "leaves") else frozenset()  # a layout inside where()
    start, keys = _path(value)
    if isinstance(value, Opaque) or (isinstance(start, (Root, Loop)) and not any(isinstance(k, Expr) for k in keys)):
        return frozenset({value})
    return frozenset().union(*map(leaves, value._parts()))


def branches(value: Value) -> tuple[Any, ...]:
    """The values that nested `where` choose from; a value that is no `where` alone."""
    if isinstance(value, Where):
        return (*branches(value._then), *branches(value._other))
    return (value,)


def _path(leaf: Any) -> tuple[Any, tuple[Any, ...]]:
    """Where a chain of attributes and indices starts, and what it takes, in this order."""
    match leaf:
        case Attribute(base, key) | Index(base, key):
            start, keys = _path(base)
            return start, (*keys, key)
    return leaf, ()


def root(leaf: Expr) -> Any:
    """The root, loop variable or opaque function at which a leaf starts."""
    return _path(leaf)[0]


def first_key(leaf: Expr) -> Any:
    """The attribute or key that a leaf takes of its root: ``pixels`` for ``out.pixels.shape[0]``; None for a root."""
    return next(iter(_path(leaf)[1]), None)


def evaluate(value: Value, scope: Scope) -> Any:
    """The value of an expression in a scope; constants are their own value.

    Raises:
        SpecError: an attribute, key or root that the scope does not have. The message names the expression.
    """
    return value._value(scope) if isinstance(value, Expr) else value


def _compute(source: Expr, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except (ArithmeticError, TypeError, ValueError, LookupError) as error:
        values = ", ".join(map(_brief, args))
        raise SpecError(f"{source!r} has no value: {error}, with {values}.") from error


_KEPT = frozenset({bool, int, float, str, type(None)})
"""Types of arguments under which the result of a `call` is kept: equal ones are the same."""


_kept_call = lru_cache(maxsize=1024, typed=True)(operator.call)


def _vocabulary(scope: Scope, asking: Expr) -> Any:
    if scope.tok is None:
        remedy = "Use a token id from cfg instead."
        raise SpecError(f"{asking!r} has no value: the model runs without a tokenizer. {remedy}")
    return scope.tok


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def fold(value: Value, scope: Scope) -> Any:
    """Replace every part that depends on `cfg` and `proc` alone by its value.

    Raises:
        SpecError: a config or processor attribute is missing.
    """
    if not isinstance(value, Expr):
        return value.bind(scope) if isinstance(value, Node) and hasattr(value, "bind") else value  # a layout in where()
    if isinstance(value, Opaque):
        return value
    roots = {root(leaf) for leaf in leaves(value)}
    if all(isinstance(r, Root) and r._name in STATIC for r in roots):
        return evaluate(value, scope)
    if isinstance(value, Where):
        test = fold(value._test, scope)
        if not isinstance(test, Expr):  # never evaluate the branch that this config does not take
            return fold(value._then if test else value._other, scope)
    return value._changed(lambda part: fold(part, scope))


def plain(value: Any) -> Any:
    """A Python number or tuple for a tensor or array of a few elements; other values as they are."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(map(plain, value)) if isinstance(value, (list, tuple)) else value
