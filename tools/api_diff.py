"""What changed in vLLM's multimodal base classes between two versions, and which files of mmkit
name it.

    python -m tools.api_diff A B        A, B: a version of the matrix, as 0.33.0; "installed"; or a
    folder that holds vllm/, as in its wheel

griffe reads both, neither is imported. Classes are followed by name where they move to another
module. Exits as diff does: with 0 if nothing changed, with 1 if something did.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

try:
    import griffe
except ModuleNotFoundError:
    raise SystemExit("tools.api_diff: expected griffe, got none. Run pip install griffe.") from None

from tools.matrix import trees

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

HOMES = (
    "vllm.multimodal",
    "vllm.inputs",
    "vllm.renderers",
    "vllm.model_executor.models.interfaces",
)
"""Where these names are the surface; an `Items` of another place is none of it."""

MMKIT = Path(__file__).parents[1] / "mmkit"
SOURCES = {
    path.relative_to(MMKIT).as_posix(): path.read_text(encoding="utf-8")
    for pattern in ("vllm_api/*.py", "model/*.py", "testing/vllm_*.py")
    for path in sorted(MMKIT.glob(pattern))
}
"""Everything in mmkit that touches vLLM, by path."""


class Definition(NamedTuple):
    """A class, a function, or a member of a class.

    Attributes:
        owner: name of the class that defines a member; else of the module.
        bare: what a caller or a subclass has to know: kind, parameters and defaults.
        typed: the same with its types.
    """

    owner: str
    bare: str
    typed: str


class Change(NamedTuple):
    """One difference; `before` or `after` is empty where there was or is none."""

    what: str
    where: str
    before: str
    after: str


Surface = dict[str, Definition]

LONGEST = 300
"""Characters of a signature that is shown whole; of a longer one, the parameters that differ."""


def read(place: str) -> Surface:
    """The surface of one vLLM: classes and functions by name, members as ``Class.member``.

    Raises:
        FileNotFoundError: there is no vLLM.
    """
    if place in trees.RELEASES:
        trees.build([place])
        place = str(trees.RELEASES[place].folder)
    paths = None if place == "installed" else [place]
    # never fall back on importing: a second vLLM in one process ends it
    loader = griffe.GriffeLoader(search_paths=paths, allow_inspection=False)
    try:
        package = loader.load("vllm", try_relative_path=False)
    except ModuleNotFoundError:
        expected = "vLLM" if paths is None else f"a folder that holds vllm/, or {trees.KNOWN}"
        raise FileNotFoundError(f"{place}: expected {expected}, got none.") from None
    return dict(_of_module(package))


def _of_module(module: Any) -> Iterator[tuple[str, Definition]]:
    for name, member in module.members.items():
        if member.is_alias:
            continue
        if member.is_module:
            yield from _of_module(member)
        elif name in imported() or (member.is_class and _is_surface(member)):
            yield name, _definition(member, module.path)
            yield from _of_class(member) if member.is_class else ()


def _is_surface(member: Any) -> bool:
    at_home = any(f"{member.path}.".startswith(f"{home}.") for home in HOMES)
    return at_home and any(fnmatchcase(member.name, pattern) for pattern in SURFACE)


def _of_class(owner: Any) -> Iterator[tuple[str, Definition]]:
    for name, member in owner.all_members.items():
        is_field = member.is_attribute and "dataclass" in owner.labels  # `__init__` has it
        is_special = name.startswith("__") and name != "__init__"
        if not is_field and not is_special:
            target = member.final_target if member.is_alias else member
            yield f"{owner.name}.{name}", _definition(target, target.parent.name)


def _definition(member: Any, owner: str) -> Definition:
    marks = "".join(f"{label} " for label in sorted(member.labels & MARKS))
    if member.is_function:
        return Definition(
            owner, marks + _signature(member, typed=False), marks + _signature(member)
        )
    value = f" = {member.value}" if member.is_attribute and member.value is not None else ""
    annotation = f": {member.annotation}" if member.is_attribute and member.annotation else ""
    kind = f"{marks}{member.kind.value}"
    return Definition(owner, kind + value, kind + annotation + value)


MARKS = {"abstractmethod", "classmethod", "property", "staticmethod"}


def _signature(function: Any, *, typed: bool = True) -> str:
    if not typed:
        bare = (
            griffe.Parameter(p.name, kind=p.kind, default=p.default) for p in function.parameters
        )
        parent = function.parent
        function = griffe.Function(
            function.name, parameters=griffe.Parameters(*bare), parent=parent
        )
    signature: str = function.signature(name=" ").strip()
    return signature.replace("'", "")  # types are the same with and without quotes


def compare(old: Surface, new: Surface) -> list[Change]:
    """All differences, those that mmkit names first.

    griffe's own comparison leaves private names out; vLLM's hooks are private.
    """
    names = [*old, *(name for name in new if name not in old)]
    changes = [change for name in names for change in _changes(name, old.get(name), new.get(name))]
    return sorted(
        changes, key=lambda change: (not named_in(change.where), change.where.split(".")[0])
    )


def _changes(name: str, old: Definition | None, new: Definition | None) -> Iterator[Change]:
    owner, is_member, _ = name.partition(".")
    if is_member and owner not in [one.owner for one in (old, new) if one]:
        return  # inherited before and after: its base class has the change
    if old is None or new is None:
        what = "added" if old is None else "removed"
        yield Change(what, name, old.bare if old else "", new.bare if new else "")
        return
    if not is_member and old.owner != new.owner:
        yield Change("moved", name, old.owner, new.owner)
    if old.bare != new.bare:
        yield Change("changed", name, old.bare, new.bare)
    elif old.typed != new.typed:
        yield Change("types", name, old.typed, new.typed)


@cache
def imported() -> frozenset[str]:
    """The names that mmkit imports from vLLM."""
    nodes = [node for text in SOURCES.values() for node in ast.walk(ast.parse(text))]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    of_vllm = [node for node in imports if (node.module or "").split(".")[0] == "vllm"]
    return frozenset(alias.name for node in of_vllm for alias in node.names)


@cache
def named_in(where: str) -> tuple[str, ...]:
    """The files of mmkit that name a class, or a member by its own name."""
    owner, _, member = where.partition(".")
    word = re.compile(rf"\b{owner if member in ('', '__init__') else member}\b")
    return tuple(path for path, text in SOURCES.items() if word.search(text))


def shown(before: str, after: str) -> tuple[str, str]:
    """Two signatures, or where one is long, the parameters in which they differ."""
    if max(len(before), len(after)) <= LONGEST:
        return before, after
    old, new = before.split(", "), after.split(", ")
    lines: tuple[list[str], list[str]] = [], []
    for kind, *ends in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for line, parts, (first, last) in zip(lines, (old, new), (ends[:2], ends[2:]), strict=True):
            piece = ["..."] if kind == "equal" else parts[first:last]
            line += piece if piece != line[-1:] else []
    return ", ".join(lines[0]), ", ".join(lines[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.api_diff",
        description="Compare the multimodal base classes of two versions of vLLM, by their "
        "sources.",
    )
    places = 'a version of the matrix, as 0.33.0; "installed"; or a folder that holds vllm/'
    parser.add_argument("old", metavar="A", help=places)
    parser.add_argument("new", metavar="B", help="the same")
    options = parser.parse_args(arguments)
    try:
        changes = compare(read(options.old), read(options.new))
    except FileNotFoundError as error:
        parser.error(str(error))  # exits with 2, as diff does
    named = sum(bool(named_in(change.where)) for change in changes)
    print(f"{options.old} to {options.new}: {len(changes)} change(s), {named} of what mmkit names")
    for change in changes:
        files, lines = ", ".join(named_in(change.where)), shown(change.before, change.after)
        print(f"\n{change.what} {change.where}" + (f"  [{files}]" if files else ""))
        print(
            *(f"  {sign} {text}" for sign, text in zip("-+", lines, strict=True) if text),
            sep="\n",
        )
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())
