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
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, wraps
from itertools import chain, repeat
from string import Formatter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ..errors import MmkitError, SpecError
from .node import Node, fold, leaves, mapped, same, structure
from .vocabulary import AuthorText, filled

STATIC = frozenset({"cfg", "proc", "kwargs"})
"""Roots that are known once a spec is bound; the others vary per item."""


class Fields(dict[str, Any]):
    """The processed fields of one item: ``fields.grid`` is ``fields["grid"]``."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the processed fields lack {name!r}; they have {sorted(self)}")


class _Folded:
    """What was folded in a scope, by the identity of the expression: expressions share parts. It is
    no field of the dataclass, and is not made before it is needed: scopes of items have none."""

    __slots__ = ("folded",)


@dataclass(frozen=True, slots=True)
class Scope(_Folded):
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
        """This scope for one item."""
        rest = self.prompt, self.kwargs, self.loop, self.counts
        return Scope(self.cfg, self.proc, self.tok, item, fields, *rest)

    def looped(self, depth: int, value: Any) -> Scope:
        """This scope inside an `each` at that depth, whose current element is `value`."""
        # an `each` that was bound alone sees no outer elements
        outer = (*self.loop, *[None] * depth)[:depth]
        return replace(self, loop=(*outer, value))


_MISSING: Any = object()

_FAULTS = ArithmeticError, TypeError, ValueError, LookupError, RuntimeError

Compiled: TypeAlias = "Callable[[Scope], Any]"
"""An expression as a function of a `Scope`."""

Operator: TypeAlias = "Callable[[Expr, Expr | int | float], Expr]"


def _recorded(op: str, *, reflected: bool = False) -> Operator:
    """A method of `Expr` that records an operator."""

    def method(self: Expr, other: Any) -> Any:
        if not isinstance(other, (Expr, int, float)):
            return NotImplemented
        operands = (other, self) if reflected else (self, other)
        if op in "*+":
            _check_ids(op, *operands)
        return Expr(op, operands)

    return method


def _both(op: str) -> tuple[Operator, Operator]:
    """The same for either side of the operator."""
    return _recorded(op), _recorded(op, reflected=True)


def _compared(op: str) -> Any:
    """A method of `Expr` that records whether values are equal."""

    def method(self: Expr, other: object) -> Expr:
        if isinstance(other, _COMPARED):
            return Expr(op, (self, other))
        problem = f"a {type(other).__name__} is no value to compare with"
        raise TypeError(f"{self!r} {op} {other!r}: {problem}")

    return method


def _alone(op: str) -> Callable[..., Expr]:
    """A method of `Expr` that records an operator without another operand."""
    return lambda self, *more: Expr(op, (self, *more))


def _refused(problem: str) -> Any:
    """A method of `Expr` that would have to answer now."""

    def method(self: Expr, *_: Any, **__: Any) -> None:
        raise TypeError(f"{self!r} is only known later and {problem}, or a function of a Scope")

    return method


def _check_ids(op: str, left: Any, right: Any) -> None:
    """Refuse arithmetic on tokens that was meant for a layout. Adding a number is allowed and gives
    the next id."""
    kinds = [operand._op for operand in (left, right) if is_op(operand, "tok[]", "tok.text")]
    if not kinds or _has_layout(left) or _has_layout(right):
        return
    if op == "*" and "tok[]" in kinds:
        token, count = (left, right) if is_op(left, "tok[]") else (right, left)
        remedy = f"Write literal({token!r}) * {count!r} to repeat the token."
        raise SpecError(f"{left!r} * {right!r}", "a layout to repeat", "the id of a token", remedy)
    both = isinstance(left, Expr) and isinstance(right, Expr)
    if op == "+" and (kinds.count("tok.text") == 1 or ("tok[]" in kinds and both)):
        remedy = f"Write literal({left!r}, {right!r}) for one after the other."
        raise SpecError(f"{left!r} + {right!r}", "layouts", "ids, which are not added", remedy)


def _has_layout(value: Any) -> bool:
    """Whether a value is a layout, or an expression with one, as a choice of layouts is."""
    within = value._args if isinstance(value, Expr) else ()
    return isinstance(value, Node) and (not within or any(map(_has_layout, within)))


class Expr(Node):
    """An operation of the table at the end of this module with its operands. Build expressions from
    the roots; see the module's docstring."""

    _op: str
    _args: tuple[Any, ...]

    __array_ufunc__ = None  # numpy then uses the operators below

    def __getattr__(self, name: str) -> Expr:
        if name.startswith("_"):  # pickle, copy and IPython probe for these
            raise AttributeError(name)
        return Expr(".", (self, name))

    def __getitem__(self, key: Any) -> Expr:
        return Expr("[]", (self, key))

    def get(self, name: str, default: Value) -> Expr:
        """The attribute or entry of that name, or a default where there is none:
        ``kwargs.get("size", proc.size)``, ``cfg.vision_config.get("merge_size", 2)``."""
        return _of("get", self, name, default)

    __add__, __radd__ = _both("+")
    __sub__, __rsub__ = _both("-")
    __mul__, __rmul__ = _both("*")
    __truediv__, __rtruediv__ = _both("/")
    __floordiv__, __rfloordiv__ = _both("//")
    __mod__, __rmod__ = _both("%")
    __pow__, __rpow__ = _both("**")
    __and__, __rand__ = _both("&")
    __or__, __ror__ = _both("|")
    __lt__, __le__, __gt__, __ge__ = map(_recorded, ("<", "<=", ">", ">="))
    __eq__, __ne__ = map(_compared, ("==", "!="))
    __neg__, __invert__, __abs__ = map(_alone, ("neg", "~", "abs"))
    __floor__, __ceil__, __round__ = map(_alone, ("floor", "ceil", "round"))

    if not TYPE_CHECKING:  # an answer now would be wrong
        __bool__ = _refused("has no truth value; use where(), minimum(), maximum(), & | ~")
        __hash__ = _refused("cannot be looked up in a set or a dict; use later(table.get)(...)")
        __iter__ = _refused("cannot be iterated; use each() in a layout")
        __contains__ = _refused("cannot be searched; use later(function)(...)")
        __len__ = _refused("has no length; use later(len)(...)")
        __call__ = _refused("cannot be called; use later(function)(...)")
        __format__ = _refused('has no text; use tok["...{}", value], tok.text("...{}", value)')
        __int__ = _refused("is no number; use math.floor(), ceil_div(), //, later(int)(...)")
        __float__ = __index__ = __int__

    def __getstate__(self) -> dict[str, Any]:
        # without what is cached: the compiled form is a function that no pickle holds
        return {"_op": self._op, "_args": self._args}

    def __repr__(self) -> str:
        return _OPS[self._op].source(self)

    @cached_property
    def _compiled(self) -> Compiled:
        return _OPS[self._op].compile(self)

    @cached_property
    def _leaves(self) -> frozenset[Leaf]:
        if self._op == "get" and (leaf := _leaf(Expr(".", self._args[:2]))):
            return leaves(self._args[2]) | {replace(leaf, expr=self)}
        leaf = _leaf(self)
        return frozenset({leaf}) if leaf else leaves(self._args)

    def _evaluated(self, scope: Scope) -> Any:
        return self._compiled(scope)

    def _folded(self, scope: Scope) -> Any:
        if (known := getattr(scope, "folded", None)) is None:
            object.__setattr__(scope, "folded", known := {})
        if id(self) not in known:
            known[id(self)] = self, self._fold(scope)
        return known[id(self)][1]

    def _fold(self, scope: Scope) -> Any:
        if all(leaf.root in STATIC for leaf in self._leaves):
            return self._compiled(scope)
        if self._op == "where" and isinstance(test := fold(self._args[0], scope), bool):
            # the branch that this config does not choose may fail
            return fold(self._args[1 if test else 2], scope)
        known = fold(self._args, scope)
        return self if known is self._args else Expr(self._op, known)


