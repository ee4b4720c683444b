"""Leaving mmkit: a copy of it inside a package, which then needs no mmkit.

The copy is mmkit's own source files, unchanged. In the package only import statements change. So the package does what
it did before, on every vLLM that mmkit runs on.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterable, Iterator
from hashlib import sha256
from importlib import import_module
from importlib.metadata import distribution
from importlib.util import find_spec, resolve_name
from itertools import accumulate
from pathlib import Path, PurePosixPath

from .errors import MmkitError
from .generate import PACKAGE, source
from .spec import ModelSpec

MMKIT = PACKAGE.rpartition(".")[0]
FOLDER = "_mmkit"

_HEADER = """\
# A copy of mmkit {version}, written by `mmkit eject {package}`. Run the command again to update it.
#
# The files are mmkit's own, those that {package} needs; generated/ has the classes that vLLM runs. Nothing here
# imports mmkit; what is imported comes with vLLM. The licence is in LICENSE.
#
# Two things of mmkit are not here: its command, and its entry points. Declare yours in pyproject.toml:
#   vllm.general_plugins    a function that registers the model; vLLM calls it in every process
#   vllm.logits_processors  "{package}.{folder}.sampling:PlaceholderMask"; without it the model masks its own
#                           logits, and the log probabilities that vLLM reports are of the other ids only
# There are no routes under /v1/mm: vLLM's own server takes the items that it has a form for.
#
# The sum of these files, which tells an update whether they were changed:
# sha256 {digest}

