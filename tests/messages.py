"""Tables of messages: where a module builds one, and whether a row of a table reaches it."""

import ast
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from mmkit import MmkitError, errors

Row = tuple[str, Callable[[], object], type, str]
"""Name, what raises or returns the message, the type of the error (or str), the text."""

Lines = set[tuple[str, int]]

_ASKED = frozenset({"_refuse", "Finding"})
"""Functions that build a message of what they are told, so that each call of them is one."""


def said(call: Callable[[], object], kind: type) -> str:
    """The message of a row."""
    if kind is str:
        return str(call())
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


def sites(module: ModuleType) -> list[tuple[int, int]]:
    """Lines of every message that a module builds: calls of `sentence`, errors of mmkit, errors raised with a text of
    their own, and texts in the style that are written out."""
    tree = ast.parse(inspect.getsource(module))
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = {_lines(node) for node in ast.walk(tree) if id(node) not in documented and _is_message(module, node)}
    return sorted(one for one in found if not any(one != o and o[0] <= one[0] and one[1] <= o[1] for o in found))


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


def _lines(node: Any) -> tuple[int, int]:
    return node.lineno, node.end_lineno or node.lineno


def reached(table: Iterable[Row]) -> Lines:
    """Lines that the rows of a table pass while they build a message, or raise an error."""
    lines: Lines = set()
    sentence, made = errors.sentence, MmkitError.__init__

    def stack() -> None:
        frame = sys._getframe(2)
        while frame is not None:
            lines.add((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back

    def recorded(*args: str) -> str:
        stack()
        return sentence(*args)

    def recorded_error(self: MmkitError, *args: str, **kwargs: str) -> None:
        stack()
        made(self, *args, **kwargs)

    using = [m for m in list(sys.modules.values()) if getattr(m, "sentence", None) is sentence]
    patches = [patch.object(m, "sentence", recorded) for m in using] + [
        patch.object(MmkitError, "__init__", recorded_error)
    ]
    for one in patches:
        one.start()
    try:
        for _, call, kind, _ in table:
            try:
                call()
            except BaseException as error:
                if not isinstance(error, kind):
                    raise
                cause: BaseException | None = error
                while cause is not None:
                    lines |= {(f.filename, f.lineno) for f in traceback.extract_tb(cause.__traceback__)}
                    cause = cause.__cause__
    finally:
        for one in patches:
            one.stop()
    return lines


def missed(modules: Iterable[ModuleType], lines: Lines) -> list[str]:
    """The messages of some modules that are not reached."""
    return [
        f"{module.__name__}:{first}"
        for module in modules
        for first, last in sites(module)
        if not any(name == module.__file__ and first <= line <= last for name, line in lines)
    ]
