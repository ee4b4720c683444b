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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from functools import cache, cached_property, lru_cache, wraps
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, dataclass_transform

from .errors import SpecError

STATIC = frozenset({"cfg", "proc", "kwargs"})
"""Roots that are known once a spec is bound; the others vary per item."""


class Fields(dict[str, Any]):
    """The processed fields of one item: ``fields.grid`` is ``fields["grid"]``."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the processed fields lack {name!r}; they have {sorted(self)}")


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
        """This scope for one item."""
        return self._with(item, fields, self.loop)

    def looped(self, depth: int, value: Any) -> Scope:
        """This scope inside an `each` at that depth, whose current element is `value`."""
        # an `each` that was bound alone sees no outer elements
        outer = (*self.loop, *[None] * depth)[:depth]
        return self._with(self.item, self.fields, (*outer, value))

    def _with(self, item: Any, fields: Any, loop: tuple[Any, ...]) -> Scope:
        rest = self.prompt, self.kwargs, loop, self.counts
        return Scope(self.cfg, self.proc, self.tok, item, fields, *rest)


_MISSING: Any = object()

_FAULTS = ArithmeticError, TypeError, ValueError, LookupError, RuntimeError

Compiled: TypeAlias = "Callable[[Scope], Any]"
"""An expression as a function of a `Scope`."""


def parts(value: Any) -> Iterable[Any]:
    """The parts of a part of a spec: the fields of a dataclass, the elements of a container."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, Node):
        kind: Any = type(value)
        return [getattr(value, name) for name in _names(kind)]
    return value.values() if isinstance(value, Mapping) else ()


@cache
def _names(kind: Any) -> list[str]:
    return [field.name for field in dataclass_fields(kind)]


def structure(part: Any) -> Any:
    """A part of a spec as plain tuples, which are equal, with equal hashes, for equal
    declarations."""
    if isinstance(part, Mapping):
        return frozenset((name, structure(value)) for name, value in part.items())
    if isinstance(part, (Node, list, tuple)):
        kind = (type(part),) if isinstance(part, Node) else ()
        return (*kind, *map(structure, parts(part)))
    return (slice, part.start, part.stop, part.step) if isinstance(part, slice) else part


def same(a: Any, b: Any) -> bool:
    """Whether two parts of a spec are equal declarations; ``==`` between expressions records a
    comparison of their values."""
    return bool(structure(a) == structure(b))


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
class Node:
    """Base of the parts of a declaration. Every subclass is a frozen dataclass, compared and hashed
    by its fields, expressions included; its `repr` is its source."""

    _word: ClassVar[str] = ""
    """What declares such a part; empty for the name of its class."""

    _is_named: ClassVar[bool] = False
    """Whether its source names arguments that every such part has."""

    def __init_subclass__(cls, *, init: bool = True) -> None:
        dataclass(frozen=True, repr=False, eq=False, init=init)(cls)

    def __eq__(self, other: object) -> bool:
        return same(self, other) if type(self) is type(other) else NotImplemented

    def __hash__(self) -> int:
        return hash(structure(self))

    def __getstate__(self) -> dict[str, Any]:
        """Everything but cached values, which are computed again."""
        kind = type(self)
        cached = {n for n in vars(self) if isinstance(getattr(kind, n, None), cached_property)}
        return {name: value for name, value in vars(self).items() if name not in cached}

    def __repr__(self) -> str:
        return f"{self._word or type(self).__name__}({', '.join(self._stated())})"

    def _stated(self) -> Iterator[str]:
        """The fields that are not as by default, as arguments."""
        known: Any = dataclass_fields(self)  # type: ignore[arg-type]
        for one in sorted(known, key=lambda one: one.kw_only):
            value, make = getattr(self, one.name), one.default_factory
            default = one.default if make is MISSING else make()
            text = value._source() if isinstance(value, Node) else repr(value)
            if default is MISSING:
                yield f"{one.name}={text}" if one.kw_only or self._is_named else text
            elif one.repr and not same(value, default):
                yield f"{one.name}={text}"

    def _source(self) -> str:
        """The source where this part is an argument."""
        return repr(self)

    @cached_property
    def _leaves(self) -> frozenset[Leaf]:
        return frozenset().union(*map(leaves, parts(self)))


class Part(Node):
    """A part of a declaration that is bound to a config and a tokenizer."""

    def bind(self, scope: Scope) -> Any:
        """This part with everything that depends on `cfg`, `proc` and `tok` alone evaluated."""
        kind: Any = type(self)
        named = zip(_names(kind), parts(self), strict=True)
        return kind(**{name: fold(part, scope) for name, part in named})

    def leaves(self) -> frozenset[Leaf]:
        """Everything that this part depends on; see `mmkit.expr.leaves`."""
        return self._leaves


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


