"""Source text: literals, and expressions of at most 120 columns."""

from __future__ import annotations

import ast
import io
import json
import tokenize
from collections.abc import Iterator
from typing import Any

WIDTH = 120


def literal(value: Any) -> str | None:
    """The source of plain data; None for anything else."""
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        return text if ast.literal_eval(text) == value else repr(value)
    if type(value) in (int, float):
        return repr(value) if value == value and abs(value) != float("inf") else f'float("{value}")'
    if type(value) in (bytes, complex):
        return repr(value)
    if type(value) is dict:
        pairs = [(literal(k), literal(v)) for k, v in value.items()]
        return None if any(None in pair for pair in pairs) else "{" + ", ".join(f"{k}: {v}" for k, v in pairs) + "}"
    if type(value) in (list, tuple):
        parts = [literal(v) for v in value]
        if any(part is None for part in parts):
            return None
        return listed([part for part in parts if part is not None], type(value) is list)
    return None


def listed(parts: list[str], square: bool = False) -> str:
    """The source of a list or a tuple."""
    if square:
        return f"[{', '.join(parts)}]"
    return f"({', '.join(parts)}{',' * (len(parts) == 1)})"


def statement(head: str, expression: str, indent: int, tail: str = "") -> list[str]:
    """The lines of ``head expression tail``, in as many lines as it takes."""
    made = pretty(expression, indent, len(head) + len(tail))
    made[0] = f"{' ' * indent}{head}{made[0]}"
    made[-1] += tail
    return made


def pretty(source: str, indent: int, taken: int = 0) -> list[str]:
    """An expression in lines; all but the first are indented."""
    node = ast.parse(source, mode="eval").body
    return _lines(node, indent, taken)


def _lines(node: ast.expr, indent: int, taken: int) -> list[str]:
    text = _text(node)
    if indent + taken + len(text) <= WIDTH or "\n" in text:
        return [text]
    pad = " " * indent
    match node:
        case ast.Call(func, args, keywords):
            parts = [(f"{k.arg}=" if k.arg else "**", k.value) for k in keywords]
            entries = [("", arg) for arg in args] + parts
            return _bracketed(f"{_text(func)}(", entries, ")", indent)
        case ast.Tuple(elts) | ast.List(elts):
            opening, closing = "()" if isinstance(node, ast.Tuple) else "[]"
            return _bracketed(opening, [("", e) for e in elts], closing, indent)
        case ast.Dict(keys, values):
            pairs = [(f"{_text(k)}: ", v) for k, v in zip(keys, values, strict=True) if k is not None]
            return _bracketed("{", pairs, "}", indent)
        case ast.Lambda(arguments, body):
            head = f"lambda {ast.unparse(arguments)}: "
            inner = _lines(body, indent, taken + len(head))
            return [head + inner[0], *inner[1:]]
        case ast.IfExp(test, then, other):
            pieces = [("", then), ("if ", test), ("else ", other)]
        case ast.BinOp():
            pieces = list(_chain(node))
        case _:
            return [text]
    made = ["("]
    for head, part in pieces:
        loose = _binds(part) <= _binds(node)
        lines = _lines(part, indent + 4, len(head) + 2 * loose)
        if loose and len(lines) == 1:
            lines[0] = f"({lines[0]})"
        made.append(f"{pad}    {head}{lines[0]}")
        made += lines[1:]
    return [*made, f"{pad})"]


def _binds(node: ast.expr) -> int:
    """How tightly an expression binds."""
    match node:
        case ast.BinOp(op=op):
            return 6 if isinstance(op, ast.Pow) else 5 if isinstance(op, _LEVELS[1]) else 4
        case ast.Compare() | ast.BoolOp():
            return 3
        case ast.UnaryOp():
            return 5
    return 1 if isinstance(node, (ast.IfExp, ast.Lambda)) else 9


def _bracketed(opening: str, entries: list[tuple[str, ast.expr]], closing: str, indent: int) -> list[str]:
    made = [opening]
    for head, part in entries:
        lines = _lines(part, indent + 4, len(head) + 1)
        made.append(f"{' ' * (indent + 4)}{head}{lines[0]}")
        made += lines[1:]
        made[-1] += ","
    return [*made, f"{' ' * indent}{closing}"]


_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**"}
_LEVELS = ((ast.Add, ast.Sub), (ast.Mult, ast.Div, ast.FloorDiv, ast.Mod))


def _chain(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """The operands of a row of operators of one precedence, each with the operator before it."""
    assert isinstance(node, ast.BinOp)
    level = next((level for level in _LEVELS if isinstance(node.op, level)), ())
    if isinstance(node.left, ast.BinOp) and isinstance(node.left.op, level or ()):
        yield from _chain(node.left)
    else:
        yield "", node.left
    yield f"{_SIGNS[type(node.op)]} ", node.right


def _text(node: ast.expr) -> str:
    """An expression in one line, with the quotes of this project."""
    text = ast.unparse(node)
    made, line = "", text.splitlines()[0] if "\n" in text else text
    if line is not text:
        return text
    end = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING and token.string[0] == "'":
            made += text[end : token.start[1]] + (literal(ast.literal_eval(token.string)) or token.string)
            end = token.end[1]
    return made + text[end:]
