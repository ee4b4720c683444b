"""``mmkit eject``: a copy of mmkit inside a package, which then needs no mmkit.

The copy consists of mmkit's own source files, unchanged. In the package only import statements
change, so the package behaves as before, on every vLLM that mmkit runs on.
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

from ..errors import DISTRIBUTION, MmkitError
from ..generate import PACKAGE, source
from ..model_spec import ModelSpec
from .common import find_in_working_directory, plural

MMKIT = PACKAGE.rpartition(".")[0]
FOLDER = "_mmkit"

_HEADER = """\
# A copy of mmkit {version}, written by `mmkit eject {package}`. Run the command again to update it.
#
# The files are mmkit's own, those that the package needs, and its licence. generated/ has the
# classes that vLLM runs. Nothing here imports mmkit; what is imported comes with vLLM.
#
# Not here are mmkit's command and its entry points. Declare yours in pyproject.toml:
#   vllm.general_plugins    a function that registers the model; vLLM calls it in every process
#   vllm.logits_processors  "{package}.{folder}.model.sampling:PlaceholderMask"
#                           without it the model masks its own logits, and the log probabilities
#                           that vLLM reports are of the other ids only
# There are no routes under /v1/mm: vLLM's own server takes the items that it has a form for.
#
# The sum of these files, which tells an update whether they were changed:
# sha256 {digest}

"""
_DIGEST = re.compile(rb"(?m)^# sha256 [0-9a-f]{64}$")
_NO_DIGEST = "0" * 64

_INIT = PurePosixPath("__init__.py")

Files = dict[PurePosixPath, bytes]


def command(package: str) -> None:
    """Copy the needed parts of mmkit into a package, and print the written files.

    Args:
        package: dotted name; packages in the working directory are found, too.

    Raises:
        MmkitError: see `eject`.
    """
    find_in_working_directory()
    *modules, copy = eject(package)
    count = plural(len(modules), "module")
    print(f"{copy}: what {package} needs of mmkit. Imports rewritten in {count}:")
    for module in modules:
        print(f"  {module}")


def eject(package: str) -> list[Path]:
    """Copy the needed parts of mmkit into a package's folder ``_mmkit``, and rewrite the package's
    imports.

    mmkit searches all modules of the package for imports of mmkit. It copies the imported modules,
    with everything that these import, and writes the vLLM classes of each spec beside them, as
    `ModelSpec.classes` generates them. An earlier copy is replaced.

    Args:
        package: dotted name of an importable package.

    Returns:
        The modules whose imports were rewritten, and the folder of the copy.

    Raises:
        MmkitError: there is no such package, the package does not import mmkit, one of its modules
            cannot be read or imported, or the copy has been changed since it was written.
    """
    folder = _folder(package)
    copy = folder / FOLDER
    if copy.exists() and not _is_unchanged(copy):
        remedy = "Move your changes elsewhere, remove the folder, and run the command again."
        raise MmkitError(str(copy), "the copy as mmkit wrote it", "a changed one", remedy)

    modules = list(_modules(package, folder))
    needed = {name for module in modules for name in module.needed}
    if not needed:
        raise MmkitError(package, "a package that imports mmkit", "one that does not")

    files = _closure(needed)
    _write(copy, package, files)
    changed = [module for module in modules if module.rewritten != module.text]
    for module in changed:
        module.path.write_bytes(module.rewritten)
    # modules are imported with the new copy: an update may be for a vLLM that the old one refuses
    for module in modules:
        if module.declares:
            files |= _classes(module.name, f"{package}.{FOLDER}")
    _write(copy, package, files)
    return [*(module.path for module in changed), copy]


def _folder(package: str) -> Path:
    """The folder of a package."""
    try:
        module = find_spec(package)
        got = "no such module" if module is None else "a single module"
    except Exception as error:  # a package that holds it runs
        module, got = None, f"{type(error).__name__}: {error}"
    if module is None or not module.submodule_search_locations:
        remedy = "Give its dotted name, as my_package."
        raise MmkitError(package, "a package that can be imported", got, remedy)
    return Path(module.submodule_search_locations[0])


# -- the package -----------------------------------------------------------------------------------


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

    def __init__(self, package: str, path: Path, folders: tuple[str, ...]) -> None:
        parent = ".".join([package, *folders])
        self.path, self.text = path, path.read_bytes()
        self.name = parent if path.name == _INIT.name else f"{parent}.{path.stem}"
        self.needed: set[str] = set()
        self.declares = False
        self._dots = "." * (1 + len(folders))
        edits: list[tuple[int, int, str]] = []
        line_starts = [0, *accumulate(map(len, self.text.splitlines(keepends=True)))]
        for node in ast.walk(_parsed(self.text, path)):
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            start = line_starts[node.lineno - 1] + node.col_offset
            end = line_starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            if isinstance(node, ast.ImportFrom):
                new = self._from(node, self.text[start:end].decode(), parent, package)
            else:
                new = self._import(node)
            edits.append((start, end, new or self.text[start:end].decode()))
        self.rewritten = self.text
        for start, end, new in sorted(edits, reverse=True):
            self.rewritten = self.rewritten[:start] + new.encode() + self.rewritten[end:]

    def _from(self, node: ast.ImportFrom, text: str, parent: str, package: str) -> str | None:
        """The statement ``from mmkit import ...`` as it is to be; line breaks and comments stay."""
        written = resolve_name("." * node.level + (node.module or ""), parent)
        origin = written.replace(f"{package}.{FOLDER}", MMKIT, 1)
        if not _is_of_mmkit(origin):
            return None
        names = [alias.name for alias in node.names]
        self.needed |= {origin, *(f"{origin}.{name}" for name in names)}
        self.declares = self.declares or ModelSpec.__name__ in names
        return text.replace(MMKIT, self._dots + FOLDER, 1) if written == origin else None

    def _import(self, node: ast.Import) -> str | None:
        """Statements in place of ``import mmkit.testing``, which binds the name mmkit."""
        names = {alias.name for alias in node.names if _is_of_mmkit(alias.name)}
        self.needed |= names
        statements: list[str] = []
        for alias in node.names:
            if alias.name not in names:
                statements.append(ast.unparse(ast.Import([alias])))
                continue
            parent, _, last = alias.name.rpartition(".")
            if not parent or not alias.asname:
                bound = alias.asname or MMKIT
                statements.append(f"from {self._dots} import {FOLDER} as {bound}")
            if parent:
                origin, bound = parent.replace(MMKIT, FOLDER, 1), alias.asname or f"_{last}"
                statements.append(f"from {self._dots}{origin} import {last} as {bound}")
        return "; ".join(statements) if names else None


def _modules(package: str, folder: Path) -> Iterator[_Module]:
    for path in sorted(folder.rglob("*.py")):
        folders = path.relative_to(folder).parts[:-1]
        if FOLDER not in folders:
            yield _Module(package, path, folders)


def _parsed(text: bytes, path: Path) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        remedy = "Mend it, or move it out of the package."
        raise MmkitError(str(path), "Python source", str(error), remedy) from error


def _is_of_mmkit(name: str) -> bool:
    return f"{name}.".startswith(f"{MMKIT}.")


def _classes(module: str, root: str) -> Files:
    """The vLLM classes of each spec of a module, as source, where `generate.classes` finds them."""
    try:
        members = vars(import_module(module))
    except Exception as error:
        expected, got = "a module that can be imported", f"{type(error).__name__}: {error}"
        raise MmkitError(module, expected, got, "Its specs are read from it.") from error
    folder = PurePosixPath("generated", *module.split("."))
    files: Files = {}
    for variable, spec in members.items():
        if type(spec).__name__ == ModelSpec.__name__:  # mmkit's, or the copy's
            files[folder / f"{variable}.py"] = source(spec, f"{module}.{variable}", root).encode()
    if files:
        files |= {parent / _INIT: b"" for parent in [folder, *folder.parents][:-2]}
    return files


# -- the copy --------------------------------------------------------------------------------------


def _closure(names: Iterable[str]) -> Files:
    """The files of modules of mmkit, and of all modules that these import."""
    root = Path(__file__).parents[1]
    files: Files = {}
    queue = [MMKIT, *names]
    while queue:
        name = queue.pop()
        base = root.joinpath(*name.split(".")[1:])
        path = base / _INIT if base.is_dir() else base.with_suffix(".py")
        relative = PurePosixPath(path.relative_to(root).as_posix())
        if relative in files or not path.is_file():  # a name may be of something in a module
            continue
        files[relative] = path.read_bytes()
        parent = name.rpartition(".")[0] or MMKIT
        package = name if base.is_dir() else parent
        queue += [parent, *_imported(ast.parse(files[relative]), package)]
    return files


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    """The names that a module of mmkit imports from mmkit; its imports are relative."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(level=level, module=module, names=names) if level:
                origin = resolve_name("." * level + (module or ""), package)
                yield origin
                yield from (f"{origin}.{alias.name}" for alias in names)


