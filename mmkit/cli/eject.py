"""``mmkit eject``: a copy of mmkit inside a package, which then needs no mmkit.

The copy consists of mmkit's own source files, unchanged. In the package only import statements
change, so the package behaves as before, on every vLLM that mmkit runs on.

A package is found in the working directory, too. Refused (`MmkitError`) is one that cannot be
imported or does not import mmkit, that has a module which cannot be read, or a copy already.
"""

from __future__ import annotations

import ast
from importlib.metadata import distribution
from importlib.util import find_spec, resolve_name
from itertools import accumulate
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Annotated

from typer import Argument

from ..errors import DISTRIBUTION, MmkitError
from ..importing import find_in_working_directory
from .common import plural, reason

ROOT = Path(__file__).parents[1]
MMKIT = __name__.split(".")[0]
FOLDER = "_mmkit"
ON_DEMAND = {"serve", "testing"}
"""The folders of mmkit that are copied for a package that imports them; cli/ never is."""

_HEADER = """\
# A copy of mmkit {version}, written by `mmkit eject {package}`. To update it, remove this folder
# and run the command again. Nothing here imports mmkit; what is imported comes with vLLM.
#
# Not here are mmkit's command and its entry points. Declare yours in pyproject.toml:
#   vllm.general_plugins    a function that registers the model; vLLM calls it in every process
#   vllm.logits_processors  "{package}.{folder}.model.sampling:PlaceholderMask"
#                           without it the model masks its own logits, and the log probabilities
#                           that vLLM reports are of the other ids only
# There are no routes under /v1/mm: vLLM's own server takes the items that it has a form for.

"""


def eject(package: Annotated[str, Argument(help="Of yours, as my_package.")]) -> list[Path]:
    """Copy mmkit into a package, so that it needs no mmkit."""
    # it returns the modules whose imports were rewritten, and the folder of the copy
    find_in_working_directory()
    folder = _folder(package)
    copy = folder / FOLDER
    if copy.exists():
        remedy = "Remove it, and run the command again: your changes of it would be lost."
        raise MmkitError(str(copy), "no copy yet", "one", remedy)
    paths = sorted(folder.rglob("*.py"))
    modules = [_Module(package, path, path.relative_to(folder)) for path in paths]
    needed = {name for module in modules for name in module.needed}
    if not needed:
        raise MmkitError(package, "a package that imports mmkit", "one that does not")
    copytree(ROOT, copy, ignore=ignore_patterns("__pycache__", "cli", *(ON_DEMAND - needed)))
    init, own = copy / "__init__.py", distribution(DISTRIBUTION)
    header = _HEADER.format(version=own.version, package=package, folder=FOLDER)
    init.write_text(header + init.read_text(encoding="utf-8"), encoding="utf-8")
    (copy / "LICENSE").write_text(own.read_text("licenses/LICENSE") or "", encoding="utf-8")
    changed = [module for module in modules if module.rewritten != module.text]
    for module in changed:
        module.path.write_bytes(module.rewritten)
    count = plural(len(changed), "module")
    print(f"{copy}: what {package} needs of mmkit. Imports rewritten in {count}:")
    for module in changed:
        print(f"  {module.path}")
    return [*(module.path for module in changed), copy]


def _folder(package: str) -> Path:
    """The folder of a package."""
    try:
        module = find_spec(package)
        got = "no such module" if module is None else "a single module"
    except Exception as error:  # a package that holds it runs
        module, got = None, reason(error)
    if module is None or not module.submodule_search_locations:
        remedy = "Give its dotted name, as my_package."
        raise MmkitError(package, "a package that can be imported", got, remedy)
    return Path(module.submodule_search_locations[0])


class _Module:
    """A module of the package.

    Attributes:
        path: its file.
        text: its source.
        rewritten: its source with the copy's names in its imports.
        needed: the words of what it imports from mmkit, or from the copy before.
    """

    def __init__(self, package: str, path: Path, relative: Path) -> None:
        self.path, self.text = path, path.read_bytes()
        self.needed: set[str] = set()
        self._package, self._parent = package, ".".join([package, *relative.parts[:-1]])
        self._dots = "." * len(relative.parts)
        starts = [0, *accumulate(map(len, self.text.splitlines(keepends=True)))]
        try:
            nodes = [*ast.walk(ast.parse(self.text))]
        except (SyntaxError, ValueError) as error:
            remedy = "Mend it, or move it out of the package."
            raise MmkitError(str(path), "Python source", str(error), remedy) from error
        imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
        self.rewritten = self.text
        for node in sorted(imports, key=lambda node: (node.lineno, node.col_offset), reverse=True):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            old = self.text[start:end].decode()
            new = self._from(node, old) if isinstance(node, ast.ImportFrom) else self._import(node)
            self.rewritten = self.rewritten[:start] + (new or old).encode() + self.rewritten[end:]

    def _from(self, node: ast.ImportFrom, text: str) -> str:
        """The statement ``from mmkit import ...`` as it is to be; line breaks and comments stay."""
        written = resolve_name("." * node.level + (node.module or ""), self._parent)
        origin = written.replace(f"{self._package}.{FOLDER}", MMKIT, 1)
        if not _is_of_mmkit(origin):
            return ""
        self.needed.update(origin.split("."), (alias.name for alias in node.names))
        return text.replace(MMKIT, self._dots + FOLDER, 1) if written == origin else ""

    def _import(self, node: ast.Import) -> str:
        """Statements in place of ``import mmkit.testing``, which binds the name mmkit."""
        own = [alias for alias in node.names if _is_of_mmkit(alias.name)]
        self.needed.update(*(alias.name.split(".") for alias in own))
        others = [alias for alias in node.names if alias not in own]
        statements = [ast.unparse(ast.Import(others))] if others and own else []
        for alias in own:
            parent, _, last = alias.name.rpartition(".")
            if parent:
                home, bound = parent.replace(MMKIT, FOLDER, 1), alias.asname or f"_{last}"
                statements.append(f"from {self._dots}{home} import {last} as {bound}")
            if not parent or not alias.asname:
                name = alias.asname or MMKIT
                statements.append(f"from {self._dots} import {FOLDER} as {name}")
        return "; ".join(statements)


def _is_of_mmkit(name: str) -> bool:
    return f"{name}.".startswith(f"{MMKIT}.")
