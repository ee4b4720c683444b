"""Expressions and layouts from their source, without running Python.

`parse_source` reads what the `repr` of an expression or of a layout writes. `ast` parses the text,
and each kind of node in `_READERS` becomes what the same source makes in Python, by mmkit's own
operators, so that mmkit's own checks speak. Nothing else has a meaning: there are no names but
those of `ROOTS` and `WORDS`, no call of anything else, no private attribute, no comprehension.

Bounds hold before anything is built: a text of a stranger costs no more than its length.

A function is named in quotes, by its module and its name there::

    later("my_package.spec:rows")(item.length)   # a call of arguments that are known later
    function("my_package.spec:rows")             # a function of a Scope

The file in its order: what the text may name, `parse_source`, and the reader of each kind of node.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import warnings
from collections.abc import Callable, Mapping
from string import Formatter
from typing import Any, NoReturn, TypeAlias

from ..errors import SpecError, describe_error
from ..language.expr import (
    Expr,
    Tokenizer,
    as_expression,
    ceil_div,
    cfg,
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
from ..language.items import between
from ..language.layout import Layout, any_id, each, embed, literal, nothing, select
from ..language.policy import concat

FunctionLoader: TypeAlias = Callable[[str], Any]
"""Returns the function of a name, or raises a SpecError."""

ROOTS: Mapping[str, Any] = {
    "cfg": cfg,
    "item": item,
    "fields": fields,
    "proc": proc,
    "kwargs": kwargs,
    "tok": tok,
    "nothing": nothing,
}
"""The names that stand for a value."""

WORDS: Mapping[str, Callable[..., Any]] = {
    "any_id": any_id,
    "between": between,
    "ceil_div": ceil_div,
    "concat": concat,
    "embed": embed,
    "literal": literal,
    "maximum": maximum,
    "minimum": minimum,
    "select": select,
    "where": where,
}
"""The words that are called with values; `each`, `largest_of`, `later` and `function` have readers
of their own."""

NUMBER_WORDS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
    "floor": math.floor,
    "round": round,
}
"""Functions of Python that an expression records, and that compute a number at once."""

LIBRARY: Mapping[str, Callable[..., Any]] = {
    "float": float,
    "int": int,
    "len": len,
    "list": list,
    "max": max,
    "min": min,
    "sqrt": math.sqrt,
    "sum": sum,
}
"""Functions of Python that `later` may call in a document: they run no code but their own."""

MAX_CHARACTERS = 16_000
MAX_NODES = 4_000
MAX_DEPTH = 100
MAX_NUMBER = 1 << 63

_TEMPLATE_FORM = re.compile(r"\.?\d{0,2}[defgx]?")
"""The forms of a number in a template: `:.4f` and the like."""

_BINARY: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}

_UNARY: Mapping[type[ast.AST], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
}

_COMPARISONS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def parse_source(text: str, load_function: FunctionLoader) -> Any:
    """Return the expression, the layout or the constant that a text writes.

    Args:
        text: source as the `repr` of an expression or of a layout writes it.
        load_function: returns the functions that the text names.

    Raises:
        SpecError: the text is no such source, is beyond a bound, or names a function that is not
            loaded.
    """
    if len(text) > MAX_CHARACTERS:
        raise SpecError("", f"at most {MAX_CHARACTERS} characters", str(len(text)))
    _check_brackets(text)
    tree = _parse(text)
    _check_tree(tree)
    try:
        return _Reader(load_function).parse_node(tree)
    except SpecError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        # of a word or an operator that takes other arguments
        raise SpecError("", "an expression or a layout", describe_error(error)) from error


def _check_brackets(text: str) -> None:
    """Refuse deep brackets before `ast` sees them, whose parser recurses.

    Raises:
        SpecError: there are too many, one in another.
    """
    depth = 0
    for character in text:
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        if depth > MAX_DEPTH:
            raise SpecError("", f"at most {MAX_DEPTH} brackets in each other", "more")


def _parse(text: str) -> ast.expr:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not have
            return ast.parse(text.strip(), mode="eval").body
    except (MemoryError, RecursionError) as error:
        # how deep Python's parser goes depends on its limits, and on who calls
        raise _make_depth_error() from error
    except (SyntaxError, ValueError) as error:
        problem = getattr(error, "msg", "") or str(error) or type(error).__name__
        got = f"{_shorten(text)}, which is none: {problem}"
        raise SpecError("", "an expression or a layout", got) from error


def _make_depth_error() -> SpecError:
    return SpecError("", f"at most {MAX_DEPTH} operations in each other", "more")


def _check_tree(tree: ast.AST) -> None:
    """Refuse a tree of too many nodes, or of too many levels.

    Raises:
        SpecError: it is one.
    """
    count = 0
    depth = 0
    level: list[ast.AST] = [tree]
    while level:
        count += len(level)
        depth += 1
        if count > MAX_NODES:
            raise SpecError("", f"at most {MAX_NODES} parts of an expression", "more")
        if depth > MAX_DEPTH:
            raise _make_depth_error()
        inner: list[ast.AST] = []
        for node in level:
            inner.extend(ast.iter_child_nodes(node))
        level = inner


def _shorten(text: str) -> str:
    quoted = repr(text)
    if len(quoted) <= 60:
        return quoted
    return f"{quoted[:57]}..."


def _refuse(got: str, remedy: str = "") -> NoReturn:
    expected = "an expression over cfg, item, fields, proc, kwargs and tok, or a layout"
    raise SpecError("", expected, got, remedy)


class _Reader:
    """Builds what a tree means.

    Args:
        load_function: returns the functions that the text names.
    """

    def __init__(self, load_function: FunctionLoader) -> None:
        self._load_function = load_function
        # the elements of the enclosing `each`, by the name that the text gives them
        self._elements: dict[str, Expr] = {}

    def parse_node(self, node: ast.AST) -> Any:
        """Return what a node means."""
        reader = _READERS.get(type(node))
        if reader is None:
            _refuse(f"{_shorten(ast.unparse(node))}, a {type(node).__name__}")
        return reader(self, node)

    def _parse_all(self, nodes: list[ast.expr]) -> list[Any]:
        return [self.parse_node(node) for node in nodes]

    # -- constants and names --

    def parse_constant(self, node: ast.Constant) -> Any:
        value = node.value
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int):
            if value >= MAX_NUMBER:
                _refuse("a whole number of 2**63 or more")
            return value
        if isinstance(value, float):
            if not math.isfinite(value):
                _refuse("a number that no float can hold")
            return value
        _refuse(f"a constant of type {type(value).__name__}")

    def parse_name(self, node: ast.Name) -> Any:
        if node.id in self._elements:
            return self._elements[node.id]
        if node.id in ROOTS:
            return ROOTS[node.id]
        _refuse(f"the name {node.id!r}")

    def parse_tuple(self, node: ast.Tuple) -> Any:
        return tuple(self._parse_all(node.elts))

    def parse_list(self, node: ast.List) -> Any:
        return self._parse_all(node.elts)

    def parse_dict(self, node: ast.Dict) -> Any:
        entries: dict[str, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                _refuse("a dict with a key that is no text")
            if key.value in entries:
                _refuse(f"the key {key.value!r} twice")
            entries[key.value] = self.parse_node(value)
        return entries

    # -- attributes and elements --

    def parse_attribute(self, node: ast.Attribute) -> Any:
        holder = self.parse_node(node.value)
        name = node.attr
        if name.startswith("_") or not isinstance(holder, Expr):
            _refuse(f"the attribute {name!r} of {_shorten(ast.unparse(node.value))}")
        if name == "get":
            _refuse(".get without a name and a default")
        return Expr(".", (holder, name))

    def parse_subscript(self, node: ast.Subscript) -> Any:
        key = self._parse_key(node.slice)
        holder = self.parse_node(node.value)
        if isinstance(holder, Tokenizer):
            arguments = key if isinstance(key, tuple) else (key,)
            _check_template(arguments)
            return tok[arguments]
        if isinstance(holder, Expr):
            return holder[key]
        _refuse(f"an element of {_shorten(ast.unparse(node.value))}")

    def _parse_key(self, node: ast.expr) -> Any:
        if not isinstance(node, ast.Slice):
            return self.parse_node(node)
        ends: list[Any] = []
        for end in (node.lower, node.upper, node.step):
            ends.append(None if end is None else self.parse_node(end))
        return slice(*ends)

    # -- operators --

    def parse_binary(self, node: ast.BinOp) -> Any:
        operation = _BINARY.get(type(node.op))
        if operation is None:
            _refuse(f"the operator of {_shorten(ast.unparse(node))}")
        left = self.parse_node(node.left)
        right = self.parse_node(node.right)
        if not _is_recorded(left) and not _is_recorded(right):
            _refuse(f"{_shorten(ast.unparse(node))}, all constants", "Write its value.")
        if isinstance(left, str):  # Python would format it, to as many characters as it says
            _refuse(f"an operator after a text in {_shorten(ast.unparse(node))}")
        return operation(left, right)

    def parse_unary(self, node: ast.UnaryOp) -> Any:
        operation = _UNARY.get(type(node.op))
        operand = self.parse_node(node.operand)
        is_number = isinstance(operand, (int, float)) and not isinstance(operand, bool)
        if operation is operator.neg and is_number:
            return -operand
        if operation is None or not isinstance(operand, Expr):
            _refuse(f"the operator of {_shorten(ast.unparse(node))}")
        return operation(operand)

    def parse_comparison(self, node: ast.Compare) -> Any:
        if len(node.ops) > 1:
            _refuse("a chain of comparisons", "Write (a < b) & (b < c).")
        operation = _COMPARISONS.get(type(node.ops[0]))
        left = self.parse_node(node.left)
        right = self.parse_node(node.comparators[0])
        if operation is None or not (isinstance(left, Expr) or isinstance(right, Expr)):
            _refuse(f"the comparison {_shorten(ast.unparse(node))}")
        return operation(left, right)

    # -- calls --

    def parse_call(self, node: ast.Call) -> Any:
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                _refuse("*arguments")
        function = node.func
        if isinstance(function, ast.Attribute):
            return self._parse_method(function, node)
        if isinstance(function, ast.Call):
            return self._parse_later(function, node)
        if isinstance(function, ast.Name):
            return self._parse_word(function.id, node)
        _refuse(f"a call of {_shorten(ast.unparse(function))}")

    def _parse_word(self, word: str, node: ast.Call) -> Any:
        if word == "each":
            return self._parse_each(node)
        if word == "largest_of":
            return self._parse_largest_of(node)
        if word == "function":
            return as_expression(self._load_function(_parse_function_name(node)))
        if word in NUMBER_WORDS:
            arguments = self._parse_all(node.args)
            if node.keywords or not arguments or not isinstance(arguments[0], Expr):
                _refuse(f"{_shorten(ast.unparse(node))}, all constants", "Write its value.")
            return NUMBER_WORDS[word](*arguments)
        if word in WORDS:
            return WORDS[word](*self._parse_all(node.args), **self._parse_keywords(node))
        _refuse(f"a call of {word!r}")

    def _parse_keywords(self, node: ast.Call) -> dict[str, Any]:
        keywords: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                _refuse("**arguments")
            keywords[keyword.arg] = self.parse_node(keyword.value)
        return keywords

    def _parse_method(self, method: ast.Attribute, node: ast.Call) -> Any:
        """Return ``tok.text(...)``, ``tok.has(...)`` or ``holder.get(name, default)``."""
        holder = self.parse_node(method.value)
        arguments = self._parse_all(node.args)
        has_values = not node.keywords and bool(arguments)
        if has_values and isinstance(holder, Tokenizer) and method.attr in ("text", "has"):
            _check_template(arguments)
            if method.attr == "text":
                return tok.text(*arguments)
            return tok.has(*arguments)
        is_get = method.attr == "get" and len(arguments) == 2 and isinstance(holder, Expr)
        if has_values and is_get:
            name = arguments[0]
            # a value of a config could name a private attribute
            if isinstance(name, str) and not name.startswith("_"):
                return holder.get(*arguments)
        _refuse(f"a call of {_shorten(ast.unparse(method))}")

    def _parse_later(self, call: ast.Call, node: ast.Call) -> Any:
        """Return ``later(function)(arguments)``, of a function of the library or a named one."""
        is_later = isinstance(call.func, ast.Name) and call.func.id == "later"
        if not is_later or len(call.args) != 1 or call.keywords or node.keywords:
            _refuse(f"a call of {_shorten(ast.unparse(call))}")
        (target,) = call.args
        if isinstance(target, ast.Name):
            if target.id not in LIBRARY:
                _refuse(f"later({target.id})", f"Name a function of {', '.join(LIBRARY)}.")
            function: Any = LIBRARY[target.id]
        else:
            function = self._load_function(_parse_function_name(call))
        arguments = self._parse_all(node.args)
        if not any(isinstance(argument, Expr) for argument in arguments):
            _refuse(f"{_shorten(ast.unparse(node))}, all constants", "Write its value.")
        return later(function)(*arguments)

    def _parse_each(self, node: ast.Call) -> Any:
        body = node.args[-1] if len(node.args) == 2 else None
        make_body = self._parse_lambda(body, "each()")
        over = self.parse_node(node.args[0])
        return each(over, make_body, **self._parse_keywords(node))

    def _parse_largest_of(self, node: ast.Call) -> Any:
        names = [keyword.arg for keyword in node.keywords]
        if len(node.args) != 1 or names != ["by"]:
            _refuse(f"{_shorten(ast.unparse(node))}, which is no largest_of(list, by=...)")
        make_rank = self._parse_lambda(node.keywords[0].value, "largest_of()")
        return largest_of(self.parse_node(node.args[0]), make_rank)

    def _parse_lambda(self, body: ast.expr | None, word: str) -> Callable[[Expr], Any]:
        """Return the function that the body of a loop writes, of the current element."""
        if not isinstance(body, ast.Lambda):
            _refuse(f"{word} without a lambda of one element")
        name = _parse_element_name(body.args, word)

        def make_body(element: Expr) -> Any:
            hidden = self._elements.get(name)
            self._elements[name] = element
            try:
                return self.parse_node(body.body)
            finally:
                del self._elements[name]
                if hidden is not None:
                    self._elements[name] = hidden

        return make_body


def _is_recorded(value: Any) -> bool:
    """Return whether an operator on a value records, where Python would compute on a constant."""
    return isinstance(value, (Expr, Layout))


def _parse_element_name(arguments: ast.arguments, word: str) -> str:
    """Return the name of the only argument of a lambda."""
    others = (
        arguments.posonlyargs,
        arguments.kwonlyargs,
        arguments.defaults,
        arguments.kw_defaults,
    )
    if arguments.vararg or arguments.kwarg or any(others) or len(arguments.args) != 1:
        _refuse(f"{word} without a lambda of one element")
    name = arguments.args[0].arg
    if name in ROOTS or name.startswith("_"):
        _refuse(f"an element of {word} called {name!r}")
    return name


def _parse_function_name(node: ast.Call) -> str:
    """Return the name of a function, the one argument of a call."""
    is_single = len(node.args) == 1 and not node.keywords
    if is_single and isinstance(node.args[0], ast.Constant):
        name = node.args[0].value
        if isinstance(name, str):
            return name
    remedy = 'Name it in quotes, as "package.module:function".'
    _refuse(f"{_shorten(ast.unparse(node))} without the name of a function", remedy)


def _check_template(arguments: Any) -> None:
    """Refuse a template with more in its braces than the short form of a number.

    `str.format` would pad without a bound, or read attributes.
    """
    template, *values = arguments
    if not values:
        return
    if not isinstance(template, str):
        _refuse("a template of tok that is not written out")
    try:
        replacements = list(Formatter().parse(template))
    except ValueError as error:
        raise SpecError("", "a template", f"{_shorten(template)}: {error}") from error
    for _, name, form, conversion in replacements:
        if name is None:  # the text behind the last braces
            continue
        is_short = name == "" and not conversion and _TEMPLATE_FORM.fullmatch(form or "")
        if not is_short:
            _refuse(f"{_shorten(template)}, in which braces hold more than a form such as :.4f")


_READERS: Mapping[type[ast.AST], Callable[[_Reader, Any], Any]] = {
    ast.Attribute: _Reader.parse_attribute,
    ast.BinOp: _Reader.parse_binary,
    ast.Call: _Reader.parse_call,
    ast.Compare: _Reader.parse_comparison,
    ast.Constant: _Reader.parse_constant,
    ast.Dict: _Reader.parse_dict,
    ast.List: _Reader.parse_list,
    ast.Name: _Reader.parse_name,
    ast.Subscript: _Reader.parse_subscript,
    ast.Tuple: _Reader.parse_tuple,
    ast.UnaryOp: _Reader.parse_unary,
}
"""The kinds of nodes that have a meaning, each with its reader."""