def _write(copy: Path, package: str, files: Files) -> None:
    """Replace the copy."""
    own = distribution(DISTRIBUTION)
    names = {"version": own.version, "package": package, "folder": FOLDER, "digest": _NO_DIGEST}
    licence = own.read_text("licenses/LICENSE") or ""
    files = files | {
        _INIT: _HEADER.format(**names).encode() + files[_INIT],
        PurePosixPath("LICENSE"): licence.encode(),
    }
    files[_INIT] = _DIGEST.sub(_digest(files), files[_INIT], count=1)
    shutil.rmtree(copy, ignore_errors=True)
    for path, text in files.items():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        (copy / path).write_bytes(text)


def _digest(files: Files) -> bytes:
    """The line with the sum of some files, in which that line counts as one of zeros."""
    total = sha256()
    for path, text in sorted(files.items()):
        without = _DIGEST.sub(f"# sha256 {_NO_DIGEST}".encode(), text, count=1)
        total.update(f"{path} {len(without)}\n".encode() + without)
    return f"# sha256 {total.hexdigest()}".encode()


def _is_unchanged(copy: Path) -> bool:
    paths = (path for path in copy.rglob("*") if path.is_file() and path.suffix != ".pyc")
    files = {PurePosixPath(path.relative_to(copy).as_posix()): path.read_bytes() for path in paths}
    return _digest(files) in files.get(_INIT, b"")