"""
_DIGEST = re.compile(rb"(?m)^# sha256 [0-9a-f]{64}$")
_NO_DIGEST = "0" * 64

_MODULE_NAME = re.compile(r"\.[a-z_]+")
"""A module that is imported by name: ``import_module(".generation_d", __name__)``."""

Files = dict[PurePosixPath, bytes]


def eject(package: str) -> list[Path]:
    """Copy what a package needs of mmkit into its folder ``_mmkit``, and have the package import that.

    All modules of the package are searched for imports of mmkit. What they import is copied, with everything that it
    imports itself, and beside it the vLLM classes of each spec, as `ModelSpec.classes` generates them. An earlier copy
    is replaced.

    Args:
        package: dotted name of an importable package.

    Returns:
        The modules whose imports were rewritten, and the folder of the copy.

    Raises:
        MmkitError: there is no such package, it does not import mmkit, one of its modules cannot be read or imported,
            or the copy has been changed since it was written.
    """
    folder = _folder(package)
    copy = folder / FOLDER
    if copy.exists() and not _is_unchanged(copy):
        remedy = "Move your changes elsewhere, remove the folder, and run the command again."
        raise MmkitError(str(copy), "the copy as mmkit wrote it", "a changed one", remedy)

    paths = [path for path in sorted(folder.rglob("*.py")) if FOLDER not in path.relative_to(folder).parts]
    modules = [_Module(package, folder, path) for path in paths]
    needed = {name for module in modules for name in module.needed}
    if not needed:
        raise MmkitError(package, "a package that imports mmkit", "one that does not")

    files = _closure(needed)
    _write(copy, package, files)
    changed = [module for module in modules if module.rewritten != module.text]
    for module in changed:
        module.path.write_bytes(module.rewritten)
    # only now: where an update is for a new vLLM, the copy before it may not import
    for module in modules:
        if module.declares:
            files |= _classes(module.name, f"{package}.{FOLDER}")
    _write(copy, package, files)
    return [*(module.path for module in changed), copy]


def _folder(package: str) -> Path:
    """The folder of a package."""
    expected, remedy = "a package that can be imported", "Give its dotted name, as my_package."
    try:
        found = find_spec(package)
    except Exception as error:  # a parent of it runs
        raise MmkitError(package, expected, f"{type(error).__name__}: {error}", remedy) from error
    if found is None or not found.submodule_search_locations:
        raise MmkitError(package, expected, "no such module" if found is None else "a single module", remedy)
    return Path(found.submodule_search_locations[0])


# -- the package -------------------------------------------------------------------------------------------------------


class _Module:
    """A module of the package.

    Attributes:
        path: its file.
        name: dotted.
        text: its source.
        rewritten: its source with the copy's names in its imports.
        needed: dotted names in mmkit that it imports, from mmkit or from the copy.
        declares: whether it can declare a spec.
    """

    def __init__(self, package: str, folder: Path, path: Path) -> None:
        self.path = path
        self._dots = b"." * len(path.relative_to(folder).parts)
        parent = ".".join([package, *path.relative_to(folder).parts[:-1]])
        self.name = parent if path.stem == "__init__" else f"{parent}.{path.stem}"
        self.text = path.read_bytes()
        self.needed: set[str] = set()
        self.declares = False
        edits: list[tuple[ast.Import | ast.ImportFrom, bytes]] = []
        for node in ast.walk(_parsed(self.text, path)):
            if isinstance(node, ast.ImportFrom):
                origin = resolve_name("." * node.level + (node.module or ""), parent)
                if _is_within(origin, MMKIT):
                    edits.append((node, b""))
                self._need(origin.replace(f"{package}.{FOLDER}", MMKIT, 1), node.names)
            elif isinstance(node, ast.Import) and any(_is_within(alias.name, MMKIT) for alias in node.names):
                self.needed |= {alias.name for alias in node.names if _is_within(alias.name, MMKIT)}
                edits.append((node, b"; ".join(self._imports(node.names))))
        self.rewritten = self._edited(edits)

    def _need(self, origin: str, names: list[ast.alias]) -> None:
        if _is_within(origin, MMKIT):
            self.needed |= {origin, *(f"{origin}.{alias.name}" for alias in names)}
            self.declares = self.declares or ModelSpec.__name__ in (alias.name for alias in names)

    def _imports(self, names: list[ast.alias]) -> Iterator[bytes]:
        """Statements in place of ``import mmkit.testing``, which binds the name mmkit."""
        for alias in names:
            _, *inner = alias.name.split(".")
            of_mmkit = _is_within(alias.name, MMKIT)
            if not of_mmkit:
                yield f"import {alias.name}{f' as {alias.asname}' if alias.asname else ''}".encode()
            if of_mmkit and (alias.asname is None or not inner):
                yield b"from %b import %b as %b" % (self._dots, FOLDER.encode(), (alias.asname or MMKIT).encode())
            if of_mmkit and inner:
                origin = ".".join([FOLDER, *inner[:-1]]).encode()
                bound = alias.asname or f"_{inner[-1]}"
                yield b"from %b%b import %b as %b" % (self._dots, origin, inner[-1].encode(), bound.encode())

    def _edited(self, edits: list[tuple[ast.Import | ast.ImportFrom, bytes]]) -> bytes:
        """The source with other imports; the line breaks and comments within them stay."""
        text = self.text
        starts = [0, *accumulate(map(len, text.splitlines(keepends=True)))]
        for node, statement in sorted(edits, key=lambda edit: (edit[0].lineno, edit[0].col_offset), reverse=True):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            if not statement:
                statement = text[start:end].replace(MMKIT.encode(), self._dots + FOLDER.encode(), 1)
            text = text[:start] + statement + text[end:]
        return text


def _parsed(text: bytes, path: Path) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise MmkitError(str(path), "Python source", str(error), "Mend it, or move it out of the package.") from error


def _is_within(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def _classes(module: str, root: str) -> Files:
    """The source of the vLLM classes of each spec of a module, where `generate.classes` looks for it."""
    try:
        members = vars(import_module(module))
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise MmkitError(module, "a module that can be imported, for its specs", got) from error
    files: Files = {}
    folder = PurePosixPath("generated", *module.split("."))
    for variable, spec in members.items():
        # of mmkit, or of an earlier copy of it
        if type(spec).__name__ == ModelSpec.__name__:
            files[folder / f"{variable}.py"] = source(spec, f"{module}.{variable}", root).encode()
    if files:
        files |= {parent / "__init__.py": b"" for parent in [folder, *folder.parents][:-2]}
    return files


# -- the copy ----------------------------------------------------------------------------------------------------------


def _closure(names: Iterable[str]) -> Files:
    """The files of modules of mmkit, and of all modules that these import."""
    root = Path(__file__).parent
    files: Files = {}
    queue = [MMKIT, *names]
    while queue:
        name = queue.pop()
        if not name:
            continue
        base = root.joinpath(*name.split(".")[1:])
        path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        relative = PurePosixPath(path.relative_to(root).as_posix())
        if relative in files or not path.is_file():  # also what is no module, but something in one
            continue
        files[relative] = text = path.read_bytes()
        parent = name.rpartition(".")[0]
        queue += [parent, *_imported(ast.parse(text), name if base.is_dir() else parent)]
    return files


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    """The names that a module of mmkit imports from mmkit; its imports are relative."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            origin = resolve_name("." * node.level + (node.module or ""), package)
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _MODULE_NAME.fullmatch(node.value):
            yield resolve_name(node.value, package)


def _write(copy: Path, package: str, files: Files) -> None:
    """Replace the copy."""
    own = distribution(MMKIT)
    header = _HEADER.format(version=own.version, package=package, folder=FOLDER, digest=_NO_DIGEST)
    init, licence = PurePosixPath("__init__.py"), PurePosixPath("LICENSE")
    files = files | {
        init: header.encode() + files[init],
        licence: (own.read_text("licenses/LICENSE") or "").encode(),
    }
    files[init] = _DIGEST.sub(b"# sha256 " + _sum(files).encode(), files[init], count=1)
    shutil.rmtree(copy, ignore_errors=True)
    for path, text in files.items():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        (copy / path).write_bytes(text)


def _sum(files: Files) -> str:
    """The sum of some files; the line that holds it counts as zeros."""
    total = sha256()
    for path, text in sorted(files.items()):
        blank = _DIGEST.sub(b"# sha256 " + _NO_DIGEST.encode(), text, count=1)
        total.update(f"{path} {len(blank)}\n".encode() + blank)
    return total.hexdigest()


def _is_unchanged(copy: Path) -> bool:
    paths = [path for path in copy.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    files = {PurePosixPath(path.relative_to(copy).as_posix()): path.read_bytes() for path in paths}
    return f"# sha256 {_sum(files)}".encode() in files.get(PurePosixPath("__init__.py"), b"")
