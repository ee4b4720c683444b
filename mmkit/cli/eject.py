"""``mmkit eject``: a copy of mmkit inside a package, which then needs no mmkit.

The copy consists of mmkit's own source files, unchanged. In the package only import statements
change, so the package behaves as before, on every vLLM that mmkit runs on.

A package is found in the working directory, too. Refused (`MmkitError`) is a package that cannot be
imported or does not import mmkit, that has a module which cannot be read, or a copy already.
"""

from __future__ import annotations

import ast
from importlib.metadata import distribution
from importlib.util import find_spec, resolve_name
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Annotated

from typer import Argument

from ..errors import DISTRIBUTION, MmkitError
from ..importing import find_in_working_directory
from .common import count_noun, describe_error

ROOT = Path(__file__).parents[1]
MMKIT = __name__.split(".")[0]
FOLDER = "_mmkit"
ON_DEMAND = {"serve", "sglang_api", "testing", "wire"}
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


def eject(
    package: Annotated[str, Argument(help="The package to copy it into, for example my_package.")],
) -> list[Path]:
    """Copy mmkit into a package, so that it needs no mmkit."""
    # it returns the modules whose imports were rewritten, and the folder of the copy
    find_in_working_directory()
    folder = _find_folder(package)
    copy = folder / FOLDER
    if copy.exists():
        remedy = "Remove it, and run the command again: your changes of it would be lost."
        raise MmkitError(str(copy), "no copy yet", "one", remedy)
    modules: list[_Module] = []
    imported_names: set[str] = set()
    for path in sorted(folder.rglob("*.py")):
        module = _Module(package, path, path.relative_to(folder))
        modules.append(module)
        imported_names.update(module.imported_names)
    if not imported_names:
        raise MmkitError(package, "a package that imports mmkit", "one that does not")
    if imported_names & {"serve", "sglang_api"}:
        imported_names.add("wire")  # which both import
    left_out = ON_DEMAND - imported_names
    copytree(ROOT, copy, ignore=ignore_patterns("__pycache__", "cli", *left_out))
    _write_legal(package, copy)
    changed = [module for module in modules if module.new_source != module.source]
    for module in changed:
        module.path.write_bytes(module.new_source)
    count = count_noun(len(changed), "module")
    print(f"{copy}: what {package} needs of mmkit. Imports rewritten in {count}:")
    for module in changed:
        print(f"  {module.path}")
    paths = [module.path for module in changed]
    paths.append(copy)
    return paths


def _write_legal(package: str, copy: Path) -> None:
    """Write the licence of mmkit into a copy, and what the copy is at its top."""
    mmkit = distribution(DISTRIBUTION)
    header = _HEADER.format(version=mmkit.version, package=package, folder=FOLDER)
    init = copy / "__init__.py"
    init.write_text(header + init.read_text(encoding="utf-8"), encoding="utf-8")
    (copy / "LICENSE").write_text(mmkit.read_text("licenses/LICENSE") or "", encoding="utf-8")


def _find_folder(package: str) -> Path:
    """Return the folder of a package."""
    try:
        module = find_spec(package)
        got = "no such module" if module is None else "a single module"
    except Exception as error:  # finding it runs the package that holds it
        module = None
        got = describe_error(error)
    if module is None or not module.submodule_search_locations:
        remedy = "Give its dotted name, as my_package."
        raise MmkitError(package, "a package that can be imported", got, remedy)
    return Path(module.submodule_search_locations[0])


class _Module:
    """A module of the package.

    Attributes:
        path: its file.
        source: its source.
        new_source: its source with the copy's names in its imports.
        imported_names: the words of what it imports from mmkit, or from the copy before.
    """

    def __init__(self, package: str, path: Path, relative: Path) -> None:
        self.path = path
        self.source = path.read_bytes()
        self.imported_names: set[str] = set()
        self._package = package
        self._parent = ".".join([package, *relative.parts[:-1]])
        self._dots = "." * len(relative.parts)
        self.new_source = self._rewrite_imports()

    def _rewrite_imports(self) -> bytes:
        """Return the source with the copy's names in its imports."""
        imports: list[ast.Import | ast.ImportFrom] = []
        try:
            for node in ast.walk(ast.parse(self.source)):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    imports.append(node)
        except (SyntaxError, ValueError) as error:
            remedy = "Mend it, or move it out of the package."
            raise MmkitError(str(self.path), "Python source", str(error), remedy) from error
        line_starts = [0]
        for line in self.source.splitlines(keepends=True):
            line_starts.append(line_starts[-1] + len(line))
        new_source = self.source
        # from the last to the first, so that the positions of those before stay
        imports.sort(key=_get_position, reverse=True)
        for node in imports:
            start = line_starts[node.lineno - 1] + node.col_offset
            end = line_starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            statement = self.source[start:end].decode()
            if isinstance(node, ast.ImportFrom):
                statement = self._rewrite_import_from(node, statement)
            else:
                statement = self._rewrite_import(node, statement)
            new_source = new_source[:start] + statement.encode() + new_source[end:]
        return new_source

    def _rewrite_import_from(self, node: ast.ImportFrom, statement: str) -> str:
        """Return a statement ``from mmkit import ...`` as it is to be.

        Line breaks and comments stay. Statements that import nothing of mmkit stay as they are.
        """
        module = resolve_name("." * node.level + (node.module or ""), self._parent)
        origin = module.replace(f"{self._package}.{FOLDER}", MMKIT, 1)
        if not _is_of_mmkit(origin):
            return statement
        self.imported_names.update(origin.split("."))
        self.imported_names.update(alias.name for alias in node.names)
        if module != origin:  # it imports from the copy before
            return statement
        return statement.replace(MMKIT, self._dots + FOLDER, 1)

    def _rewrite_import(self, node: ast.Import, statement: str) -> str:
        """Return statements in place of ``import mmkit.testing``, which binds the name mmkit."""
        of_mmkit = [alias for alias in node.names if _is_of_mmkit(alias.name)]
        if not of_mmkit:
            return statement
        statements: list[str] = []
        further = [alias for alias in node.names if alias not in of_mmkit]
        if further:
            statements.append(ast.unparse(ast.Import(further)))
        for alias in of_mmkit:
            self.imported_names.update(alias.name.split("."))
            parent, _, last = alias.name.rpartition(".")
            if parent:
                home = parent.replace(MMKIT, FOLDER, 1)
                bound_name = alias.asname or f"_{last}"
                statements.append(f"from {self._dots}{home} import {last} as {bound_name}")
            if not parent or not alias.asname:
                bound_name = alias.asname or MMKIT
                statements.append(f"from {self._dots} import {FOLDER} as {bound_name}")
        return "; ".join(statements)


def _get_position(node: ast.stmt) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _is_of_mmkit(name: str) -> bool:
    return f"{name}.".startswith(f"{MMKIT}.")
