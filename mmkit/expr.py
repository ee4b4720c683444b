"""Expressions: values that are known later.

An expression records attribute access, indexing, comparisons and arithmetic on a few roots. mmkit
evaluates it when the roots have values:

========  ==========================================================================================
`cfg`     the Hugging Face config of the model, with its nested configs
`item`    facts of one raw item: `index`, `count` (items of its modality in the request), and by
          item type `shape`, `length`, `width`, `height`, `frames`; `rows` of an embedding
`fields`  the processed fields of that item, by name
`proc`    the attributes of the model's Hugging Face processor
`kwargs`  the request's `mm_processor_kwargs`, merged with those of the engine
`tok`     the tokenizer: ``tok["<image>"]`` is the id of one token, ``tok.text("some text")`` the
          ids of a text, ``tok.has("<image>")`` whether the vocabulary has a token
========  ==========================================================================================

Every operator records, ``==`` and ``&`` included, so nothing about an expression can be decided
while a spec is written: a recorded comparison has no truth value and no hash, and raises where
Python asks for one (`if`, `in`, `and`, a set). `same` compares two expressions. The `repr` of an
expression is its source.

A plain function of one `Scope` may stand wherever an expression may. A function is opaque: mmkit
compares functions by identity, and never evaluates one ahead of time.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from dataclasses import fields as dataclass_fields
from functools import cached_property, lru_cache, partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeAlias, dataclass_transform

from .errors import SpecError

STATIC = frozenset({"cfg", "proc", "kwargs"})
"""Roots that are known once a spec is bound; the others vary per item."""


class Fields(dict[str, Any]):
    """The processed fields of one item: ``fields.grid`` is ``fields["grid"]``."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"the processed fields lack {name!r}; they have {sorted(self)}"
            ) from None


