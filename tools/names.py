"""Find names that say nothing: `python -m tools.names [FOLDER ...]`, a part of `make lint`.

A variable or an argument is a noun of the field, a function a verb with its object. This reports
bindings of words that say nothing about what they hold (`own`, `given`), and functions that are
named by a participle (`rendered`).
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

EXEMPT = ("tests/data/", "tests/path/planted/")
"""Code of others, and bugs, which are named by what is wrong."""

FOLDERS = ["mmkit", "examples", "benchmarks", "tools", "tests"]

EMPTY_WORDS = set("""
    answered apart asked aside at beside came found given kept known made odd one others own read
    rest same seen sent some sought standing stated taken told way ways written
""".split())  # fmt: skip  # noqa: SIM905
"""Words that say nothing about a value, whatever it is."""

PARTICIPLES = EMPTY_WORDS | set("""
    chosen contained drawn gone held joined laid left placed rendered said shown slid spelled
""".split())  # fmt: skip  # noqa: SIM905
"""Words that say what was done, where a verb says what a function does; so do words in "ed"."""

VERBS_IN_ED = {"embed", "exceed", "feed", "need", "proceed", "seed", "speed"}

PUBLIC = {"at", "known", "others", "same", "scaled"}
"""Arguments, attributes and functions that authors use under these names."""


def main(folders: list[str]) -> int:
    """Print every such name with its place, and return 1 if there is one."""
    count = 0
    for path in find_files(folders or FOLDERS):
        for line, problem in find_problems(ast.parse(path.read_text(encoding="utf-8"))):
            print(f"{path}:{line}: {problem}")
            count += 1
    return 1 if count else 0


def find_files(folders: list[str]) -> list[Path]:
    """Return the Python files of folders that git has."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(command + folders, capture_output=True, text=True, check=True).stdout
    paths = []
    for name in output.splitlines():
        path = Path(name)
        if path.suffix == ".py" and path.exists() and not name.startswith(EXEMPT):
            paths.append(path)
    return paths


def find_problems(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line of each such name, and a sentence."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and is_empty(node.id):
            yield node.lineno, f"`{node.id}` names nothing: say what it holds."
        elif isinstance(node, ast.arg) and is_empty(node.arg):
            yield node.lineno, f"the argument `{node.arg}` names nothing: say what it holds."
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_participle(node):
            yield (
                node.lineno,
                f"`{node.name}` says what was done: name the function by a verb.",
            )


def is_empty(name: str) -> bool:
    """Return whether a name says nothing about its value."""
    return name in EMPTY_WORDS and name not in PUBLIC


def is_participle(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function, which is no property, is named by a participle.

    ``read_header`` is a verb with its object.
    """
    if any("property" in ast.unparse(decorator) for decorator in function.decorator_list):
        return False
    words = function.name.strip("_").split("_")
    if function.name in PUBLIC or words[0] in VERBS_IN_ED or (words[0] == "read" and words[1:]):
        return False
    return words[0] in PARTICIPLES or (words[0].endswith("ed") and len(words[0]) > 4)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