def _alone(op: str) -> Callable[[Expr], Expr]:
    """The same without another operand."""
    return lambda self: Expr(op, (self,))


def _refused(problem: str) -> Any:
    """A method of `Expr` that would have to answer now."""

    def method(self: Expr, *_: Any, **__: Any) -> None:
        raise TypeError(f"{self!r} is only known later and {problem}, or a function of a Scope")

    return method


def _check_ids(op: str, left: Any, right: Any) -> None:
    """Refuse arithmetic on tokens that was meant for a layout. Adding a number is allowed and gives
    the next id."""
    tokens = [operand for operand in (left, right) if is_op(operand, "tok[]")]
    texts = [operand for operand in (left, right) if is_op(operand, "tok.text")]
    if not (tokens or texts) or _has_layout(left) or _has_layout(right):
        return
    if op == "*" and tokens:
        count = right if left is tokens[0] else left
        remedy = f"Write literal({tokens[0]!r}) * {count!r} to repeat the token."
        raise SpecError(f"{left!r} * {right!r}", "a layout to repeat", "the id of a token", remedy)
    both = isinstance(left, Expr) and isinstance(right, Expr)
    if op == "+" and (len(texts) == 1 or (tokens and both)):
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

    __add__, __radd__ = _recorded("+"), _recorded("+", reflected=True)
    __sub__, __rsub__ = _recorded("-"), _recorded("-", reflected=True)
    __mul__, __rmul__ = _recorded("*"), _recorded("*", reflected=True)
    __truediv__, __rtruediv__ = _recorded("/"), _recorded("/", reflected=True)
    __floordiv__, __rfloordiv__ = _recorded("//"), _recorded("//", reflected=True)
    __mod__, __rmod__ = _recorded("%"), _recorded("%", reflected=True)
    __pow__, __rpow__ = _recorded("**"), _recorded("**", reflected=True)
    __and__, __rand__ = _recorded("&"), _recorded("&", reflected=True)
    __or__, __ror__ = _recorded("|"), _recorded("|", reflected=True)
    __lt__, __le__, __gt__, __ge__ = map(_recorded, ("<", "<=", ">", ">="))

    def __eq__(self, other: object) -> Expr:  # type: ignore[override]
        return self._compared("==", other)

    def __ne__(self, other: object) -> Expr:  # type: ignore[override]
        return self._compared("!=", other)

    def _compared(self, op: str, other: object) -> Expr:
        if isinstance(other, _COMPARED):
            return Expr(op, (self, other))
        problem = f"a {type(other).__name__} is no value to compare with"
        raise TypeError(f"{self!r} {op} {other!r}: {problem}")

    __neg__, __invert__ = _alone("neg"), _alone("~")
    __abs__, __floor__, __ceil__ = map(_alone, ("abs", "floor", "ceil"))

    def __round__(self, digits: int | None = None) -> Expr:
        return Expr("round", (self,) if digits is None else (self, digits))

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
        return frozenset({leaf}) if leaf else frozenset().union(*map(leaves, self._args))


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
        """The ids of a text, encoded without special tokens."""
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

    def call(*args: Any, **named: Any) -> Any:
        if any(isinstance(arg, Expr) for arg in (*args, *named.values())):
            operands = [*args, *(Expr("named", one) for one in named.items())]
            return Expr("later", (function, *operands))
        return function(*args, **named)

    return wraps(function)(call) if hasattr(function, "__name__") else call


def where(test: Condition, then: Value | Node, other: Value | Node) -> Expr:
    """`then` if `test` holds, else `other`; only the chosen value is evaluated."""
    return _of("where", _of("truth", test), then, other)


def expression(value: Any) -> Any:
    """An expression for a plain function of a `Scope`; any other value as it is."""
    opaque = callable(value) and not isinstance(value, (Expr, type))
    return Expr("function", (value,)) if opaque else value


def _of(op: str, *args: Any) -> Expr:
    return Expr(op, tuple(map(expression, args)))


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


def leaves(value: Any) -> frozenset[Leaf]:
    """Everything that a value or a part of a declaration depends on, as the longest chains:
    ``leaves(cfg.a.b + item.width * 2)`` are ``cfg.a.b`` and ``item.width``.
    """
    if isinstance(value, Node):
        return value._leaves
    return frozenset().union(*map(leaves, inner)) if (inner := parts(value)) else frozenset()


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


