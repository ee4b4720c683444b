"""Expressions and layouts as Python source."""

from __future__ import annotations

import builtins
import keyword
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import SpecError
from ..expr import (
    _BINARY,
    _COMPARISON,
    STATIC,
    Attribute,
    Binary,
    Call,
    Expr,
    Function,
    Index,
    Loop,
    Opaque,
    Option,
    Root,
    Scope,
    Slice,
    Text,
    Token,
    Where,
    evaluate,
    leaves,
    root,
)
from ..layout import Each, Embed, Fixed, Layout, Repeated, Sequenced, Tokens, nothing
from .carry import LOCAL, Carrier
from .text import listed, literal

_LOCALS = {"cfg": "config", "proc": "proc", "item": "item", "out": "out", "tok": "tok"}
_ATOM = 9


@dataclass
class Body:
    """The source of one function of a scope `s`: statements that name parts, and expressions.

    Attributes:
        carrier: copies the functions that expressions call.
        names: parts that the module of the spec gives a name.
        sample: values to look at, for a checkpoint that is known; tells mappings from objects.
        inline: everything in one expression, as in a lambda function.
        once: roots that are used once, and need no local name.
    """

    carrier: Carrier
    names: Mapping[Any, str]
    sample: Scope | None = None
    inline: bool = False
    once: frozenset[str] = frozenset()
    lines: list[tuple[str, str]] = field(default_factory=list)
    roots: Counter[str] = field(default_factory=Counter)
    _named: dict[Any, str] = field(default_factory=dict)

    # -- names

    def name_parts(self, *parts: Any, constant: bool = False) -> None:
        """Give a local name to what has one in the spec's module, where it is computed in any case.

        Args:
            parts: expressions and layouts.
            constant: name what depends on no item alone.
        """
        for part in parts:
            for node in _strict(part):
                name = None if constant and not static(node) else _known(self.names, node)
                if name is None or self.inline or name in self._named.values() or node in self._named:
                    continue
                if node == part and isinstance(part, (Expr, Layout)):
                    continue  # the whole of it
                source = self.positions(node) if isinstance(node, Layout) else self.value(node)
                self.lines.append((self._free(name), source))
                self._named[node] = self._free(name)

    def _free(self, name: str) -> str:
        taken = keyword.iskeyword(name) or hasattr(builtins, name) or name in LOCAL or name in self.carrier.taken
        return f"{name}_" if taken else name

    def _root(self, name: str) -> str:
        self.roots[name] += 1
        if self.inline or name in self.once:
            return f"s.{name}"
        return _LOCALS.get(name, f"s.{name}")

    def statements(self) -> list[tuple[str, str]]:
        """Assignments that come first: names, each with its expression."""
        return [(_LOCALS[name], f"s.{name}") for name in _LOCALS if name in self.roots] + self.lines

    # -- expressions

    def value(self, value: Any, level: int = 0) -> str:
        """The source of an expression, in parentheses if it binds less tightly than `level`."""
        text, binds = self._value(value)
        return f"({text})" if binds < level else text

    def _value(self, value: Any) -> tuple[str, int]:
        if (named := _known(self._named, value)) is not None:
            return named, _ATOM
        match value:
            case Root(name):
                return self._root(name), _ATOM
            case Loop(depth):
                return repr(value) if depth < 6 else f"x{depth}", _ATOM
            case Attribute(base, name):
                return self._attribute(base, name), _ATOM
            case Index(base, key):
                return f"{self.value(base, _ATOM)}[{self._key(key)}]", _ATOM
            case Binary(op, left, right):
                level = _BINARY[op][1]
                first, second = (level + 1, level) if op == "**" else (level, level + 1)
                first += level == _COMPARISON
                return f"{self.value(left, first)} {op} {self.value(right, second)}", level
            case Function(name, args):
                return self._function(name, args)
            case Call(function, args):
                return f"{self.carrier.reference(function)}({', '.join(map(self.value, args))})", _ATOM
            case Option(name, default):
                default_of = self.value(default)
                return f"{self._helper('option')}(s, {literal(name)}, lambda: {default_of})", _ATOM
            case Where(test, then, other):
                return f"{self.value(then, 1)} if {self.value(test, 1)} else {self.value(other)}", 0
            case Token(text):
                return f"{self._root('tok')}[{self.value(text)}]", _ATOM
            case Text(text):
                return f"{self._root('tok')}({self.value(text)})", _ATOM
            case Opaque(function):
                if "loop" in getattr(getattr(function, "__code__", None), "co_names", ()):
                    self._refuse("functions of a Scope that do not read its loop", value)
                return f"{self.carrier.reference(function)}(s)", _ATOM
            case list() | tuple() if literal(value) is None:
                return listed([self.value(part) for part in value], isinstance(value, list)), _ATOM
            case Layout():
                self._refuse("a value", value)
        text = literal(value)
        if text is None:
            return self.carrier.reference(value), _ATOM
        return text, 7 if text.startswith("-") else _ATOM

    def _attribute(self, base: Any, name: str) -> str:
        holder = self.value(base, _ATOM)
        if base == Root("out"):
            return f"{holder}[{literal(name)}]"
        start = root(base)
        known = isinstance(start, Root) and all(root(leaf) == start for leaf in leaves(base))
        if not known:
            return f"{self._helper('attribute')}({holder}, {literal(name)})"
        if start == Root("item"):
            return f"{holder}.{name}" if base == start else f"{holder}[{literal(name)}]"
        if start._name in STATIC and base != start and self.sample is not None and self._is_mapping(base):
            return f"{holder}[{literal(name)}]"
        return f"{holder}.{name}"

    def _is_mapping(self, base: Any) -> bool:
        try:
            return isinstance(evaluate(base, self.sample or Scope()), Mapping)
        except SpecError:
            return False

    def _key(self, key: Any) -> str:
        if isinstance(key, Slice):
            ends = ["" if end is None else self.value(end) for end in (key.start, key.stop, key.step)]
            return ":".join(ends if ends[2] else ends[:2])
        return self.value(key)

    def _function(self, name: str, args: Sequence[Any]) -> tuple[str, int]:
        match name:
            case "equal":
                return f"{self.value(args[0], 4)} == {self.value(args[1], 4)}", _COMPARISON
            case "fmt" if isinstance(args[0], str):
                return f"{literal(args[0])}.format({', '.join(map(self.value, args[1:]))})", _ATOM
            case "fmt":
                return f"{self.value(args[0], _ATOM)}.format({', '.join(map(self.value, args[1:]))})", _ATOM
            case "floor" | "isqrt":
                self.carrier.import_module("math")
                return f"math.{name}({self.value(args[0])})", _ATOM
        plain = {"minimum": "min", "maximum": "max", "total": "sum"}
        called = plain[name] if name in plain else self._helper(name)
        return f"{called}({', '.join(map(self.value, args))})", _ATOM

    def _helper(self, name: str) -> str:
        return self.carrier.runtime(name)

    def _refuse(self, expected: str, got: Any) -> None:
        raise SpecError(f"{self.carrier.where}, eject", expected, repr(got))

    # -- layouts

    def positions(self, layout: Any) -> str:
        """The source of a layout: an expression of (id, receives a row) pairs."""
        if (named := _known(self._named, layout)) is not None:
            return named
        match layout:
            case Fixed():
                self._refuse("a spec that is not bound", layout)
            case Tokens(value):
                return self._chosen(value)
            case Embed(value):
                return f"{self._helper('embed')}({self.value(value)})"
            case Repeated(body, count):
                return f"{self._helper('repeat')}({self.positions(body)}, {self.value(count)})"
            case Sequenced(()):
                return "[]"
            case Sequenced(parts):
                return " + ".join(self._operand(part) for part in parts)
            case Each(over, body, sep, last, _):
                variable = repr(Loop(layout.depth)) if layout.depth < 6 else f"x{layout.depth}"
                args = [self.value(over), f"lambda {variable}: {self.positions(body)}"]
                if sep != nothing:
                    args.append(f"sep=lambda {variable}: {self.positions(sep)}")
                if last != nothing:
                    args.append(f"last={self.positions(last)}")
                return f"{self._helper('each')}({', '.join(args)})"
        return self._chosen(layout)

    def _operand(self, part: Layout) -> str:
        text = self.positions(part)
        return f"({text})" if isinstance(part, Tokens) and isinstance(part.value, Where) else text

    def _chosen(self, value: Any) -> str:
        """Literal ids, or a layout that `where` chooses."""
        match value:
            case Layout():
                return self.positions(value)
            case Where(test, then, other):
                first = self._chosen(then)
                conditional = isinstance(then.value if isinstance(then, Tokens) else then, Where)
                first = f"({first})" if conditional else first
                return f"{first} if {self.value(test, 1)} else {self._chosen(other)}"
        return f"{self._helper('literal')}({self.value(value)})"

    def known_ids(self, layout: Any) -> list[str]:
        """Sources of lists of the ids that receive rows, as far as the config, the processor and the vocabulary tell
        them."""
        if isinstance(layout, Layout) and static(layout):
            if not any(isinstance(node, (Embed, Tokens)) and _may_embed(node) for node in _every(layout)):
                return []
            if isinstance(layout, Repeated) and isinstance(layout.body, Embed):
                return [f"[{self.value(layout.body.value)}] if {self.value(layout.count, 1)} else []"]
            if isinstance(layout, Embed):
                return [f"[{self.value(layout.value)}]"]
            if isinstance(layout, Sequenced):
                return [text for part in layout.parts for text in self.known_ids(part)]
            return [f"{self._helper('embedded')}({self.positions(layout)})"]
        match layout:
            case Tokens(value):
                return self.known_ids(value) if isinstance(value, (Layout, Where)) else []
            case Where(condition, first, second):
                then, other = self.known_ids(first), self.known_ids(second)
                if not static(condition):
                    return then + other
                test = self.value(condition, 1)
                return [f"({t}) if {test} else []" for t in then] + [f"[] if {test} else {o}" for o in other]
            case Layout():
                return [text for part in layout._parts() if isinstance(part, Layout) for text in self.known_ids(part)]
        return []


