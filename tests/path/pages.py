"""Pages of documentation as tests: ``python -m tests.path.pages PAGE FOLDER`` runs the code of a page in a folder.

The blocks of a page run from top to bottom, in one namespace and one folder, with the repository's `examples` in it:

- ``python`` is executed;
- ``console`` is run by bash, and has to end with status 0;
- ``text`` right after one of these is what it writes to standard output; ``...`` stands for anything;
- a block with ``title="a/path"`` is written to that file, or, where the repository has that file, is an excerpt of it;
- ``json``, ``yaml`` and ``toml`` are parsed.

Anything else, and what cannot run in a test, has ``<!-- not run: REASON -->`` on the line before it.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
EXAMPLES = 5
"""Hypothesis examples per law, on a page."""

_NOT_RUN = re.compile(r"<!--\s*not run:\s*(.*?)\s*-->\s*")
_FRONT = re.compile(r"\A---\n(.*?\n)---\n", re.DOTALL)
_TITLE = re.compile(r'\btitle="([^"]+)"')


class PageError(Exception):
    """What is wrong with a page, with the line where it is."""


@dataclass
class Block:
    """One fenced block.

    Attributes:
        line: that of its first line of content, from 1.
        language: first word after the fence.
        title: path of the file that it is.
        reason: why it is not run.
        output: what it should print.
    """

    line: int
    language: str
    content: str
    title: str | None = None
    reason: str | None = None
    output: str | None = None


@dataclass
class Page:
    """A page.

    Attributes:
        path: of its file.
        engine: it starts one.
        blocks: those that do something, in order.
    """

    path: Path
    engine: bool
    blocks: list[Block]


def read(path: Path, text: str | None = None) -> Page:
    """A page, of a file or of a text in its place.

    Raises:
        PageError: a block of a form that is not known.
    """
    text = path.read_text(encoding="utf-8") if text is None else text
    front = front_matter(text)
    text = _FRONT.sub(lambda found: "\n" * found[0].count("\n"), text)
    blocks: list[Block] = []
    before: Block | str | None = None  # a block that may have an output, or a reason
    for token in MarkdownIt("commonmark").parse(text):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "code_block":
            raise PageError(f"{path}:{line}: an indented code block; write a fence")
        if token.type == "html_block" and (found := _NOT_RUN.fullmatch(token.content)):
            if not found[1]:
                raise PageError(f"{path}:{line}: no reason")
            before = found[1]
        elif token.type == "fence":
            block = _block(token, line + 1, before if isinstance(before, str) else None)
            if block.language == "text" and isinstance(before, Block) and before.output is None:
                before.output, before = block.content, None
                continue
            _check_form(block, path)
            blocks.append(block)
            runs = block.language in ("python", "console") and not block.title and not block.reason
            before = block if runs else None
        elif token.type != "inline" or token.content:
            before = None
    return Page(path, bool(front.get("engine", False)), blocks)


def front_matter(text: str) -> dict[str, Any]:
    """What a page says of itself before it begins."""
    found = _FRONT.match(text)
    return (yaml.safe_load(found[1]) or {}) if found else {}


def _block(token: Any, line: int, reason: str | None) -> Block:
    language, _, attributes = token.info.strip().partition(" ")
    title = _TITLE.search(attributes)
    return Block(line, language, token.content, title[1] if title else None, reason)


def _check_form(block: Block, path: Path) -> None:
    where = f"{path}:{block.line}"
    if not block.language:
        raise PageError(f"{where}: a block without a language")
    if block.title and (block.title.startswith("/") or ".." in Path(block.title).parts):
        raise PageError(f"{where}: a title outside the folder of the page")
    if not (block.title or block.reason or block.language in _ACTIONS):
        known = ", ".join(_ACTIONS)
        raise PageError(f"{where}: a {block.language} block: no output, no file, none of {known}, and no reason")


# -- running -----------------------------------------------------------------------------------------------------------


def run(page: Page, folder: Path) -> None:
    """Run the blocks of a page in a folder, which becomes the current one.

    Raises:
        PageError: the first block that fails.
    """
    folder = folder.resolve()
    os.chdir(folder)
    if not Path("examples").exists():
        Path("examples").symlink_to(ROOT / "examples")
    sys.path.insert(0, str(folder))  # as for `python script.py`
    main = ModuleType("__main__")  # spawned processes do not run the page again
    sys.modules["__main__"] = main
    for block in page.blocks:
        where = f"{page.path}:{block.line}"
        try:
            if block.title is not None:
                _file(block, block.title)
            elif block.reason is not None:
                _READ.get(block.language, lambda _: None)(block.content)
            else:
                printed = _ACTIONS[block.language](block, page, main.__dict__)
                if block.output is not None and not matches(printed, block.output):
                    raise PageError(f"expected the output\n{block.output}\ngot\n{printed}")
        except PageError as error:
            raise PageError(f"{where}: {error}") from None
        except BaseException as error:
            raise PageError(f"{where}: {''.join(traceback.format_exception(error))}") from None


def _file(block: Block, title: str) -> None:
    path = ROOT / title
    if path.exists():
        whole, part = path.read_text(encoding="utf-8").splitlines(), block.content.rstrip().splitlines()
        if not any(whole[i : i + len(part)] == part for i in range(len(whole))):
            raise PageError(f"no excerpt of {title}")
        return
    Path(title).parent.mkdir(parents=True, exist_ok=True)
    Path(title).write_text(block.content, encoding="utf-8")
    importlib.invalidate_caches()


def _python(block: Block, page: Page, names: dict[str, Any]) -> str:
    printed = io.StringIO()
    # the lines of the page, for tracebacks and inspect.getsource
    code = compile("\n" * (block.line - 1) + block.content, str(page.path), "exec", dont_inherit=True)
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


def _console(block: Block, page: Page, names: dict[str, Any]) -> str:
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", block.content], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise PageError(f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def _syntax_of_bash(text: str) -> None:
    done = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True)
    if done.returncode:
        raise PageError(done.stderr)


_READ: dict[str, Callable[[str], Any]] = {
    "python": ast.parse,
    "console": _syntax_of_bash,
    "json": json.loads,
    "yaml": yaml.safe_load,
    "toml": tomllib.loads,
}
"""What a block has to stand even if it is not run."""


def _parsed(block: Block, page: Page, names: dict[str, Any]) -> str:
    _READ[block.language](block.content)
    return ""


_ACTIONS: dict[str, Callable[[Block, Page, dict[str, Any]], str]] = {
    "python": _python,
    "console": _console,
    "json": _parsed,
    "yaml": _parsed,
    "toml": _parsed,
}


def matches(printed: str, expected: str) -> bool:
    """Whether an output is the expected one, up to white space at the end of lines; ``...`` stands for anything."""
    one, other = ("\n".join(line.rstrip() for line in text.strip("\n").split("\n")) for text in (printed, expected))
    return re.fullmatch(".*?".join(map(re.escape, other.split("..."))), one, re.DOTALL) is not None


def environment() -> dict[str, str]:
    """The variables of a page's process."""
    changed = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "MMKIT_MODULES": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "COLUMNS": "120",
        "NO_COLOR": "1",
    }
    # as tests/conftest.py has it: engines side by side on few cores
    shared = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {**shared, **os.environ, **changed}


def main() -> None:
    path, folder = map(Path, sys.argv[1:])
    os.environ.update(environment())
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "page", max_examples=EXAMPLES, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )
    settings.load_profile("page")
    try:
        run(read(path.resolve()), folder)
    except PageError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