_COMPARED = (Expr, int, float, str, bytes, tuple, list, type(None))

Value: TypeAlias = (
    "Expr | int | float | str | tuple[Any, ...] | list[Any] | Callable[[Scope], Any] | None"
)
"""A constant, an `Expr`, or a function of one `Scope`."""

Count: TypeAlias = "Expr | int | Callable[[Scope], Any]"
"""A whole number >= 0, now or later."""

Condition: TypeAlias = "Expr | bool | Callable[[Scope], Any]"
"""A truth value, now or later."""


class Tokenizer:
    """The root `tok`. A text may be a template for what depends on the item:
    ``tok["<|image_{}|>", item.index + 1]``."""

    def __getitem__(self, text: str | Expr | tuple[Any, ...]) -> Expr:
        """The id of one token of the vocabulary."""
        return _of("tok[]", *text if isinstance(text, tuple) else (text,))

    def text(self, text: str | Expr, *values: Value) -> Expr:
        """The ids of a text, without the special tokens with which the tokenizer surrounds texts.

        Special tokens that the text spells become these tokens. A value that is a string is encoded
        as plain text, so that no caller writes a special token, unless the config or the processor
        states it.
        """
        return _of("tok.text", text, *values)

    def has(self, text: str | Expr, *values: Value) -> Expr:
        """Whether the vocabulary has a token."""
        return _of("tok.has", text, *values)

    if not TYPE_CHECKING:

        def __contains__(self, text):
            raise TypeError(f"{text!r} in tok is only known later; use tok.has({text!r})")

        def __call__(self, *text):
            texts = ", ".join(map(repr, text))
            raise TypeError(f'tok is not called; write tok["<token>"] or tok.text({texts})')

    def __repr__(self) -> str:
        return "tok"