@dataclass(frozen=True, slots=True)
class Scope:
    """The values of the roots: the argument of a plain function in place of an expression.

    Attributes:
        cfg: Hugging Face config, or None before binding.
        proc: Hugging Face processor, or None where the model has none.
        tok: `mmkit.vocabulary.Vocabulary`: ``tok[token]`` is an id, ``tok.text(text)`` a list of
            ids; None without a tokenizer.
        item: facts of the current item.
        fields: processed fields of the current item.
        prompt: the caller's token ids.
        counts: number of items of the request by modality, for functions that rewrite prompts.
        kwargs: the request's `mm_processor_kwargs`, merged with those of the engine.
        loop: values of the loop variables of enclosing `each` layouts, outermost first.
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

    def of(self, item: Any, fields: Mapping[str, Any] | None) -> Scope:
        """This scope for one item. Faster than `dataclasses.replace`, since every item of every
        request needs it."""
        return Scope(
            self.cfg, self.proc, self.tok, item, fields, self.prompt, self.kwargs, self.loop
        )

    def looped(self, depth: int, value: Any) -> Scope:
        """This scope inside an `each` at that depth, whose current element is `value`."""
        # an `each` that was bound alone sees no outer elements
        outer = (*self.loop, *[None] * depth)[:depth]
        return replace(self, loop=(*outer, value))


_BINARY: Mapping[str, tuple[Callable[[Any, Any], Any], int]] = {
    "==": (lambda a, b: plain(a) == plain(b), 1),
    "!=": (lambda a, b: plain(a) != plain(b), 1),
    "<": (operator.lt, 1),
    "<=": (operator.le, 1),
    ">": (operator.gt, 1),
    ">=": (operator.ge, 1),
    "|": (operator.or_, 2),
    "&": (operator.and_, 3),
    "+": (operator.add, 5),
    "-": (operator.sub, 5),
    "*": (operator.mul, 6),
    "/": (operator.truediv, 6),
    "//": (operator.floordiv, 6),
    "%": (operator.mod, 6),
    "**": (operator.pow, 8),
}
"""Operators with how tightly they bind, as in Python. Tensors and lists are compared by their
elements."""

_UNARY: Mapping[str, Callable[[Any], Any]] = {
    "-": operator.neg,
    "~": lambda a: not a if isinstance(a, bool) else ~a,
}

_COMPARISON, _UNARY_LEVEL, _ATOM = 1, 7, 9

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
    "ceil_div": lambda a, b: -(-a // b),
    "floor": math.floor,
    "maximum": max,
    "minimum": min,
    "round": round,
}

_ABSENT = {
    "cfg": "the spec is not bound to a config",
    "proc": "the model has no Hugging Face processor",
    "item": "it describes one raw item and is only known inside layout, update, fields and process",
    "fields": "it holds the processed fields of one item and is only known after processing",
}

_MISSING = object()


class Structural:
    """Base of dataclasses that are compared and hashed by their fields, expressions included."""

    __match_args__: ClassVar[tuple[str, ...]]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return same(self, other)

    def __hash__(self) -> int:
        return hash(structure(self))


def structure(part: Any) -> Any:
    """A part of a spec as plain tuples, which are equal, with equal hashes, for equal
    declarations."""
    if isinstance(part, Structural):
        return (type(part), *(structure(getattr(part, name)) for name in part.__match_args__))
    if isinstance(part, Mapping):
        return frozenset((name, structure(value)) for name, value in part.items())
    if isinstance(part, (list, tuple)):
        return tuple(map(structure, part))
    return part


def same(a: Any, b: Any) -> bool:
    """Whether two parts of a spec are equal declarations; ``==`` between expressions records a
    comparison of their values."""
    return bool(structure(a) == structure(b))


@dataclass_transform(frozen_default=True)
class Node(Structural):
    """Base of expressions and layouts: immutable data. Every subclass is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, repr=False, eq=False)(cls)

    def _parts(self) -> Iterator[Any]:
        """The values of the dataclass's fields; the elements of a tuple one by one."""
        for name in self.__match_args__:
            part = getattr(self, name)
            yield from part if isinstance(part, tuple) else (part,)

    def __getstate__(self) -> dict[str, Any]:
        """The dataclass's fields; values cached beside them are computed again."""
        return {name: getattr(self, name) for name in self.__match_args__}

    def _changed(self, change: Callable[[Any], Any]) -> Any:
        """This node with a function applied to every part."""
        fields = [getattr(self, name) for name in self.__match_args__]
        return type(self)(
            *(tuple(map(change, f)) if isinstance(f, tuple) else change(f) for f in fields)
        )


Operator: TypeAlias = "Callable[[Expr, Expr | int | float], Expr]"


