"""The functions of a spec, by name: ``package.module:function``.

A document holds names only. Whoever reads it passes the functions, or says that mmkit may import
them, which runs the code of their modules.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError, describe_error
from ..language.expr import unwrap_later

Functions = Mapping[str, Callable[..., Any]]
"""Functions by the names that a document has for them."""

FUNCTION_NAME = r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*"
"""The form of a name, as a regular expression."""


class FunctionReader:
    """Returns the functions that a document names.

    Args:
        functions: those that the reader passes.
        import_functions: whether others are imported.
    """

    def __init__(self, functions: Functions | None = None, *, import_functions: bool = False):
        self._functions: Functions = {} if functions is None else functions
        self._imports = import_functions

    def __call__(self, name: str) -> Any:
        """Return the function of a name.

        Raises:
            SpecError: the reader does not pass it and allows no import, or there is none.
        """
        if not re.fullmatch(FUNCTION_NAME, name):
            raise SpecError("", "a function as package.module:function", repr(name))
        if name in self._functions:
            return unwrap_later(self._functions[name])
        if not self._imports:
            remedy = (
                "Pass it in functions=, or say import_functions=True if you trust the code of "
                "its module."
            )
            raise SpecError("", "functions that the reader passes", repr(name), remedy)
        try:
            function = import_function(name)
        except Exception as error:
            got = f"{name}, which cannot be imported: {describe_error(error)}"
            raise SpecError("", "a function", got) from error
        if not callable(function):
            raise SpecError("", "a function", f"{name}, a {type(function).__name__}")
        return function


@dataclass(frozen=True)
class FunctionStub:
    """Stands for a function of a document that is looked at without its code.

    Attributes:
        name: the function's.
    """

    name: str

    def __call__(self, *arguments: Any) -> Any:
        """Refuse to be called."""
        remedy = "Read the document with the functions that it names."
        raise SpecError(self.name, "a function that is passed or imported", "its name", remedy)

    def __repr__(self) -> str:
        return self.name


class FunctionStubs(dict[str, Callable[..., Any]]):
    """Functions of any names, which cannot be called: to look at a document without its code.

    It has those that were asked for.
    """

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str)

    def __missing__(self, name: str) -> FunctionStub:
        stub = FunctionStub(name)
        self[name] = stub
        return stub


class FunctionWriter:
    """Returns the names of functions, and remembers which it has returned.

    Args:
        functions: names that go before those by which functions are imported.

    Attributes:
        functions: the functions whose names were asked for.
    """

    def __init__(self, functions: Functions | None = None):
        self._names: list[tuple[Any, str]] = []
        for name, function in (functions or {}).items():
            self._names.append((unwrap_later(function), name))
        self.functions: dict[str, Callable[..., Any]] = {}

    def __call__(self, function: Any) -> str:
        """Return the name of a function.

        Raises:
            SpecError: no other process can import it by a name, and it is not among `functions`.
        """
        name = self._find_name(function)
        self.functions[name] = function
        return name

    def _find_name(self, function: Any) -> str:
        if isinstance(function, FunctionStub):
            return function.name
        for named, name in self._names:
            if named is function:
                return name
        module = getattr(function, "__module__", None) or ""
        qualified = getattr(function, "__qualname__", type(function).__name__)
        name = f"{module}:{qualified}"
        remedy = "Define it with def in a module, or pass it in functions=."
        if module == "__main__" or not re.fullmatch(FUNCTION_NAME, name):
            got = f"{qualified!r}, which no other process can import"
            raise SpecError("", "functions of modules", got, remedy)
        try:
            importable = import_function(name)
        except Exception:
            importable = None
        if importable is not function:
            got = f"{qualified!r}, and something else under {name!r}"
            raise SpecError("", "functions of modules", got, remedy)
        return name


def import_function(name: str) -> Any:
    """Return what ``package.module:function`` names; of a function in `later`, that function.

    Raises:
        ImportError: there is no such module.
        AttributeError: the module has no such attribute.
    """
    module, _, path = name.partition(":")
    value: Any = importlib.import_module(module)
    for attribute in path.split("."):
        value = getattr(value, attribute)
    return unwrap_later(value)
