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

PAGES = sorted((ROOT / "docs").rglob("*.md")) + [ROOT / "CONTRIBUTING.md", ROOT / "README.md"]
PRELOADED = ["tests.pages", "mmkit.testing.vllm_path", "mmkit.testing.laws", "vllm.entrypoints.llm"]
"""Pages run in forks of a process that has imported these, once."""

_MARK = re.compile(r"<!--\s*(not run|at night):\s*(\S.*?)\s*-->\s*")
_FRONT = re.compile(r"\A---\n(.*?\n)---\n", re.DOTALL)
_PROFILE = settings(
    max_examples=5, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
_TITLE = re.compile(r'\btitle="([^"]+)"')


class PageError(Exception):
    """A page has a fault; the message says where, and what it is."""


@dataclass
class Block:
    """A fenced block.

    Attributes:
        line: the number of its first line of content.
        language: of the fence.
        content: its text.
        title: the file that it is, or an excerpt of.
        reason: why it is not run.
        night: whether it runs only at night.
        output: what it should print; None for a block without an expectation.
    """

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
        """Whether a block of it runs only at night."""
        return any(block.night for block in self.blocks)


def parse_page(path: Path) -> Page:
    """Return the page of a file.

    Raises:
        PageError: a block of a form that is not known.
    """
    text = path.read_text(encoding="utf-8")
    front = _FRONT.match(text)
    night = False
    if front:
        night = bool(yaml.safe_load(front[1]).get("engine"))
        text = "\n" * front[0].count("\n") + text[front.end() :]  # the numbers of lines stay
    page = Page(path, [])
    reason: str | None = None  # not to run the next block
    printing: Block | None = None  # whose output the next block may be
    for token in MarkdownIt("commonmark").parse(text):
        line = token.map[0] + 2 if token.map else 0
        if token.type == "code_block":
            raise PageError(f"{path}:{line}: an indented code block; write a fence")
        if token.type == "inline" and not token.content:
            continue
        mark = _MARK.fullmatch(token.content) if token.type == "html_block" else None
        if mark:
            reason = mark[2] if mark[1] == "not run" else None
            printing = None
            night = night or mark[1] == "at night"
        elif token.type == "fence":
            language, _, attributes = token.info.strip().partition(" ")
            if language == "text" and printing is not None:
                printing.output = token.content
                printing = None
                continue
            title = _TITLE.search(attributes)
            block = Block(line, language, token.content, title[1] if title else None, reason, night)
            if not title and not reason and language not in _PARSE:
                raise PageError(f"{path}:{line}: a block {language!r}: no output, not a file, not known, and no reason")
            page.blocks.append(block)
            printing = block if language in _RUN and not title and not reason else None
            reason = None
        else:
            reason = None
            printing = None
    return page


# -- the blocks --------------------------------------------------------------------------------------------------------


def run_page(page: Page, night: bool) -> None:
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
            _run_block(block, page, night, main.__dict__)
        except BaseException as error:
            raise PageError(f"{page.path}:{block.line}") from error


def _run_block(block: Block, page: Page, night: bool, names: dict[str, Any]) -> None:
    """Run a block, or check what stands even where it is not run."""
    if block.title is not None:
        _write_or_compare(block, block.title)
        return
    if block.language in _PARSE:
        _PARSE[block.language](block.content)
    if block.language not in _RUN or block.reason:
        return
    if block.night and not night:
        return
    printed = _RUN[block.language](block, page, names)
    if block.output is not None and not matches(printed, block.output):
        raise PageError(f"expected the output\n{block.output}\ngot\n{printed}")


def _write_or_compare(block: Block, title: str) -> None:
    """Write a block to its file, or compare it with the file of the repository."""
    path = ROOT / title
    if ".." in path.parts or not path.is_relative_to(ROOT):
        raise PageError("a title outside the folder of the page")
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines()
        excerpt = block.content.rstrip().splitlines()
        starts = range(len(lines))
        if not any(lines[start : start + len(excerpt)] == excerpt for start in starts):
            raise PageError(f"no excerpt of {title}")
        return
    Path(title).parent.mkdir(parents=True, exist_ok=True)
    Path(title).write_text(block.content, encoding="utf-8")
    importlib.invalidate_caches()


def _run_python(block: Block, page: Page, names: dict[str, Any]) -> str:
    printed = io.StringIO()
    # the lines of the page, for tracebacks and inspect.getsource
    code = compile("\n" * (block.line - 1) + block.content, str(page.path), "exec", dont_inherit=True)
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


def _run_console(block: Block, page: Page, names: dict[str, Any]) -> str:
    return _run_bash("-e", "-o", "pipefail", "-c", block.content)


def _run_bash(*arguments: str) -> str:
    process = subprocess.run(["bash", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if process.returncode:
        raise PageError(f"exit status {process.returncode}\n{process.stdout[-2000:]}\n{process.stderr[-3000:]}")
    return process.stdout


def _parse_console(text: str) -> None:
    _run_bash("-n", "-c", text)


_PARSE: dict[str, Callable[[str], Any]] = {
    "python": ast.parse,
    "console": _parse_console,
    "json": json.loads,
    "yaml": yaml.safe_load,
    "toml": tomllib.loads,
}
"""Reads a block of each language, even if it is not run."""

_RUN = {"python": _run_python, "console": _run_console}


def matches(printed: str, expected: str) -> bool:
    """Return whether an output is the expected one.

    White space at the end of lines does not count, and ``...`` stands for anything.
    """
    parts = [re.escape(part) for part in _strip_lines(expected).split("...")]
    return re.fullmatch(".*?".join(parts), _strip_lines(printed), re.DOTALL) is not None


def _strip_lines(text: str) -> str:
    lines = text.strip("\n").split("\n")
    return "\n".join(line.rstrip() for line in lines)


# -- the processes -----------------------------------------------------------------------------------------------------

ENVIRONMENT = {
    "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep),
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    "MMKIT_MODULES": "",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "COLUMNS": "120",
    "NO_COLOR": "1",
}


def find_fault(path: Path, folder: Path, night: bool = False) -> str:
    """Run a page in a folder, by a process of its own, and return what is wrong; empty for nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    log = folder.with_name(f"{folder.name}.log")
    process = context.Process(target=_run_in_process, args=(path, folder, log, night))
    with mock.patch.dict(os.environ, ENVIRONMENT):
        process.start()
    try:
        process.join()
    finally:
        with contextlib.suppress(ProcessLookupError):  # what a page may have left behind
            os.killpg(process.pid, signal.SIGKILL)
    if process.exitcode == 0:
        return ""
    return log.read_text(errors="replace")[-8000:]


def _run_in_process(path: Path, folder: Path, log: Path, night: bool) -> None:
    os.setpgrp()
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(folder)
    settings.register_profile("page", _PROFILE)
    settings.load_profile("page")
    try:
        run_page(parse_page(path), night)
    finally:
        atexit._run_exitfuncs()  # they stop engines, and a child of a fork server does not call them