def _recorded(op: str) -> tuple[Operator, Operator]:
    """The methods of `Expr` that record an operator: for the left and for the right operand."""

    def left(self: Expr, other: Any) -> Any:
        if not isinstance(other, (Expr, int, float)):
            return NotImplemented
        _check_ids(op, self, other)
        return Binary(op, self, other)

    def right(self: Expr, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        _check_ids(op, other, self)
        return Binary(op, other, self)

    return left, right


def _check_ids(op: str, left: Any, right: Any) -> None:
    """Refuse arithmetic on tokens that was meant for a layout. Adding a number is allowed and gives
    the next id."""
    if _is_layout(left) or _is_layout(right):
        return
    tokens = [operand for operand in (left, right) if isinstance(operand, Token)]
    texts = [operand for operand in (left, right) if isinstance(operand, TextIds)]
    if op == "*" and tokens:
        count = right if left is tokens[0] else left
        remedy = f"Write literal({tokens[0]!r}) * {count!r} to repeat the token."
        raise SpecError(f"{left!r} * {right!r}", "a layout to repeat", "the id of a token", remedy)
    if op == "+" and (
        len(texts) == 1 or (tokens and isinstance(left, Expr) and isinstance(right, Expr))
    ):
        remedy = f"Write literal({left!r}, {right!r}) for one after the other."
        raise SpecError(f"{left!r} + {right!r}", "layouts", "ids, which are not added", remedy)


def _is_layout(value: Any) -> bool:
    """Whether a value is a layout, or becomes one, as a choice of layouts does."""
    if isinstance(value, Where):
        return _is_layout(value._then) or _is_layout(value._other)
    if isinstance(value, Binary):
        return _is_layout(value._left) or _is_layout(value._right)
    return isinstance(value, Node) and not isinstance(value, Expr)


_COMPARED = (int, float, str, bytes, tuple, list, type(None))


class Expr(Node):
    """Base of all expressions. Build them from the roots; see the module's docstring."""

    __array_ufunc__ = None  # numpy then uses the operators below

    def __getattr__(self, name: str) -> Expr:
        if name.startswith("_"):  # pickle, copy, pydantic and IPython probe for these
            raise AttributeError(name)
        return Attribute(self, name)

    def __getitem__(self, key: Any) -> Expr:
        return Index(self, Slice(key.start, key.stop, key.step) if isinstance(key, slice) else key)

    def get(self, name: str, default: Value) -> Expr:
        """The attribute or entry of that name, or a default where there is none:
        ``kwargs.get("size", proc.size)``, ``cfg.vision_config.get("merge_size", 2)``."""
        return Option(self, name, expression(default))

    __add__, __radd__ = _recorded("+")
    __sub__, __rsub__ = _recorded("-")
    __mul__, __rmul__ = _recorded("*")
    __truediv__, __rtruediv__ = _recorded("/")
    __floordiv__, __rfloordiv__ = _recorded("//")
    __mod__, __rmod__ = _recorded("%")
    __pow__, __rpow__ = _recorded("**")
    __and__, __rand__ = _recorded("&")
    __or__, __ror__ = _recorded("|")
    __lt__, __le__ = _recorded("<")[0], _recorded("<=")[0]
    __gt__, __ge__ = _recorded(">")[0], _recorded(">=")[0]

    def __eq__(self, other: object) -> Expr:  # type: ignore[override]
        return self._compared("==", other)

    def __ne__(self, other: object) -> Expr:  # type: ignore[override]
        return self._compared("!=", other)

    def _compared(self, op: str, other: object) -> Expr:
        if not isinstance(other, (Expr, *_COMPARED)):
            raise TypeError(
                f"{self!r} {op} {other!r}: a {type(other).__name__} is no value to compare with"
            )
        return Binary(op, self, other)

    def __neg__(self) -> Expr:
        return Unary("-", self)

    def __invert__(self) -> Expr:
        return Unary("~", self)

    def __abs__(self) -> Expr:
        return Function("abs", (self,))

    def __floor__(self) -> Expr:
        return Function("floor", (self,))

    def __ceil__(self) -> Expr:
        return Function("ceil", (self,))

    def __round__(self, digits: int | None = None) -> Expr:
        return Function("round", (self,) if digits is None else (self, digits))

    if not TYPE_CHECKING:  # an answer now would be wrong

        def __bool__(self):
            self._later("has no truth value; use where(), minimum(), maximum(), & | ~")

        def __hash__(self):
            self._later("cannot be looked up in a set or a dict; use later(table.get)(...)")

        def __iter__(self):
            self._later("cannot be iterated; use each() in a layout")

        def __contains__(self, value: object):
            self._later("cannot be searched; use later(function)(...)")

        def __len__(self):
            self._later("has no length; use later(len)(...)")

        def __call__(self, *_: Any, **__: Any):
            self._later("cannot be called; use later(function)(...)")

        def __format__(self, form: str):
            self._later('has no text; use tok["...{}", value], tok.text("...{}", value)')

        def __int__(self):
            self._later("is no number; use math.floor(), ceil_div(), //, later(int)(...)")

        def __float__(self):
            return self.__int__()

        def __index__(self):
            return self.__int__()

    def _later(self, problem: str) -> NoReturn:
        raise TypeError(f"{self!r} is only known later and {problem}, or a function of a Scope")

    def _value(self, scope: Scope) -> Any:
        raise NotImplementedError

    @cached_property
    def _leaves(self) -> frozenset[Leaf]:
        return _leaves_of(self)


Value: TypeAlias = (
    "Expr | int | float | str | tuple[Any, ...] | list[Any] | Callable[[Scope], Any] | None"
)
"""A constant, an `Expr`, or a function of one `Scope`."""

Count: TypeAlias = "Expr | int | Callable[[Scope], Any]"
"""A whole number >= 0, now or later."""

Condition: TypeAlias = "Expr | bool | Callable[[Scope], Any]"
"""A truth value, now or later."""


class Root(Expr):
    """One of `cfg`, `proc`, `item`, `fields`, `kwargs`."""

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


@lru_cache(maxsize=256)
def _is_keyed(kind: Any) -> bool:
    return issubclass(kind, Mapping)


def _named(holder: Any, name: str) -> Any:
    """The entry of a mapping, or the attribute of anything else; `_MISSING` where there is none."""
    kind: Any = type(holder)
    if _is_keyed(kind):
        return holder.get(name, _MISSING)
    return getattr(holder, name, _MISSING)


class Attribute(Expr):
    _base: Expr
    _name: str

    def _value(self, scope: Scope) -> Any:
        holder, name = evaluate(self._base, scope), self._name
        if (value := _named(holder, name)) is not _MISSING:
            return value
        lack = f"{type(holder).__name__} has no attribute"
        if isinstance(self._base, Root) and self._base._name == "fields":
            lack = "the processed fields lack"
        public = [n for n in dir(holder) if not n.startswith("_")]
        keyed = isinstance(holder, Mapping)
        known = sorted(holder) if keyed else difflib.get_close_matches(name, public)
        hint = f" It has: {', '.join(map(str, known))}." if known else ""
        raise SpecError(f"{self!r} has no value: {lack} {name!r}.{hint}")

    def __repr__(self) -> str:
        return f"{_wrap(self._base, _ATOM)}.{self._name}"


class Index(Expr):
    _base: Expr
    _key: Any

    def _value(self, scope: Scope) -> Any:
        holder, index = evaluate(self._base, scope), self._key
        if isinstance(index, Slice):
            index = slice(index.start, index.stop, index.step)
        elif isinstance(index, Expr):
            index = index._value(scope)
        try:
            element = holder[index]
        except (KeyError, IndexError, TypeError) as error:
            raise SpecError(
                f"{self!r} has no value: {self._base!r} is {_brief(holder)}."
            ) from error
        if getattr(element, "ndim", None) != 0:
            return element
        # Python computes with whole numbers faster than a tensor does, and exactly
        number = element.item()
        return number if isinstance(number, int) else element

    def __repr__(self) -> str:
        return f"{_wrap(self._base, _ATOM)}[{self._key!r}]"


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
        left, op = evaluate(self._left, scope), self._op
        if (op == "&" and left is False) or (op == "|" and left is True):
            return left  # like `and` and `or`: the right side may have no value then
        return _compute(self, _BINARY[op][0], left, evaluate(self._right, scope))

    def __repr__(self) -> str:
        level = _BINARY[self._op][1]
        left, right = (level + 1, level) if self._op == "**" else (level, level + 1)
        left += level == _COMPARISON  # Python would chain two comparisons
        return f"{_wrap(self._left, left)} {self._op} {_wrap(self._right, right)}"


class Unary(Expr):
    _op: str
    _operand: Any

    def _value(self, scope: Scope) -> Any:
        return _compute(self, _UNARY[self._op], evaluate(self._operand, scope))

    def __repr__(self) -> str:
        return f"{self._op}{_wrap(self._operand, _UNARY_LEVEL)}"


class Function(Expr):
    _name: str
    _args: tuple[Any, ...]

    def _value(self, scope: Scope) -> Any:
        return _compute(self, _FUNCTIONS[self._name], *[evaluate(arg, scope) for arg in self._args])

    def __repr__(self) -> str:
        return f"{self._name}({', '.join(map(repr, self._args))})"


class Call(Expr):
    """A call of a function outside this module; see `later`."""

    _function: Callable[..., Any]
    _args: tuple[Any, ...]
    _names: tuple[str, ...]
    """Of the last arguments."""

    def _value(self, scope: Scope) -> Any:
        args = [evaluate(arg, scope) for arg in self._args]
        call = self._function
        if all(type(arg) in _REMEMBERED for arg in args):
            call = partial(_remembered_call, call)
        if not self._names:
            return _compute(self, call, *args)
        positional = len(args) - len(self._names)
        named = dict(zip(self._names, args[positional:], strict=True))
        return _compute(self, partial(call, **named), *args[:positional])

    def __repr__(self) -> str:
        function = getattr(self._function, "__qualname__", repr(self._function))
        names = [""] * (len(self._args) - len(self._names)) + [f"{name}=" for name in self._names]
        args = (f"{name}{arg!r}" for name, arg in zip(names, self._args, strict=True))
        return f"later({function})({', '.join(args)})"


class Option(Expr):
    """An attribute or entry that may be missing."""

    _base: Expr
    _name: str
    _default: Any

    def _value(self, scope: Scope) -> Any:
        value = _named(evaluate(self._base, scope), self._name)
        return evaluate(self._default, scope) if value is _MISSING else value

    def __repr__(self) -> str:
        return f"{_wrap(self._base, _ATOM)}.get({self._name!r}, {self._default!r})"


class Where(Expr):
    _test: Any
    _then: Any
    _other: Any

    def _value(self, scope: Scope) -> Any:
        return evaluate(self._then if truth(self._test, scope) else self._other, scope)

    def __repr__(self) -> str:
        return f"where({self._test!r}, {self._then!r}, {self._other!r})"


class _OfTokenizer(Expr):
    """A question to the tokenizer about a text, or about a template with the values that fill
    it."""

    _text: Any
    _values: tuple[Any, ...] = ()

    def _asked(self, scope: Scope) -> tuple[Any, Any]:
        """The vocabulary, and the text."""
        if scope.tok is None:
            remedy = "Use a token id from cfg instead."
            raise SpecError(f"{self!r} has no value: the model runs without a tokenizer. {remedy}")
        text = evaluate(self._text, scope)
        if self._values:
            values = [plain(evaluate(value, scope)) for value in self._values]
            for value, source in zip(values, self._values, strict=True):
                if not isinstance(value, (str, int, float)):
                    got = f"{source!r} is neither a text nor a number but a {type(value).__name__}"
                    raise SpecError(f"{self!r} has no value: {got}.")
            text = _compute(self, text.format, *values)
        return scope.tok, text

    def _said(self) -> str:
        return ", ".join(map(repr, (self._text, *self._values)))


class Token(_OfTokenizer):
    """The id of one token of the vocabulary."""

    def _value(self, scope: Scope) -> Any:
        vocabulary, text = self._asked(scope)
        return vocabulary[text]

    def __repr__(self) -> str:
        return f"tok[{self._said()}]"


class TextIds(_OfTokenizer):
    """The ids of a text, encoded without special tokens."""

    def _value(self, scope: Scope) -> Any:
        vocabulary, text = self._asked(scope)
        ids = vocabulary.text(text)
        if vocabulary.unknown in ids and vocabulary.decode([vocabulary.unknown]) not in text:
            problem = f"the tokenizer has no token for a part of {text!r}, as for other texts"
            raise SpecError(f"{self!r} has no value: {problem}. Use a text that it knows.")
        return ids

    def __repr__(self) -> str:
        return f"tok.text({self._said()})"


class Has(_OfTokenizer):
    """Whether the vocabulary has a token."""

    def _value(self, scope: Scope) -> Any:
        vocabulary, text = self._asked(scope)
        return vocabulary.has(text)

    def __repr__(self) -> str:
        return f"tok.has({self._said()})"


class Tokenizer:
    """The root `tok`. A text may be a template for what depends on the item:
    ``tok["<|image_{}|>", item.index + 1]``."""

    def __getitem__(self, text: str | Expr | tuple[Any, ...]) -> Token:
        """The id of one token of the vocabulary."""
        text, *values = text if isinstance(text, tuple) else (text,)
        return Token(expression(text), tuple(map(expression, values)))

    def text(self, text: str | Expr, *values: Value) -> TextIds:
        """The ids of a text, encoded without special tokens."""
        return TextIds(expression(text), tuple(map(expression, values)))

    def has(self, text: str | Expr, *values: Value) -> Has:
        """Whether the vocabulary has a token."""
        return Has(expression(text), tuple(map(expression, values)))

    if not TYPE_CHECKING:

        def __contains__(self, text):
            raise TypeError(f"{text!r} in tok is only known later; use tok.has({text!r})")

        def __call__(self, *text):
            texts = ", ".join(map(repr, text))
            raise TypeError(f'tok is not called; write tok["<token>"] or tok.text({texts})')

    def __repr__(self) -> str:
        return "tok"


class Opaque(Expr):
    """A plain function of one `Scope`."""

    _function: Callable[[Scope], Any]

    def _value(self, scope: Scope) -> Any:
        return self._function(scope)

    def __repr__(self) -> str:
        return getattr(self._function, "__qualname__", repr(self._function))


def _wrap(value: Any, level: int) -> str:
    """The source of an operand, in parentheses if it binds less tightly than `level`."""
    inner = _ATOM
    if isinstance(value, Binary):
        inner = _BINARY[value._op][1]
    elif isinstance(value, Unary) or (isinstance(value, (int, float)) and value < 0):
        inner = _UNARY_LEVEL
    return f"({value!r})" if inner < level else repr(value)


cfg: Expr = Root("cfg")
item: Expr = Root("item")
fields: Expr = Root("fields")
proc: Expr = Root("proc")
kwargs: Expr = Root("kwargs")
tok = Tokenizer()


def ceil_div(a: Value, b: Value) -> Expr:
    """`a / b`, rounded up to an integer: ``-(-a // b)``."""
    return Function("ceil_div", (expression(a), expression(b)))


def minimum(*args: Value) -> Expr:
    """The smallest of the arguments."""
    return Function("minimum", tuple(map(expression, args)))


def maximum(*args: Value) -> Expr:
    """The largest of the arguments."""
    return Function("maximum", tuple(map(expression, args)))


def later(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function for arguments that are known later: ``later(best_grid)(item.width,
    item.height)[0]``; also a decorator.

    A call with an expression among its arguments is recorded; any other call is made. Unlike the
    result of a plain function of a `Scope`, the result depends on the arguments alone, so mmkit
    caches layouts that use it per geometry, and results for plain numbers and strings. The function
    must return the same for the same arguments.
    """

    def call(*args: Any, **named: Any) -> Any:
        if any(isinstance(arg, Expr) for arg in (*args, *named.values())):
            return Call(function, (*args, *named.values()), tuple(named))
        return function(*args, **named)

    return wraps(function)(call) if hasattr(function, "__name__") else call


def where(test: Condition, then: Value | Node, other: Value | Node) -> Expr:
    """`then` if `test` holds, else `other`; only the chosen value is evaluated."""
    return Where(expression(test), expression(then), expression(other))


def expression(value: Any) -> Any:
    """An `Opaque` expression for a plain function; any other value as it is."""
    if callable(value) and not isinstance(value, (Expr, type)):
        return Opaque(value)
    return value


def truth(value: Value, scope: Scope) -> bool:
    """Whether a condition holds.

    Raises:
        SpecError: as for `evaluate`, or a value without a truth value, for example a tensor of
            several elements.
    """
    outcome = evaluate(value, scope)
    return outcome if outcome is True or outcome is False else bool(_compute(value, bool, outcome))


@dataclass(frozen=True, slots=True)
class Leaf:
    """A chain of attributes and constant indices, for example ``fields.grid.shape[0]``, or a plain
    function.

    Attributes:
        root: the start of the chain: the name of a root, ``loop 0`` for a loop variable by its
            depth, or ``function``.
        keys: the attributes and indices, in order; for a function, the function.
        expr: the expression.
    """

    root: str
    keys: tuple[Any, ...]
    expr: Expr = field(compare=False)

    def __repr__(self) -> str:
        return repr(self.expr)


INDEX = Leaf("item", ("index",), item.index)
COUNT = Leaf("item", ("count",), item.count)
"""The facts of an item that depend on the other items of its request."""


def leaves(value: Any) -> frozenset[Leaf]:
    """Everything that a value depends on, as the longest chains:
    ``leaves(cfg.a.b + item.width * 2)`` are ``cfg.a.b`` and ``item.width``.
    """
    return value._leaves if isinstance(value, Expr) else _leaves_inside(value)


def _leaves_of(value: Expr) -> frozenset[Leaf]:
    if isinstance(value, Option) and (leaf := _leaf(Attribute(value._base, value._name))):
        return leaves(value._default) | {replace(leaf, expr=value)}
    if leaf := _leaf(value):
        return frozenset({leaf})
    return frozenset().union(*map(leaves, value._parts()))


def _leaves_inside(part: Any) -> frozenset[Leaf]:
    """The leaves of the expressions and layouts in a part of a declaration."""
    if isinstance(part, Node):
        own: frozenset[Leaf] = part.leaves() if hasattr(part, "leaves") else frozenset()
        return own
    if is_dataclass(part) and not isinstance(part, type):
        part = [getattr(part, f.name) for f in dataclass_fields(part)]
    elif isinstance(part, Mapping):
        part = part.values()
    elif not isinstance(part, (list, tuple)):
        return frozenset()
    return frozenset().union(*map(leaves, part))


def _leaf(value: Expr) -> Leaf | None:
    """An expression that is a single leaf."""
    if isinstance(value, Opaque):
        return Leaf("function", (value._function,), value)
    start, keys = _path(value)
    if any(isinstance(key, Expr) for key in keys):
        return None
    if isinstance(start, Root):
        return Leaf(start._name, keys, value)
    if isinstance(start, Loop):
        return Leaf(f"loop {start._depth}", keys, value)
    return None


def _path(value: Any) -> tuple[Any, tuple[Any, ...]]:
    """The start of a chain of attributes and indices, and these, in order."""
    if isinstance(value, Attribute):
        start, keys = _path(value._base)
        return start, (*keys, value._name)
    if isinstance(value, Index):
        start, keys = _path(value._base)
        return start, (*keys, value._key)
    return value, ()


def branches(value: Value) -> tuple[Any, ...]:
    """The values among which nested `where` choose; any other value alone."""
    if isinstance(value, Where):
        return (*branches(value._then), *branches(value._other))
    return (value,)


def evaluate(value: Any, scope: Scope) -> Any:
    """The value of an expression in a scope; a constant is its own value.

    Raises:
        SpecError: an attribute, key or root that the scope lacks. The message names the expression.
    """
    return value._value(scope) if isinstance(value, Expr) else value


def _compute(source: Any, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except (ArithmeticError, TypeError, ValueError, LookupError, RuntimeError) as error:
        values = ", ".join(map(_brief, args))
        raise SpecError(f"{source!r} has no value: {error}, with {values}.") from error


_REMEMBERED = frozenset({bool, int, float, str, type(None)})
"""Types of arguments for which the result of a recorded call is cached: equal values of these types
are interchangeable."""


_remembered_call = lru_cache(maxsize=1024, typed=True)(operator.call)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def fold(value: Any, scope: Scope) -> Any:
    """Replace every part that depends on `cfg`, `proc`, `kwargs` and `tok` alone by its value.

    Raises:
        SpecError: a config or processor attribute is missing.
    """
    if not isinstance(value, Expr):
        # a layout in where()
        return value.bind(scope) if isinstance(value, Node) and hasattr(value, "bind") else value
    if isinstance(value, Opaque):
        return value
    if all(leaf.root in STATIC for leaf in leaves(value)):
        return evaluate(value, scope)
    if isinstance(value, Where):
        test = fold(value._test, scope)
        if not isinstance(test, Expr):  # the branch that this config does not choose may fail
            return fold(value._then if truth(test, scope) else value._other, scope)
    return value._changed(lambda part: fold(part, scope))


def plain(value: Any) -> Any:
    """A Python number or tuple for a tensor or array; any other value as it is."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(map(plain, value)) if isinstance(value, (list, tuple)) else value
