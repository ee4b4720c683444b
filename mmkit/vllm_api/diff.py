"""What changed in vLLM's multimodal base classes between two versions, and what of it concerns mmkit.

    python -m mmkit.vllm_api.diff A B [--json]        A, B: "installed", or a folder that holds vllm/, as in its wheel

Both are read, neither is imported. Classes are followed by name where they move to another module. Exits as diff does:
with 0 if nothing changed, with 1 if something did.

This file needs nothing but the standard library and runs as a script as well, ``python mmkit/vllm_api/diff.py A B``,
where no vLLM is installed or one that mmkit refuses, for which ``-m`` is no way: the package would be imported first.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

HOMES = (
    "vllm/multimodal/**/*.py",
    "vllm/inputs/**/*.py",
    "vllm/renderers/**/*.py",
    "vllm/model_executor/models/interfaces.py",
)
"""Where the surface is defined; a class that is not there any more is sought in all of vLLM."""

SURFACE = (
    "BaseMultiModalProcessor",
    "EncDecMultiModalProcessor",
    "BaseProcessingInfo",
    "BaseDummyInputsBuilder",
    "InputProcessingContext",
    "ProcessorInputs",
    "TimingContext",
    "TokenizeParams",
    "MultiModal*Parser",
    "MultiModal*Field",
    "MultiModalFieldConfig",
    "MultiModalFieldElem",
    "MultiModalKwargs*",
    "MultiModal*Cache",
    "MultiModalFeatureSpec",
    "MultiModalHasher",
    "MultiModalRegistry",
    "*Items",
    "Prompt*",
    "Resolved*Update",
    "Placeholder*",
    "Supports*MultiModal*",
)
"""Names of the classes that are compared, beside all that mmkit imports."""

OWN = (*sorted(Path(__file__).parent.glob("*.py")), Path(__file__).parents[1] / "model.py")
"""Everything in mmkit that touches vLLM."""


# -- what a version has ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function, or field of a class."""

    text: str
    default: str | None = None
    type: str = ""

    @property
    def call(self) -> tuple[str, bool]:
        """What a caller has to know."""
        return self.text, self.default is None

    def __str__(self) -> str:
        typed = f": {self.type}" if self.type else ""
        return f"{self.text}{typed}" if self.default is None else f"{self.text}{typed}={self.default}"


@dataclass(frozen=True)
class Member:
    """A member of a class, or a function."""

    kind: str
    parameters: tuple[Parameter, ...] = ()
    returns: str = ""
    default: str = ""

    @property
    def untyped(self) -> Member:
        """The same, without types."""
        return replace(self, parameters=tuple(replace(p, type="") for p in self.parameters), returns="")

    def beside(self, other: Member) -> Member:
        """The same, shortened if it is long: what the other has, too, is left out."""
        kept = [p for p in self.parameters if p not in other.parameters]
        long = len(str(self)) > 100 and kept != [*self.parameters]
        return replace(self, parameters=(Parameter("..."), *kept)) if long else self

    def __str__(self) -> str:
        if self.kind.endswith(("attribute", "property")):
            return self.kind + f" = {self.default}" * bool(self.default)
        signature = f"({', '.join(map(str, self.parameters))})" + f" -> {self.returns}" * bool(self.returns)
        return signature if self.kind in ("method", "function") else f"{self.kind} {signature}"


@dataclass(frozen=True)
class Definition:
    """A class, a function or another name that a module defines."""

    name: str
    module: str
    bases: tuple[str, ...] = ()
    members: dict[str, Member] = field(default_factory=dict)


Members = dict[str, tuple[Member, str]]
"""Members of a class by name, each with the class that defines it."""


