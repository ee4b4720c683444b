"""Tables of messages: where a module builds one, and whether a row of a table reaches it."""

import ast
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType, ModuleType
from typing import Any

import pytest

from mmkit import MmkitError

Row = tuple[str, Callable[[], object], type, str]
"""Name, what raises or returns the message, the type of the error (or what it is part of), the text."""

_ASKED = frozenset({"_refuse", "Finding"})
"""Functions that build a message of what they are told, so that each call of them is one."""


def said(call: Callable[[], object], kind: type) -> str:
    """The message of a row."""
    if not issubclass(kind, BaseException):
        return str(call())
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


def check_style(text: str) -> None:
    """A whole sentence, nothing doubled."""
    assert text.endswith((".", "..."))
    assert not re.search(r"(?<!\.)\.\.(?!\.|[0-9a-z])", text), "two full stops"
    assert "  " not in text


def sites(module: ModuleType) -> list[tuple[int, int, str]]:
    """First and last line of every message that a module builds: calls of `sentence`, errors of mmkit, errors raised
    with a text of their own, and texts in the style that are written out, which come third."""
    tree = ast.parse(inspect.getsource(module))
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    documented = {id(text) for text in texts if isinstance(text, ast.Constant)}
    found: dict[tuple[int, int], str] = {}
    for node in ast.walk(tree):
        if id(node) not in documented and _is_message(module, node):
            lines = node.lineno, node.end_lineno  # type: ignore[attr-defined]
            found[lines] = found.get(lines, "") or str(getattr(node, "value", ""))
    inner = {one for one in found for other in found if one != other and other[0] <= one[0] and one[1] <= other[1]}
    return sorted((*lines, text) for lines, text in found.items() if lines not in inner)


def _is_message(module: ModuleType, node: ast.AST) -> bool:
    match node:
        case ast.Raise(exc=ast.Call(func=ast.Name(id=name))):
            # else a signal between functions of the module, or a function that builds a message of its own
            return not name.startswith("_")
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in _ASKED:
            return any(isinstance(part, (ast.Constant, ast.JoinedStr)) for part in node.args)  # else it is handed on
        case ast.Call(func=ast.Name(id=name)):
            kind = getattr(module, name, None)
            return name == "sentence" or (isinstance(kind, type) and issubclass(kind, MmkitError))
        case ast.Constant(value=str(text)):
            return ": expected " in text
    return False


def missed(modules: Iterable[ModuleType], table: Iterable[Row]) -> list[str]:
    """The messages of some modules that no row of a table reaches."""
    lines = _executed({str(module.__file__) for module in modules}, table)
    texts = [text for *_, text in table]
    return [
        f"{module.__name__}:{first}"
        for module in modules
        for first, last, constant in sites(module)
        if not any((module.__file__, line) in lines for line in range(first, last + 1))
        and not any(constant and constant in text for text in texts)
    ]


def _executed(files: set[str], table: Iterable[Row]) -> set[tuple[str, int]]:
    """The lines of some files that the rows of a table pass."""
    lines: set[tuple[str, int]] = set()

    def line(frame: FrameType, event: str, argument: object) -> Any:
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    def enter(frame: FrameType, event: str, argument: object) -> Any:
        return line if frame.f_code.co_filename in files else None

    before = sys.gettrace(), threading.gettrace()
    sys.settrace(enter)
    threading.settrace(enter)
    try:
        for _, call, kind, _ in table:
            said(call, kind)
    finally:
        sys.settrace(before[0])
        threading.settrace(before[1])  # type: ignore[arg-type]
    return lines
