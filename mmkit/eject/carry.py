"""Source of functions, classes and constants, copied with everything that they use.

What a file needs of mmkit itself is copied in the same way as the functions of a spec's own modules, so that both have
one source. Other packages are imported.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import symtable
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

from ..errors import SpecError
from ..expr import Expr
from ..fields import Field
from ..items import ItemType
from ..layout import Layout
from ..process import HF, Identity
from ..spec import Modality, ModelSpec
from ..updates import Anchor, Update
from .text import literal, statement

_ROOT = Path(__file__).parents[1]
_RUNTIME = "mmkit.eject.runtime"

_ORDER = (
    "mmkit.errors",
    "mmkit.expr",
    "mmkit.vocabulary",
    "mmkit.items",
    "mmkit.layout",
    "mmkit.fields",
    "mmkit.updates",
    "mmkit.plan",
    "mmkit.vllm_api.common",
    "mmkit.vllm_api.hashes",
    _RUNTIME,
)
"""Modules of mmkit, each after those that it needs."""

LOCAL = frozenset({"s", "self", "config", "proc", "item", "out", "tok", *"xyzuvw"})
"""Names of variables in the functions of an ejected file."""

_ELSEWHERE = {
    ("mmkit.expr", "Scope"): (_RUNTIME, "Scope"),
    ("mmkit.expr", "evaluate"): (_RUNTIME, "evaluate"),
    ("mmkit.expr", "Value"): ("typing", "Any"),
}
"""Names of mmkit that mean something simpler in an ejected file."""

_LEFT_OUT = {
    "ItemType": {"__post_init__", "bind"},
    "Tensor": {"__post_init__", "bind", "_bind_bound"},
    "Image": {"bind"},
    "Video": {"bind"},
    "Audio": {"bind"},
    "Field": {"__post_init__", "bind", "__repr__"},
}
"""Methods that serve declarations alone."""

_ADDED = {"Tensor": "_tensor_post_init", "Image": "_media_post_init", "Video": "_media_post_init"}
"""Functions of the runtime that become a `__post_init__`."""

_RENAMED = {"MmkitError": "ProcessorError", "Value": "Any"}

_REWORDED = (
    (
        "A spec that cannot work: found when it is declared, or when it is bound to a config and a tokenizer.",
        "A model that cannot work with its config, its tokenizer or its processor.",
    ),
    ("Base of every error that mmkit raises on purpose.", "Base of the errors of this file."),
    ("; make it with `batched`, `flat` or `shared`", ""),
    ("one size, expression or `between(least, most)`", "one size or `Between(least, most)`"),
    ("A dimension that may vary; see `between`.", "A dimension of any size from `least` to `most`, both included."),
    ("`between` may stand for one", "`Between` may stand for one"),
    (" A bound item type holds numbers only.", ""),
    (": the item type of new modalities.", "."),
    ("Read-only view of a Hugging Face tokenizer", "A Hugging Face tokenizer"),
)
"""What is said in other words."""


@dataclass(frozen=True)
class Module:
    """The source of a module.

    Attributes:
        name: dotted.
        text: its source.
        statements: top-level statements, by the name that each defines.
        imports: names that it imports, each from a module, and an attribute of that, or None.
    """

    name: str
    text: str
    statements: Mapping[str, tuple[ast.stmt, ...]]
    imports: Mapping[str, tuple[str, str | None]]

    @classmethod
    def of(cls, name: str, text: str, package: str) -> Module:
        """Read a module.

        Args:
            name: dotted.
            text: its source.
            package: to which its relative imports relate.
        """
        statements: dict[str, tuple[ast.stmt, ...]] = {}
        imports: dict[str, tuple[str, str | None]] = {}
        before: tuple[str, ...] = ()
        for node in _flat(ast.parse(text).body):
            names: tuple[str, ...] = ()
            match node:
                case ast.FunctionDef(name=own) | ast.AsyncFunctionDef(name=own) | ast.ClassDef(name=own):
                    names = (own,)
                case ast.Assign(targets):
                    names = tuple(n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
                case ast.AnnAssign(ast.Name(id=own)):
                    names = (own,)
                case ast.Import(aliases):
                    for alias in aliases:
                        whole = alias.name if alias.asname else alias.name.partition(".")[0]
                        imports[alias.asname or whole] = (whole, None)
                case ast.ImportFrom(origin, aliases, level):
                    above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                    source = ".".join([*above, *([origin] if origin else [])])
                    imports.update({alias.asname or alias.name: (source, alias.name) for alias in aliases})
                case ast.Expr(ast.Constant(value=str())) if before:  # what documents an assignment
                    for own in before:
                        statements[own] = (*statements[own], node)
            for own in names:
                statements[own] = (node,)
            before = names if isinstance(node, (ast.Assign, ast.AnnAssign)) else ()
        return cls(name, text, statements, imports)

    def source(self, name: str) -> tuple[int, str]:
        """The line of a name's statement, and its source, with the comments above it."""
        first, *rest = self.statements[name]
        lines = self.text.splitlines()
        begin = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", ()))])
        while begin > 1 and lines[begin - 2].startswith("#") and not lines[begin - 2].startswith("# --"):
            begin -= 1
        end = (rest or [first])[-1].end_lineno
        return begin, "\n".join(lines[begin - 1 : end])


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Top-level statements; imports for type checkers count as others do."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from node.body
        else:
            yield node