class Tree:
    """The sources of one vLLM.

    Args:
        place: "installed", or a folder that holds ``vllm/``.
    """

    def __init__(self, place: str) -> None:
        if place == "installed":
            spec = find_spec("vllm")
            if spec is None or spec.origin is None:
                raise FileNotFoundError("installed: expected vLLM, got none. Give the folder that holds vllm/.")
            self.root = Path(spec.origin).parents[1]
        else:
            self.root = Path(place)
        if not (self.root / "vllm").is_dir():
            raise FileNotFoundError(f"{self.root}: expected a folder that holds vllm/, got none.")

    @cached_property
    def version(self) -> str:
        """As its wheel states it; the name of the folder where it does not."""
        path = self.root / "vllm" / "_version.py"
        stated = re.search(r"^(?:__version__ = )?version = ['\"](.+?)['\"]", _text(path), re.MULTILINE)
        return stated[1] if stated else self.root.name

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        """What the homes of the surface define, by name."""
        paths = [path for home in HOMES for path in sorted(self.root.glob(home))]
        return {made.name: made for path in paths for made in self._defined(path)}

    @cached_property
    def _paths(self) -> list[Path]:
        return sorted((self.root / "vllm").rglob("*.py"))

    def _defined(self, path: Path) -> Iterator[Definition]:
        parts = path.relative_to(self.root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for node in _flat(_parsed(path).body):
            match node:
                case ast.ClassDef():
                    yield _class(node, module)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    yield Definition(node.name, module, (), {"": _function(node, "function")})
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    yield Definition(name, module)

    def find(self, name: str) -> Definition | None:
        """What defines a name, in the homes or wherever it is."""
        if name in self.definitions:
            return self.definitions[name]
        defines = re.compile(rf"^(?:class|def|async def) {name}\b|^{name}\s*[:=]", re.MULTILINE)
        found = (path for path in self._paths if defines.search(_text(path)))
        return next((made for path in found for made in self._defined(path) if made.name == name), None)

    def members(self, name: str) -> Members:
        """The members of a class, those of its bases included."""
        made = self.find(name)
        if made is None:
            return {}
        inherited: Members = {}
        for base in reversed(made.bases):
            if base != name and base in self.definitions:
                inherited |= self.members(base)
        own = {key: (member, name) for key, member in made.members.items()}
        if "__init__" in own and "__init__" in inherited and own["__init__"][0].kind == "fields":
            before = [p for p in inherited["__init__"][0].parameters if p not in own["__init__"][0].parameters]
            member = own["__init__"][0]
            own["__init__"] = replace(member, parameters=(*before, *member.parameters)), name
        return inherited | own

    def has(self, module: str, name: str) -> bool:
        """Whether ``from module import name`` works, as far as reading tells."""
        base = self.root.joinpath(*module.split("."))
        path = next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)
        if path is None:
            return False
        if (base / f"{name}.py").is_file() or (base / name).is_dir():
            return True
        lazy = False
        for node in _flat(_parsed(path).body):
            match node:
                case ast.ImportFrom(names=names) | ast.Import(names=names):
                    if any((alias.asname or alias.name) == name for alias in names):
                        return True
                case ast.FunctionDef(name="__getattr__"):
                    lazy = True
        return any(made.name == name for made in self._defined(path)) or (lazy and f'"{name}"' in _text(path))


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(_text(path))


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, those under conditions included."""
    for node in body:
        match node:
            case ast.If(body=body, orelse=other):
                yield from _flat([*body, *other])
            case ast.Try(body=body, handlers=handlers, orelse=other):
                yield from _flat([*body, *other, *(statement for h in handlers for statement in h.body)])
            case _:
                yield node


def _name(node: ast.expr) -> str:
    """The last part of what an expression names: `Generic` of ``typing.Generic[T]``."""
    match node:
        case ast.Subscript(value=value) | ast.Call(func=value):
            return _name(value)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def _class(node: ast.ClassDef, module: str) -> Definition:
    bases = tuple(_name(base) for base in node.bases)
    decorators = {_name(decorator) for decorator in node.decorator_list}
    has_fields = "dataclass" in decorators or bool({"NamedTuple", "TypedDict"} & {*bases})
    members: dict[str, Member] = {}
    fields: list[Parameter] = []
    for statement in _flat(node.body):
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if not name.startswith("__") or name == "__init__":
                    members[name] = _function(statement)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                default = _source(value) or None
                if has_fields and _name(annotation) != "ClassVar":
                    fields.append(Parameter(name, default, _type(annotation)))
                else:
                    members[name] = Member("attribute", default=default or "")
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                members[name] = Member("attribute", default=_source(value))
    if has_fields and "__init__" not in members:
        members["__init__"] = Member("fields", tuple(fields))
    return Definition(node.name, module, bases, members)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, kind: str = "method") -> Member:
    decorators = [_name(decorator) for decorator in node.decorator_list]
    kind = next((d for d in decorators if d in ("classmethod", "staticmethod")), kind)
    if any(d.endswith("property") or d == "setter" for d in decorators):
        kind = "property"
    if "abstractmethod" in decorators:
        kind = f"abstract {kind}"
    a = node.args
    positional = [*a.posonlyargs, *a.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(a.defaults)) + list(a.defaults)
    made = [_parameter(arg, value) for arg, value in zip(positional, defaults, strict=True)]
    if a.posonlyargs:
        made.insert(len(a.posonlyargs), Parameter("/"))
    if a.vararg or a.kwonlyargs:
        made.append(_parameter(a.vararg, None, "*") if a.vararg else Parameter("*"))
    made += [_parameter(arg, value) for arg, value in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    if a.kwarg:
        made.append(_parameter(a.kwarg, None, "**"))
    if made and made[0].text in ("self", "cls"):
        made = made[1:]
    return Member(kind, tuple(made), _type(node.returns))


def _parameter(arg: ast.arg, default: ast.expr | None, stars: str = "") -> Parameter:
    return Parameter(stars + arg.arg, _source(default) or None, _type(arg.annotation))


def _source(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def _type(node: ast.expr | None) -> str:
    return _source(node).replace("'", "")  # with or without quotes


# -- what mmkit uses ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Uses:
    """What mmkit has to do with vLLM, by its sources.

    Attributes:
        overrides: methods and attributes that its classes define.
        mentions: names of attributes that it reads or calls.
        imports: (module, name) pairs, also those that it tries one after the other.
    """

    overrides: frozenset[str]
    mentions: frozenset[str]
    imports: frozenset[tuple[str, str]]

    @cached_property
    def names(self) -> frozenset[str]:
        """Imported names."""
        return frozenset(name for _, name in self.imports)

    def concern(self, owner: str, member: str) -> str:
        """``overrides``, ``uses`` or nothing."""
        if member in self.overrides and member != "__init__":
            return "overrides"
        used = owner in self.names if member in ("", "__init__") else member in self.mentions
        return "uses" if used else ""


def uses(sources: Iterable[Path] = OWN) -> Uses:
    """Read what mmkit overrides, mentions and imports."""
    overrides, mentions, imports = set[str](), set[str](), set[tuple[str, str]]()
    for path in sources:
        for node in ast.walk(_parsed(path)) if path.name != Path(__file__).name else ():
            match node:
                case ast.ClassDef(name=name):
                    overrides |= {*_class(node, "").members}
                case ast.Attribute(attr=name):
                    mentions.add(name)
                case ast.ImportFrom(module=str(module), names=names, level=0) if module.split(".")[0] == "vllm":
                    imports |= {(module, alias.name) for alias in names}
                case ast.Constant(value=str(text)) if place := re.fullmatch(r"([a-z_][\w.]*):(\w+)", text):
                    imports.add((f"vllm.{place[1]}", place[2]))  # tried where vLLM moved it
    return Uses(frozenset(overrides), frozenset(mentions), frozenset(imports))


# -- the comparison ----------------------------------------------------------------------------------------------------


What = Literal["removed", "added", "moved", "kind", "signature", "default", "types"]


@dataclass(frozen=True)
class Change:
    """One difference.

    Attributes:
        what: what happened to it.
        where: a class, a function, or a member of a class.
        before: as it was; empty if it was not.
        after: as it is; empty if it is not.
        mmkit: whether mmkit ``overrides`` or ``uses`` it; else empty.
    """

    what: What
    where: str
    before: str
    after: str
    mmkit: str = ""


def compare(old: Tree, new: Tree, used: Uses | None = None) -> list[Change]:
    """All differences, those that concern mmkit first."""
    used = uses() if used is None else used
    named = {name for tree in (old, new) for name in tree.definitions if any(fnmatchcase(name, p) for p in SURFACE)}
    changes = [
        change for name in sorted(named | used.names) for change in _changes(old, new, name, used, name in named)
    ]
    return sorted(changes, key=lambda change: (not change.mmkit, change.where.split(".")[0]))


def _changes(old: Tree, new: Tree, name: str, used: Uses, on_surface: bool) -> Iterator[Change]:
    one, other = old.find(name), new.find(name)
    concern = used.concern(name, "")
    if one is None or other is None:
        if one is not None:
            yield Change("removed", name, one.module, "", concern)
        if other is not None:
            yield Change("added", name, "", other.module)
        return
    if one.module != other.module:
        broken = any(n == name and old.has(m, n) and not new.has(m, n) for m, n in used.imports)
        yield Change("moved", name, one.module, other.module, "uses" if broken else "")
    if not on_surface and "" not in one.members:
        return  # mmkit imports it, but it is no part of the surface: its members are others' business
    before, after = old.members(name), new.members(name)
    for key in [*before, *(key for key in after if key not in before)]:
        (was, owner), (now, new_owner) = before.get(key, (None, "")), after.get(key, (None, ""))
        if name in (owner, new_owner):  # else its base class has the change
            where = f"{name}.{key}" if key else name
            yield from _differences(where, was, now, used.concern(name, key), (before, after))


def _differences(
    where: str,
    was: Member | None,
    now: Member | None,
    concern: str,
    every: tuple[Members, Members],
) -> Iterator[Change]:
    if was is None and now is not None:
        # new ones concern mmkit where they meet what it has, or have to be implemented
        meets = concern if concern == "overrides" else "must override" if now.kind.startswith("abstract") else ""
        yield Change("added", where, "", str(now.untyped), meets)
    elif was is not None and now is None:
        yield Change("removed", where, str(was.untyped), _successor(was, *every), concern)
    elif was is not None and now is not None and was != now:
        what = _what(was, now)
        one, other = (was, now) if what == "types" else (was.untyped, now.untyped)
        yield Change(what, where, str(one.beside(other)), str(other.beside(one)), concern)


def _what(was: Member, now: Member) -> What:
    if was.kind != now.kind:
        return "kind"
    if [p.call for p in was.parameters] != [p.call for p in now.parameters]:
        return "signature"
    return "types" if was.untyped == now.untyped else "default"


def _successor(was: Member, before: Members, after: Members) -> str:
    """A new member with the same parameters, if there is just one: what a removed one may be called now."""
    new = [(key, member) for key, (member, _) in after.items() if key not in before]
    alike = [key for key, member in new if was.parameters and member.untyped == was.untyped]
    return f"perhaps {alike[0]} now" if len(alike) == 1 else ""


def report(old: Tree, new: Tree, changes: Sequence[Change]) -> str:
    """The changes as text."""
    concerning = [change for change in changes if change.mmkit]
    owners = {change.where.split(".")[0] for change in changes}
    lines = [
        f"vLLM {old.version} to {new.version}: {len(changes)} change(s) of {len(owners)} class(es) or function(s), "
        f"{len(concerning)} of what mmkit overrides or uses"
    ]
    for title, some in (
        ("mmkit overrides or uses", concerning),
        ("others", [change for change in changes if not change.mmkit]),
    ):
        if some:
            lines += ["", f"{title}:"]
        for change in some:
            lines.append(f"  {change.what:9} {change.where}" + f"  [{change.mmkit}]" * bool(change.mmkit))
            lines += [f"      {sign} {text}" for sign, text in (("-", change.before), ("+", change.after)) if text]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m mmkit.vllm_api.diff",
        description="Compare the multimodal base classes of two versions of vLLM, by their sources.",
    )
    parser.add_argument("old", metavar="A", help='"installed", or a folder that holds vllm/')
    parser.add_argument("new", metavar="B", help="the same")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        old, new = Tree(options.old), Tree(options.new)
    except FileNotFoundError as error:
        parser.error(str(error))  # exits with 2, as diff does
    changes = compare(old, new)
    if options.json:
        print(json.dumps({"A": old.version, "B": new.version, "changes": [asdict(c) for c in changes]}, indent=2))
    else:
        print(report(old, new, changes))
    return 1 if changes else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends quietly where `head` has read enough
    sys.exit(main())
