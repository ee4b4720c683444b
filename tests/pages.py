"""Pages of documentation as tests. The blocks of a page run from top to bottom, in one namespace and one folder, with
the repository's `examples` in it:

- ``python`` is executed, and ``console`` is run by bash;
- ``text`` right after one of these is what it writes to standard output; ``...`` stands for anything;
- a block with ``title="a/path"`` is written to that file, or, where the repository has that file, is an excerpt of it;
- ``json``, ``yaml`` and ``toml`` are parsed.

Anything else, and what cannot run in a test, has ``<!-- not run: REASON -->`` on the line before it. What follows
``<!-- at night: REASON -->`` runs in tests/night, and so does a page that begins with ``engine: true``.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import importlib
import io
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import yaml
from hypothesis import HealthCheck, settings
from markdown_it import MarkdownIt

from tests import ROOT

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "README.md"]
PRELOADED = ["tests.pages", "mmkit.testing.vllm_path", "mmkit.testing.laws", "vllm.entrypoints.llm"]
"""Pages run in forks of a process that has imported these, once."""

_MARK = re.compile(r"<!--\s*(not run|at night):\s*(\S.*?)\s*-->\s*")
_FRONT = re.compile(r"\A---\n(.*?\n)---\n", re.DOTALL)
_PROFILE = settings(
    max_examples=5, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
_TITLE = re.compile(r'\btitle="([^"]+)"')


class PageError(Exception):
    """What is wrong with a page, with the line where it is."""


@dataclass
class Block:
    """One fenced block: its first line of content, what it is, why it is not run, and what it should print."""

    line: int
    language: str
    content: str
    title: str | None
    reason: str | None
    night: bool
    output: str | None = None


@dataclass
class Page:
    """A page, and its blocks that do something."""

    path: Path
    blocks: list[Block]

    @property
    def night(self) -> bool:
        return any(block.night for block in self.blocks)


def read(path: Path) -> Page:
    """The page of a file.

    Raises:
        PageError: a block of a form that is not known.
    """
    text = path.read_text(encoding="utf-8")
    front = _FRONT.match(text)
    text = _FRONT.sub(lambda match: "\n" * match[0].count("\n"), text)
    page = Page(path, [])
    night = bool(front and yaml.safe_load(front[1]).get("engine"))
    previous: Block | str | None = None  # a block that may have an output, or the reason not to run the next one
    for token in MarkdownIt("commonmark").parse(text):
        line = token.map[0] + 2 if token.map else 0
        if token.type == "code_block":
            raise PageError(f"{path}:{line}: an indented code block; write a fence")
        if token.type == "html_block" and (mark := _MARK.fullmatch(token.content)):
            night = night or mark[1] == "at night"
            previous = mark[2] if mark[1] == "not run" else None
        elif token.type == "fence":
            language, _, attributes = token.info.strip().partition(" ")
            title = _TITLE.search(attributes)
            reason = previous if isinstance(previous, str) else None
            if language == "text" and isinstance(previous, Block):
                previous.output, previous = token.content, None
                continue
            block = Block(line, language, token.content, title[1] if title else None, reason, night)
            if not (title or reason or language in _PARSE):
                raise PageError(f"{path}:{line}: a block {language!r}: no output, not a file, not known, and no reason")
            page.blocks.append(block)
            previous = block if language in _RUN and not title and not reason else None
        elif token.type != "inline" or token.content:
            previous = None
    return page


# -- the blocks --------------------------------------------------------------------------------------------------------


def run(page: Page, night: bool) -> None:
    """Run the blocks of a page in the current folder.

    Raises:
        PageError: the first block that fails.
    """
    if not Path("examples").exists():
        Path("examples").symlink_to(ROOT / "examples")
    sys.path.insert(0, os.getcwd())  # as for `python script.py`
    main = ModuleType("__main__")  # spawned processes do not run the page again
    sys.modules["__main__"] = main
    for block in page.blocks:
        try:
            if block.title is not None:
                _file(block, block.title)
                continue
            _PARSE.get(block.language, str)(block.content)
            if block.language in _RUN and not block.reason and (night or not block.night):
                printed = _RUN[block.language](block, page, main.__dict__)
                if block.output is not None and not matches(printed, block.output):
                    raise PageError(f"expected the output\n{block.output}\ngot\n{printed}")
        except BaseException as error:
            raise PageError(f"{page.path}:{block.line}") from error


def _file(block: Block, title: str) -> None:
    path = ROOT / title
    if ".." in path.parts or not path.is_relative_to(ROOT):
        raise PageError("a title outside the folder of the page")
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
    return _bash("-e", "-o", "pipefail", "-c", block.content)


def _bash(*arguments: str) -> str:
    done = subprocess.run(["bash", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise PageError(f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return done.stdout


_PARSE: dict[str, Callable[[str], Any]] = {
    "python": ast.parse,
    "console": lambda text: _bash("-n", "-c", text),
    "json": json.loads,
    "yaml": yaml.safe_load,
    "toml": tomllib.loads,
}
"""What a block has to stand even if it is not run."""

_RUN = {"python": _python, "console": _console}


def matches(printed: str, expected: str) -> bool:
    """Whether an output is the expected one, up to white space at the end of lines; ``...`` stands for anything."""
    one, other = ("\n".join(line.rstrip() for line in text.strip("\n").split("\n")) for text in (printed, expected))
    return re.fullmatch(".*?".join(map(re.escape, other.split("..."))), one, re.DOTALL) is not None


# -- the processes -----------------------------------------------------------------------------------------------------

ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    "MMKIT_MODULES": "",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "COLUMNS": "120",
    "NO_COLOR": "1",
}


def complaint(path: Path, folder: Path, night: bool = False) -> str:
    """What is wrong with a page, run in a folder by a process of its own; nothing if nothing is."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    log = folder.with_name(f"{folder.name}.log")
    process = context.Process(target=_run_alone, args=(path, folder, log, night))
    with mock.patch.dict(os.environ, ENVIRONMENT):
        process.start()
    try:
        process.join()
    finally:
        with contextlib.suppress(ProcessLookupError):  # what a page may have left behind
            os.killpg(process.pid, signal.SIGKILL)
    return log.read_text(errors="replace")[-8000:] if process.exitcode else ""


def _run_alone(path: Path, folder: Path, log: Path, night: bool) -> None:
    os.setpgrp()
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(folder)
    settings.register_profile("page", _PROFILE)
    settings.load_profile("page")
    try:
        run(read(path), night)
    finally:
        atexit._run_exitfuncs()  # they stop engines, and a child of a fork server does not call them