def static(value: Any) -> bool:
    """Whether a value depends on the config, the processor, the vocabulary and options alone."""
    starts = [root(leaf) for leaf in leaves(value)]
    return all(isinstance(start, Root) and start._name in STATIC for start in starts)


def _may_embed(node: Any) -> bool:
    return isinstance(node, Embed) or isinstance(node.value, Where)


def _every(part: Any) -> Iterator[Any]:
    yield part
    for inner in part._parts() if isinstance(part, (Expr, Layout)) else ():
        yield from _every(inner)


def _strict(part: Any) -> Iterator[Any]:
    """The parts that are computed whenever a part is, each after its own parts."""
    match part:
        case Where(test, _, _):
            yield from _strict(test)
        case Option():
            pass
        case Each(over, body, sep, last, _):
            yield from _strict(over)
            for inner in (body, sep, last):  # what a bound layout computes ahead of its elements
                yield from filter(static, _strict(inner))
        case Expr() | Layout():
            for inner in part._parts():
                yield from _strict(inner)
        case list() | tuple():
            for inner in part:
                yield from _strict(inner)
            return
        case _:
            return
    yield part


def _known(names: Mapping[Any, str], part: Any) -> str | None:
    if not isinstance(part, (Expr, Layout)):
        return None
    try:
        return names.get(part)
    except TypeError:  # a default that cannot be hashed
        return None
