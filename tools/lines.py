"""Lines that hold code, of files and folders: comments, blanks and docstrings do not count.

python -m tools.lines mmkit/* tests tools
"""

import ast
import io
import sys
import tokenize
from pathlib import Path


def code_lines(source: str, *, imports: bool = True) -> int:
    """How many lines of a module hold code, with its imports or without."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node):
            left_out |= lines_of(node.body[0])
        elif isinstance(node, ast.Import | ast.ImportFrom) and not imports:
            left_out |= lines_of(node)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = (token for token in tokens if token.string.strip() and token.type != tokenize.COMMENT)
    spans = [(token.start[0], token.end[0]) for token in code]
    return len({line for first, last in spans for line in range(first, last + 1)} - left_out)


def lines_of(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def main() -> None:
    counts = {}
    for name in sys.argv[1:]:
        path = Path(name)
        files = [path] if path.suffix == ".py" else path.rglob("*.py")
        counts[name] = sum(code_lines(file.read_text()) for file in files)
    for name, count in [*counts.items(), ("sum", sum(counts.values()))]:
        print(f"{count:7,} {name}")


if __name__ == "__main__":
    main()
