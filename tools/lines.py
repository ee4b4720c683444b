"""Count the lines that hold code, of files and folders: no comments, blank lines or docstrings.

python -m tools.lines mmkit/* tests tools
"""

import ast
import io
import sys
import tokenize
from pathlib import Path


def main() -> None:
    total = 0
    for name in sys.argv[1:]:
        path = Path(name)
        files = [path] if path.suffix == ".py" else path.rglob("*.py")
        count = sum(count_code_lines(file.read_text()) for file in files)
        print(f"{count:7,} {name}")
        total += count
    print(f"{total:7,} sum")


def count_code_lines(source: str, *, imports: bool = True) -> int:
    """Return how many lines of a module hold code, with its imports or without."""
    excluded: set[int] = set()
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node):
            excluded |= find_lines(node.body[0])
        elif isinstance(node, ast.Import | ast.ImportFrom) and not imports:
            excluded |= find_lines(node)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - excluded)


def find_lines(node: ast.stmt) -> set[int]:
    """Return the numbers of a statement's lines."""
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


if __name__ == "__main__":
    main()