def branches(value: Any) -> tuple[Any, ...]:
    """The values among which nested `where` choose; any other value alone."""
    if is_op(value, "where"):
        return tuple(leaf for branch in value._args[1:] for leaf in branches(branch))
    return (value,)


def compiled(value: Any) -> Compiled:
    """A function of a `Scope` that computes a value; that of an expression is made once. It raises
    as `evaluate` does."""
    return value._compiled if isinstance(value, Expr) else lambda scope: value


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


def fold(value: Any, scope: Scope) -> Any:
    """Replace every part that depends on `cfg`, `proc`, `kwargs` and `tok` alone by its value.

    Raises:
        SpecError: a config or processor attribute is missing.
    """
    if isinstance(value, Mapping):
        return {name: fold(part, scope) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(fold(part, scope) for part in value)
    if not isinstance(value, Expr):
        return value.bind(scope) if isinstance(value, Part) else value
    if value._op != "named" and all(leaf.root in STATIC for leaf in leaves(value)):
        return evaluate(value, scope)
    if value._op == "where" and isinstance(test := fold(value._args[0], scope), bool):
        # the branch that this config does not choose may fail
        return fold(value._args[1 if test else 2], scope)
    return Expr(value._op, tuple(fold(arg, scope) for arg in value._args))


def plain(value: Any) -> Any:
    """A Python number or tuple for a tensor or array; any other value as it is."""
    if hasattr(value, "tolist"):
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


def _with(expr: Expr, error: Exception, *args: Any) -> str:
    """What is wrong, unless an operation knows more: the error and the values."""
    return f"{error}, with {', '.join(map(_brief, args))}"


def _computed(function: Callable[..., Any], *rest: Any) -> Callable[[Expr], Compiled]:
    """An operation that is a function of the values of its operands. Arguments as for `_call`."""
    return lambda expr: _call(expr, expr._args, function, *rest)


def _call(
    expr: Expr,
    operands: Sequence[Any],
    function: Callable[..., Any],
    problem: Callable[..., str] = _with,
    end: Any = _MISSING,
) -> Compiled:
    """The compiled call of a function.

    Args:
        expr: the expression, which errors name.
        operands: the arguments.
        function: the function.
        problem: a function of the expression, an error and the values: what is wrong.
        end: a value of the first of two operands that is the result, as with `and` and `or`: the
            second may have no value then.
    """
    compiled_operands = [compiled(operand) for operand in operands]
    if len(operands) == 2:  # nearly always, and faster without a list
        first, second = compiled_operands

        def value(scope: Scope) -> Any:
            if (one := first(scope)) is end:
                return one
            other = second(scope)
            try:
                return function(one, other)
            except _FAULTS as error:
                raise _fault(expr, problem(expr, error, one, other)) from error

        return value

    def value_of_any(scope: Scope) -> Any:
        args = [operand(scope) for operand in compiled_operands]
        try:
            return function(*args)
        except _FAULTS as error:
            raise _fault(expr, problem(expr, error, *args)) from error

    return value_of_any


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


def _attribute(expr: Expr) -> Compiled:
    base, name = expr._args
    holder_of = compiled(base)

    def value(scope: Scope) -> Any:
        holder = holder_of(scope)
        kind: Any = type(holder)
        keyed = _is_keyed(kind)
        found = holder.get(name, _MISSING) if keyed else getattr(holder, name, _MISSING)
        if found is not _MISSING:
            return found
        public = [n for n in dir(holder) if not n.startswith("_")]
        known = sorted(holder) if keyed else difflib.get_close_matches(name, public)
        hint = f". It has: {', '.join(map(str, known))}" if known else ""
        lack = f"{type(holder).__name__} has no attribute"
        if same(base, fields):
            lack = "the processed fields lack"
        raise _fault(expr, f"{lack} {name!r}{hint}")

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


def _get(holder_of: Compiled, name_of: Compiled, default_of: Compiled) -> Compiled:
    def value(scope: Scope) -> Any:
        found = _named(holder_of(scope), name_of(scope))
        return default_of(scope) if found is _MISSING else found

    return value


def _where(holds: Compiled, then: Compiled, other: Compiled) -> Compiled:
    return lambda scope: (then if holds(scope) else other)(scope)


_REMEMBERED = frozenset({bool, int, float, str, type(None)})
"""Types of arguments for which the result of a recorded call is cached: equal values of these types
are interchangeable."""

_remembered = lru_cache(maxsize=1024, typed=True)(operator.call)


def _later(expr: Expr) -> Compiled:
    function, *operands = expr._args
    names = [operand._args[0] for operand in operands if is_op(operand, "named")]
    positional = len(operands) - len(names)

    def call(*args: Any) -> Any:
        if names:
            named = zip(names, args[positional:], strict=True)
            return function(*args[:positional], **dict(named))
        remembered = _REMEMBERED.issuperset(map(type, args))
        return _remembered(function, *args) if remembered else function(*args)

    return _call(expr, operands, call)


def _of_tokenizer(ask: Callable[[Expr, Any, str], Any]) -> Callable[[Expr], Compiled]:
    """A question about a text, or about a template with the values that fill it."""

    def compile(expr: Expr) -> Compiled:
        text_of, *values_of = map(compiled, expr._args)

        def value(scope: Scope) -> Any:
            if scope.tok is None:
                remedy = "Use a token id from cfg instead"
                raise _fault(expr, f"the model runs without a tokenizer. {remedy}")
            text, values = text_of(scope), [plain(value_of(scope)) for value_of in values_of]
            for source, one in zip(expr._args[1:], values, strict=True):
                if not isinstance(one, (str, int, float)):
                    kind = f"a {type(one).__name__}"
                    raise _fault(expr, f"{source!r} is neither a text nor a number but {kind}")
            return ask(expr, scope.tok, text.format(*values) if values else text)

        return value

    return compile


def _ids(expr: Expr, vocabulary: Any, text: str) -> Any:
    ids, unknown = vocabulary.text(text), vocabulary.unknown
    if unknown in ids and vocabulary.decode([unknown]) not in text:
        problem = f"the tokenizer has no token for a part of {text!r}, as for other texts"
        raise _fault(expr, f"{problem}. Use a text that it knows")
    return ids


def _sign(form: str, level: int, function: Callable[[Any, Any], Any], end: Any = _MISSING) -> Op:
    operands = (level + 1, level) if form == "{} ** {}" else (level, level + 1)
    if level == _COMPARISON:  # Python would chain two of them
        operands = (level + 1, level + 1)
    return Op(_computed(function, _with, end), form, operands, level)


_OPS = {
    "root": Op(_root, "{}", (_NAME,)),
    "loop": Op(lambda expr: lambda scope: scope.loop[expr._args[1]], "{}", (_NAME,)),
    "function": Op(lambda expr: expr._args[0], "{}", (_NAME,)),
    ".": Op(_attribute, "{}.{}", (_ATOM, _NAME)),
    "[]": Op(_computed(_element, _holder), "{}[{}]", (_ATOM, _ANY)),
    "get": Op(lambda expr: _get(*map(compiled, expr._args)), "{}.get({rest})", (_ATOM, _ANY)),
    "where": Op(lambda expr: _where(*map(compiled, expr._args)), "where({rest})"),
    "truth": Op(_computed(bool), "{}"),
    "later": Op(_later, "later({})({rest})", (_NAME, _ANY)),
    "named": Op(lambda expr: compiled(expr._args[1]), "{}={}", (_NAME, _ANY)),
    "tok[]": Op(_of_tokenizer(lambda expr, tok, text: tok[text]), "tok[{rest}]"),
    "tok.text": Op(_of_tokenizer(_ids), "tok.text({rest})"),
    "tok.has": Op(_of_tokenizer(lambda expr, tok, text: tok.has(text)), "tok.has({rest})"),
    "neg": Op(_computed(operator.neg), "-{}", (_UNARY,), _UNARY),
    "~": Op(_computed(lambda a: not a if isinstance(a, bool) else ~a), "~{}", (_UNARY,), _UNARY),
    "abs": Op(_computed(abs), "abs({rest})"),
    "ceil": Op(_computed(math.ceil), "ceil({rest})"),
    "ceil_div": Op(_computed(lambda a, b: -(-a // b)), "ceil_div({rest})"),
    "floor": Op(_computed(math.floor), "floor({rest})"),
    "maximum": Op(_computed(max), "maximum({rest})"),
    "minimum": Op(_computed(min), "minimum({rest})"),
    "round": Op(_computed(round), "round({rest})"),
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
    "*": _sign("{} * {}", 6, operator.mul),
    "/": _sign("{} / {}", 6, operator.truediv),
    "//": _sign("{} // {}", 6, operator.floordiv),
    "%": _sign("{} % {}", 6, operator.mod),
    "**": _sign("{} ** {}", 8, operator.pow),
}
"""The operations by name."""