cfg = Expr("root", ("cfg",))
item = Expr("root", ("item",))
fields = Expr("root", ("fields",))
proc = Expr("root", ("proc",))
kwargs = Expr("root", ("kwargs",))
tok = Tokenizer()


def ceil_div(a: Value, b: Value) -> Expr:
    """`a / b`, rounded up to an integer: ``-(-a // b)``."""
    return _of("ceil_div", a, b)


def minimum(*args: Value) -> Expr:
    """The smallest of the arguments."""
    return _of("minimum", *args)


def maximum(*args: Value) -> Expr:
    """The largest of the arguments."""
    return _of("maximum", *args)


def later(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function for arguments that are known later: ``later(best_grid)(item.width,
    item.height)[0]``; also a decorator.

    A call with an expression among its arguments is recorded; any other call is made. Unlike the
    result of a plain function of a `Scope`, the result depends on the arguments alone, so mmkit
    caches layouts that use it per geometry, and results for plain numbers and strings. The function
    must return the same for the same arguments.
    """

    def call(*args: Any) -> Any:
        is_later = any(isinstance(arg, Expr) for arg in args)
        return Expr("later", (function, *args)) if is_later else function(*args)

    return wraps(function)(call) if hasattr(function, "__name__") else call


def where(test: Condition, then: Value | Node, other: Value | Node) -> Expr:
    """`then` if `test` holds, else `other`; only the chosen value is evaluated."""
    return _of("where", _of("truth", test), then, other)


def expression(value: Any) -> Any:
    """An expression for a plain function of a `Scope`; any other value as it is."""
    opaque = callable(value) and not isinstance(value, (Expr, type))
    return Expr("function", (value,)) if opaque else value


def expressions(value: Any) -> Any:
    """The same for every value in a container."""
    return mapped(expression, value)


def several(values: Iterable[Any]) -> tuple[Any, ...]:
    """The same for each value."""
    return tuple(map(expression, values))


def _of(op: str, *args: Any) -> Expr:
    return Expr(op, several(args))


def is_op(value: Any, *ops: str) -> bool:
    """Whether a value is an expression with one of these operations."""
    return isinstance(value, Expr) and value._op in ops


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


def _leaf(value: Expr) -> Leaf | None:
    """An expression that is a single leaf."""
    start, keys = value, list[Any]()
    while is_op(start, ".", "[]"):
        start, key = start._args
        keys.insert(0, structure(key))
        if isinstance(key, Expr):
            return None
    if is_op(start, "root"):
        return Leaf(start._args[0], tuple(keys), value)
    if is_op(start, "loop"):
        return Leaf(f"loop {start._args[1]}", tuple(keys), value)
    return Leaf("function", value._args, value) if value._op == "function" else None


def evaluate(value: Any, scope: Scope) -> Any:
    """The value of an expression in a scope; a constant is its own value.

    Raises:
        SpecError: an attribute, key or root that the scope lacks. The message names the expression.
    """
    return value._compiled(scope) if isinstance(value, Expr) else value


def truth(value: Value, scope: Scope) -> bool:
    """Whether a condition holds.

    Raises:
        SpecError: as for `evaluate`, or a value without a truth value, for example a tensor of
            several elements.
    """
    return bool(evaluate(_of("truth", value), scope))


def plain(value: Any) -> Any:
    """A Python number or tuple for a tensor or array; any other value as it is."""
    if hasattr(type(value), "tolist"):
        value = value.tolist()
    return tuple(map(plain, value)) if isinstance(value, (list, tuple)) else value


# -- the operations --------------------------------------------------------------------------------

_NAME, _ANY, _COMPARISON, _UNARY, _ATOM = -1, 0, 1, 7, 9
"""How tightly operations bind, as in Python. An operand that is a name is no value."""


class Op(NamedTuple):
    """An operation.

    Attributes:
        compile: a function that makes the compiled form of an expression with this operation.
        form: its source: braces for each operand, and ``{rest}`` for those that follow.
        operands: how tightly each operand has to bind; the last level counts for the rest, too.
        level: how tightly the whole binds.
    """

    compile: Callable[[Expr], Compiled]
    form: str
    operands: tuple[int, ...] = (_ANY,)
    level: int = _ATOM

    def source(self, expr: Expr) -> str:
        """The source of an expression with this operation."""
        levels = chain(self.operands, repeat(self.operands[-1]))
        sources = [written(arg, level) for arg, level in zip(expr._args, levels, strict=False)]
        return self.form.format(*sources, rest=", ".join(sources[self.form.count("{}") :]))


def written(value: Any, level: int = _ATOM) -> str:
    """The source of an operand, in parentheses if it binds less tightly than `level`."""
    if level == _NAME:
        return value if isinstance(value, str) else getattr(value, "__qualname__", repr(value))
    if isinstance(value, slice):
        ends = [value.start, value.stop, *([] if value.step is None else [value.step])]
        return ":".join("" if end is None else repr(end) for end in ends)
    negative = isinstance(value, (int, float)) and value < 0
    own = _OPS[value._op].level if isinstance(value, Expr) else _UNARY if negative else _ATOM
    return f"({value!r})" if own < level else repr(value)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _fault(expr: Expr, problem: object) -> SpecError:
    return SpecError(f"{expr!r} has no value: {problem}.")


def _compiled(value: Any) -> Compiled:
    return value._compiled if isinstance(value, Expr) else lambda scope: value


def _with(expr: Expr, error: Exception, *values: Any) -> str:
    """The problem of an operation that knows no more: the error and the values."""
    return f"{error}, with {', '.join(map(_brief, values))}"


def _computed(
    function: Callable[..., Any], problem: Callable[..., str] = _with, end: Any = _MISSING
) -> Callable[[Expr], Compiled]:
    """The compiling of an operation that is a function of the values of its operands.

    Args:
        function: the function.
        problem: what is wrong where the function raises, by the expression, the error and the
            values of its operands.
        end: a value of the first of two operands that is the result, as with `and` and `or`: the
            second may have no value then.
    """

    def compile(expr: Expr) -> Compiled:
        def called(*values: Any) -> Any:
            try:
                return function(*values)
            except MmkitError:  # of what loads when it is asked for
                raise
            except _FAULTS as error:
                raise _fault(expr, problem(expr, error, *values)) from error

        operands = [*map(_compiled, expr._args)]
        if len(operands) != 2:
            return lambda scope: called(*[operand(scope) for operand in operands])
        first, second = operands  # nearly always, and faster without a list
        if end is _MISSING:
            return lambda scope: called(first(scope), second(scope))
        return lambda scope: one if (one := first(scope)) is end else called(one, second(scope))

    return compile


def _root(expr: Expr) -> Compiled:
    (name,) = expr._args
    get = operator.attrgetter(name)

    def value(scope: Scope) -> Any:
        if (known := get(scope)) is None:
            raise SpecError(f"{name} has no value here: {_ABSENT[name]}.")
        return known

    return value


_ABSENT = {
    "cfg": "the spec is not bound to a config",
    "proc": "the model has no Hugging Face processor",
    "item": "it describes one raw item and is only known inside layout, update, fields and process",
    "fields": "it holds the processed fields of one item and is only known after processing",
}


@lru_cache(maxsize=256)
def _is_keyed(kind: Any) -> bool:
    return issubclass(kind, Mapping)


def _named(holder: Any, name: str) -> Any:
    """The entry of a mapping, or the attribute of anything else; `_MISSING` where there is none."""
    kind: Any = type(holder)
    return holder.get(name, _MISSING) if _is_keyed(kind) else getattr(holder, name, _MISSING)


def _attribute(holder: Any, name: str) -> Any:
    if (found := _named(holder, name)) is _MISSING:
        raise LookupError(name)
    return found


def _lacking(expr: Expr, error: Exception, holder: Any, name: str) -> str:
    kind: Any = type(holder)
    public = [n for n in dir(holder) if not n.startswith("_")]
    known = sorted(holder) if _is_keyed(kind) else difflib.get_close_matches(name, public)
    hint = f". It has: {', '.join(map(str, known))}" if known else ""
    of_fields = same(expr._args[0], fields)
    lack = "the processed fields lack" if of_fields else f"{kind.__name__} has no attribute"
    return f"{lack} {name!r}{hint}"


def _get(holder_of: Compiled, name_of: Compiled, default_of: Compiled) -> Compiled:
    def value(scope: Scope) -> Any:
        found = _named(holder_of(scope), name_of(scope))
        return default_of(scope) if found is _MISSING else found

    return value


def _element(holder: Any, key: Any) -> Any:
    element = holder[key]
    if getattr(element, "ndim", None) != 0:
        return element
    # Python computes with whole numbers faster than a tensor does, and exactly
    number = element.item()
    return number if isinstance(number, int) else element


def _holder(expr: Expr, error: Exception, holder: Any, key: Any) -> str:
    return f"{expr._args[0]!r} is {_brief(holder)}"


def _where(holds: Compiled, then: Compiled, other: Compiled) -> Compiled:
    return lambda scope: (then if holds(scope) else other)(scope)


_REMEMBERED = frozenset({bool, int, float, str, type(None)})
"""Types of arguments for which the result of a recorded call is cached: equal values of these types
are interchangeable."""

_remembered = lru_cache(maxsize=1024, typed=True)(operator.call)


def _later(function: Callable[..., Any], *args: Any) -> Any:
    remembered = _REMEMBERED.issuperset(map(type, args))
    return _remembered(function, *args) if remembered else function(*args)


def _with_args(expr: Expr, error: Exception, _: Any, *args: Any) -> str:
    return _with(expr, error, *args)


def _of_tokenizer(
    ask: Callable[[Expr, Any, str, list[Any]], Any],
) -> Callable[[Expr], Compiled]:
    """A question about a text, or about a template with the values that fill it."""

    def compile(expr: Expr) -> Compiled:
        are_stated = [_is_stated(arg) for arg in expr._args[1:]]

        def value(scope: Scope) -> Any:
            if scope.tok is None:
                remedy = "Use a token id from cfg instead"
                raise _fault(expr, f"the model runs without a tokenizer. {remedy}")
            text, *values = (plain(evaluate(arg, scope)) for arg in expr._args)
            for source, one in zip(expr._args[1:], values, strict=True):
                if not isinstance(one, (str, int, float)):
                    kind = f"a {type(one).__name__}"
                    raise _fault(expr, f"{source!r} is neither a text nor a number but {kind}")
            if values:
                _check_template(expr, text)
            for position, is_stated in enumerate(are_stated):
                if is_stated and isinstance(values[position], str):
                    values[position] = AuthorText(values[position])
            return ask(expr, scope.tok, text, values)

        return value

    return compile


def _is_stated(value: Any) -> bool:
    """Whether the author of a spec, or of a checkpoint, has stated a value: a constant, or one of
    the config and the processor. Any other text may be a caller's."""
    return all(leaf.root in ("cfg", "proc") for leaf in leaves(value))


_LONG_NUMBER = re.compile(r"\d{5}")


def _check_template(expr: Expr, template: str) -> None:
    """Refuse a template that makes a text of any length of one value, as ``{:>3000000000}`` does.

    Raises:
        SpecError: it does.
    """
    for _, _, form, _ in Formatter().parse(template):
        if form and ("{" in form or _LONG_NUMBER.search(form)):
            raise _fault(expr, f"the width {form!r} in the template is no number below 10000")


def _id(expr: Expr, vocabulary: Any, template: str, values: list[Any]) -> Any:
    return vocabulary[filled(template, *values)]


def _has(expr: Expr, vocabulary: Any, template: str, values: list[Any]) -> Any:
    return vocabulary.has(template, *values)


def _ids(expr: Expr, vocabulary: Any, template: str, values: list[Any]) -> Any:
    ids, unknown = vocabulary.text(template, *values), vocabulary.unknown
    text = filled(template, *values)
    if unknown in ids and vocabulary.decode([unknown]) not in text:
        problem = f"the tokenizer has no token for a part of {text!r}, as for other texts"
        raise _fault(expr, f"{problem}. Use a text that it knows")
    return ids


_MOST_BITS = 4096
"""The bits of the largest whole number: a config may hold any numbers, and a power of two of them
takes all time and memory."""

_LONGEST = 1 << 22
"""The elements of the longest list or text that `*` makes."""


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1:
        _check_bits(base.bit_length() * exponent)
    return base**exponent


def _product(one: Any, other: Any) -> Any:
    if isinstance(one, int) and isinstance(other, int):
        _check_bits(one.bit_length() + other.bit_length())
    for several, count in ((one, other), (other, one)):
        if isinstance(several, (str, bytes, list, tuple)) and isinstance(count, int):
            length = len(several) * count
            if length > _LONGEST:
                raise ValueError(f"a list or text of {length} elements, of at most {_LONGEST}")
    return one * other


def _remainder(one: Any, other: Any) -> Any:
    if isinstance(one, (str, bytes)):  # which Python would take for a format, of any width
        raise TypeError("a text has no remainder")
    return one % other


def _rounded(value: Any, *digits: Any) -> Any:
    if any(isinstance(count, int) and abs(count) > _MOST_BITS for count in digits):
        raise ValueError(f"a number of more than {_MOST_BITS} digits")
    return round(value, *digits)


def _check_bits(bits: int) -> None:
    """Refuse to compute a whole number that is too long.

    Raises:
        OverflowError: it is.
    """
    if bits > _MOST_BITS:
        raise OverflowError(f"a whole number of more than {_MOST_BITS} bits")


def _sign(form: str, level: int, function: Callable[[Any, Any], Any], end: Any = _MISSING) -> Op:
    operands = (level + 1, level) if form == "{} ** {}" else (level, level + 1)
    if level == _COMPARISON:  # Python would chain two of them
        operands = (level + 1, level + 1)
    return Op(_computed(function, _with, end), form, operands, level)


_OPS = {
    "root": Op(_root, "{}", (_NAME,)),
    "loop": Op(lambda expr: lambda scope: scope.loop[expr._args[1]], "{}", (_NAME,)),
    "function": Op(lambda expr: expr._args[0], "{}", (_NAME,)),
    ".": Op(_computed(_attribute, _lacking), "{}.{}", (_ATOM, _NAME)),
    "[]": Op(_computed(_element, _holder), "{}[{}]", (_ATOM, _ANY)),
    "get": Op(lambda expr: _get(*map(_compiled, expr._args)), "{}.get({rest})", (_ATOM, _ANY)),
    "where": Op(lambda expr: _where(*map(_compiled, expr._args)), "where({rest})"),
    "truth": Op(_computed(bool), "{}"),
    "later": Op(_computed(_later, _with_args), "later({})({rest})", (_NAME, _ANY)),
    "tok[]": Op(_of_tokenizer(_id), "tok[{rest}]"),
    "tok.text": Op(_of_tokenizer(_ids), "tok.text({rest})"),
    "tok.has": Op(_of_tokenizer(_has), "tok.has({rest})"),
    "neg": Op(_computed(operator.neg), "-{}", (_UNARY,), _UNARY),
    "~": Op(_computed(lambda a: not a if isinstance(a, bool) else ~a), "~{}", (_UNARY,), _UNARY),
    "abs": Op(_computed(abs), "abs({rest})"),
    "ceil": Op(_computed(math.ceil), "ceil({rest})"),
    "ceil_div": Op(_computed(lambda a, b: -(-a // b)), "ceil_div({rest})"),
    "floor": Op(_computed(math.floor), "floor({rest})"),
    "maximum": Op(_computed(max), "maximum({rest})"),
    "minimum": Op(_computed(min), "minimum({rest})"),
    "round": Op(_computed(_rounded), "round({rest})"),
    # tensors and lists are compared by their elements
    "==": _sign("{} == {}", 1, lambda a, b: plain(a) == plain(b)),
    "!=": _sign("{} != {}", 1, lambda a, b: plain(a) != plain(b)),
    "<": _sign("{} < {}", 1, operator.lt),
    "<=": _sign("{} <= {}", 1, operator.le),
    ">": _sign("{} > {}", 1, operator.gt),
    ">=": _sign("{} >= {}", 1, operator.ge),
    "|": _sign("{} | {}", 2, operator.or_, True),
    "&": _sign("{} & {}", 3, operator.and_, False),
    "+": _sign("{} + {}", 5, operator.add),
    "-": _sign("{} - {}", 5, operator.sub),
    "*": _sign("{} * {}", 6, _product),
    "/": _sign("{} / {}", 6, operator.truediv),
    "//": _sign("{} // {}", 6, operator.floordiv),
    "%": _sign("{} % {}", 6, _remainder),
    "**": _sign("{} ** {}", 8, _power),
}
"""The operations by name."""