@cache
def _own(name: str) -> Module:
    """A module of mmkit. It is read, not imported."""
    path = _ROOT.joinpath(*name.split(".")[1:]).with_suffix(".py")
    return Module.of(name, path.read_text(), name.rpartition(".")[0])


@dataclass
class Carrier:
    """Collects what a file needs.

    Attributes:
        module: that of the spec.
        home: its top-level package: modules of that are copied, others are imported.
        features: what the model uses, for ``# only`` comments.
        where: names the spec in errors.
    """

    module: str
    home: str
    features: frozenset[str]
    where: str
    taken: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    texts: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    imported: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)
    lambdas: dict[Any, tuple[str, str]] = field(default_factory=dict)
    _read: dict[str, Module] = field(default_factory=dict)

    # -- what a spec refers to

    def reference(self, value: Any) -> str:
        """The source of a function, class or plain value, of which the file has what it needs.

        Raises:
            SpecError: it cannot be copied.
        """
        if (text := literal(value)) is not None:
            return text
        holder = getattr(value, "__self__", None)
        if isinstance(value, (types.MethodType, types.BuiltinMethodType)) and not isinstance(holder, types.ModuleType):
            return f"{self._holder(holder, value)}.{value.__name__}"
        name, module = str(getattr(value, "__qualname__", "")), str(getattr(value, "__module__", None) or "")
        if isinstance(value, types.LambdaType) and name.endswith("<lambda>"):
            return self._lambda(value)
        if not name or not module or "<locals>" in name:
            self._refuse(value, "a function of a module")
        if module == "builtins":
            return name
        if not self._copies(module):
            top, _, rest = name.partition(".")
            self._import(top, (module, top))
            return f"{top}.{rest}" if rest else top
        if name not in self._module(module).statements or getattr(sys.modules[module], name, None) is not value:
            self._refuse(value, f"a function that {module} defines")
        return self.need(module, name)

    def _holder(self, holder: Any, method: Any) -> str:
        """What a method is bound to: a constant of the module of the spec, or plain data."""
        for module in [m for m in list(sys.modules) if self._copies(m) and not m.startswith("mmkit.")]:
            for name, value in vars(sys.modules[module]).items():
                if value is holder and name in self._module(module).statements:
                    return self.need(module, name)
        return literal(holder) or str(self._refuse(method, "a function of a module"))

    def _lambda(self, function: types.FunctionType) -> str:
        """A lambda function as one with a name."""
        if function in self.lambdas:
            return self.lambdas[function][0]
        module, code = function.__module__, function.__code__
        if code.co_freevars:
            self._refuse(function, "a function without variables of another one")
        found = [
            node
            for node in ast.walk(ast.parse(self._module(module).text))
            if isinstance(node, ast.Lambda)
            and node.lineno == code.co_firstlineno
            and [a.arg for a in node.args.args] == list(code.co_varnames[: code.co_argcount])
        ]
        same = [
            node for node in found if compile(ast.Expression(node), "", "eval").co_consts[0].co_code == code.co_code
        ]
        if len({ast.dump(node) for node in same}) != 1:
            self._refuse(function, "a function with a name, or one lambda per line")
        head, body = ast.unparse(same[0].args), ast.unparse(same[0].body)
        self._resolve(self._module(module), ast.unparse(same[0]))
        name = f"function_{len(self.lambdas) + 1}"
        self._claim(name, (module, name))
        made = [f"def {name}({head}) -> Any:", *statement("return ", body, 4)]
        self.import_name("typing", "Any")
        self.lambdas[function] = name, "\n".join(made)
        return name

    def _refuse(self, value: Any, expected: str) -> Any:
        remedy = "Make it a plain function of a module."
        got = getattr(value, "__qualname__", None) or f"a {type(value).__module__}.{type(value).__qualname__}"
        raise SpecError(f"{self.where}, eject", expected, got, remedy)

    def runtime(self, name: str) -> str:
        """Copy a statement of the runtime."""
        return self.need(_RUNTIME, name)

    def import_module(self, name: str) -> None:
        """Import a module as a whole."""
        self._import(name, (name, None))

    def import_name(self, module: str, name: str) -> None:
        """Import a name."""
        self._import(name, (module, name))

    def claim(self, name: str) -> None:
        """Keep a name for the classes of the model."""
        self._claim(name, ("the ejected file", name))

    # -- statements

    def need(self, module: str, name: str) -> str:
        """Copy a statement with everything that it uses; returns its name in the file."""
        module, name = _ELSEWHERE.get((module, name), (module, name))
        if not self._copies(module):
            self._import(name, (module, name))
            return name
        if (module, name) in self.texts:
            return _RENAMED.get(name, name)
        self._claim(name, (module, name))
        if module not in self.modules:
            self.modules.append(module)
        read = self._module(module)
        line, text = read.source(name)
        text = self._trimmed(text)
        if module.startswith("mmkit."):
            if name in _LEFT_OUT:
                text = self._without(name, text)
            text = re.sub(r"  # (type: ignore|noqa)\S*", "", _reworded(text))
        else:
            self._check_value(module, name)
            self._check_imports(module, name, text)
        self.texts[module, name] = line, text
        self._resolve(read, text)
        return _RENAMED.get(name, name)

    def _resolve(self, read: Module, text: str) -> None:
        """Copy or import everything that a source text uses."""
        own = read.name.startswith("mmkit.")
        for used in sorted(_globals(text)):
            used = "MmkitError" if own and used == _RENAMED["MmkitError"] else used
            if used in read.imports:
                origin, name = read.imports[used]
                if origin.partition(".")[0] == "mmkit" and not own:
                    self._mmkit_name(read, used, name)
                elif name is not None and self._copies(origin):
                    if origin in sys.modules and isinstance(getattr(sys.modules[origin], name, None), types.ModuleType):
                        remedy = f"Import what it uses from {origin}.{name}."
                        expected, got = f"{used} to be imported by name", f"module {origin}.{name}"
                        raise SpecError(f"{self.where}, eject", expected, got, remedy)
                    if name != used:
                        expected, remedy = f"{name} under its own name", "Import it without another."
                        raise SpecError(f"{self.where}, eject", expected, f"{name} as {used}", remedy)
                    self.need(self._origin(origin, name), name)
                else:
                    self._import(used, (origin, name))
            elif used in read.statements:
                self.need(read.name, used)
            elif own and used in _own(_RUNTIME).statements:  # of a method that the runtime adds
                self.runtime(used)
            elif not hasattr(builtins, used) and used not in ("__name__", "__file__"):
                expected, remedy = f"{used} of {read.name} to be an import or a definition", "Write it as one."
                raise SpecError(f"{self.where}, eject", expected, "neither", remedy)

    def _origin(self, module: str, name: str) -> str:
        """The module that defines what a package imports again."""
        read = self._module(module)
        while name not in read.statements and name in read.imports:
            read = self._module(read.imports[name][0])
        return read.name

    def _mmkit_name(self, read: Module, used: str, name: str | None) -> None:
        known = {"Scope": (_RUNTIME, "Scope"), "InputError": ("mmkit.errors", "InputError")}
        if name not in known or used != name:
            expected = "functions that use nothing of mmkit but Scope and InputError"
            remedy = "Say it in the declaration instead."
            raise SpecError(f"{self.where}, eject", expected, f"{used} in {read.name}", remedy)
        self.need(*known[name])

    def _check_value(self, module: str, name: str) -> None:
        value = getattr(sys.modules[module], name, None)
        kinds = (Expr, Layout, Field, ItemType, Update, Anchor, HF, Identity, Modality, ModelSpec)
        if isinstance(value, kinds):
            expected = "functions that use plain values alone"
            raise SpecError(
                f"{self.where}, eject", expected, f"{name}, which is {value!r:.60}", "Write it as a function."
            )

    def _check_imports(self, module: str, name: str, text: str) -> None:
        for node in ast.walk(ast.parse(text)):
            origins = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                origins = ["." * node.level + (node.module or "")]
            for origin in origins:
                if origin.startswith(".") or origin.partition(".")[0] in ("mmkit", self.home):
                    where, expected = f"{self.where}, eject", "imports of the project above its functions"
                    raise SpecError(
                        where, expected, f"one of {origin} in {name}", "Import it at the top of its module."
                    )

    def _trimmed(self, text: str) -> str:
        """A statement without what the model does not use."""
        lines = text.splitlines()
        drop: set[int] = set()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.stmt):
                continue
            begin = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            above = lines[begin - 2].strip() if begin > 1 else ""
            if above.startswith("# only "):
                if not self.features & set(re.split(" or ", above.removeprefix("# only "))):
                    drop |= set(range(begin, (node.end_lineno or begin) + 1))
                drop.add(begin - 1)
        kept = [line for number, line in enumerate(lines, start=1) if number not in drop]
        return re.sub(r"\n(\n\n+)(?= |$)", "\n\n", "\n".join(kept)).rstrip()

    def _without(self, name: str, text: str) -> str:
        """A class without the methods that serve declarations."""
        lines = text.splitlines()
        (node,) = ast.parse(text).body
        assert isinstance(node, ast.ClassDef)
        drop: set[int] = set()
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and member.name in _LEFT_OUT[name]:
                begin = min([member.lineno, *(d.lineno for d in member.decorator_list)])
                drop |= set(range(begin - 1, (member.end_lineno or begin) + 1))
        made = "\n".join(line for number, line in enumerate(lines, start=1) if number not in drop)
        if name in _ADDED:
            _, added = _own(_RUNTIME).source(_ADDED[name])
            tree = ast.parse(added).body[0]
            assert isinstance(tree, ast.FunctionDef)
            body = "\n".join(added.splitlines()[tree.body[1].lineno - 1 :])
            made += "\n\n" + indent(f"def __post_init__(self) -> None:\n{body}", "    ")
        return made

    # -- modules

    def _copies(self, module: str) -> bool:
        if module.partition(".")[0] == "mmkit":
            return module in _ORDER or module == "mmkit"
        return module.partition(".")[0] == self.home

    def _module(self, name: str) -> Module:
        if name.startswith("mmkit."):
            return _own(name)
        if name not in self._read:
            found = sys.modules.get(name)
            try:
                text = inspect.getsource(found) if found is not None else ""
            except (OSError, TypeError) as error:
                remedy = "Declare the spec in a file."
                raise SpecError(f"{self.where}, eject", f"the source of {name}", "none", remedy) from error
            package = getattr(found, "__package__", None) or ""
            self._read[name] = Module.of(name, text, package)
        return self._read[name]

    def _claim(self, name: str, origin: tuple[str, str | None]) -> None:
        known = self.taken.setdefault(_RENAMED.get(name, name), origin)
        if name in LOCAL and self._copies(origin[0]) and not origin[0].startswith("mmkit."):
            known = ("the ejected file", name)
        if known != origin:
            expected = f"one thing named {name}"
            got = " and ".join(f"{o[0]}.{o[1]}" if o[1] else o[0] for o in (known, origin))
            raise SpecError(f"{self.where}, eject", expected, got, "Rename the one of your module.")

    def _import(self, name: str, origin: tuple[str, str | None]) -> None:
        self._claim(name, origin)
        self.imported[name] = origin

    # -- the file

    def sections(self) -> Iterator[tuple[str, list[str]]]:
        """The copied statements by module, those of mmkit first, in their order."""
        own = [m for m in _ORDER if m in self.modules]
        for module in [*own, *_sorted([m for m in self.modules if m not in own], self._module)]:
            seen = sorted({value for (m, _), value in self.texts.items() if m == module})
            yield module, [text for _, text in seen]
        if self.lambdas:
            yield self.module, [text for _, text in self.lambdas.values()]

    def imports(self) -> str:
        """The import statements of the file."""
        groups: dict[bool, dict[str, set[str]]] = {True: {}, False: {}}
        plain: dict[bool, list[str]] = {True: [], False: []}
        for used, (module, name) in self.imported.items():
            standard = module.partition(".")[0] in sys.stdlib_module_names
            if name is None:
                plain[standard].append(f"import {module}" + (f" as {used}" if used != module else ""))
            else:
                entry = name if name == used else f"{name} as {used}"
                groups[standard].setdefault(module, set()).add(entry)
        blocks = ["from __future__ import annotations"]
        for standard in (True, False):
            lines = sorted(plain[standard])
            for module, names in sorted(groups[standard].items()):
                line = f"from {module} import {', '.join(sorted(names, key=_case))}"
                if len(line) > 120:
                    inner = "".join(f"    {name},\n" for name in sorted(names, key=_case))
                    line = f"from {module} import (\n{inner})"
                lines.append(line)
            if lines:
                blocks.append("\n".join(lines))
        return "\n\n".join(blocks)


def _case(name: str) -> tuple[int, str]:
    """isort's order: constants, classes, the rest."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def _sorted(modules: list[str], read: Callable[[str], Module]) -> list[str]:
    """Modules, each after those that it imports from."""
    made: list[str] = []

    def visit(module: str) -> None:
        if module in modules and module not in made:
            for origin, _ in read(module).imports.values():
                if origin != module:
                    visit(origin)
            if module not in made:
                made.append(module)

    for module in modules:
        visit(module)
    return made


def _reworded(text: str) -> str:
    for old, new in _REWORDED:
        text = text.replace(old, new)
    for old, new in _RENAMED.items():
        text = re.sub(rf"\b{old}\b", new, text)
    return text


def _globals(text: str) -> set[str]:
    """The names that a source text takes from its module."""
    found: set[str] = set()

    def visit(table: symtable.SymbolTable, top: bool) -> None:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (top or symbol.is_global()):
                found.add(symbol.get_name())
        for child in table.get_children():
            visit(child, False)

    tree = symtable.symtable(dedent(text), "<carried>", "exec")
    visit(tree, True)
    defined = {s.get_name() for s in tree.get_symbols() if s.is_assigned() or s.is_namespace()}
    return found - defined
