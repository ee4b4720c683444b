"""Code of the documentation that takes too long for the tests by day, and the site that is built of it."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pages import PAGES, ROOT, Page, find_fault, parse_page

LOADED = re.compile(
    r"<(?!a\b)\w[^>]*\s(?:src|srcset|href|data|poster)=\"((?:https?:)?//[^\"]+)"
    r"|(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)"
)
"""What a page or a style sheet loads from another host; a link is not loaded."""


def list_pages_of_the_night() -> list[Any]:
    pages = []
    for path in PAGES:
        page = parse_page(path)
        if page.night:
            pages.append(pytest.param(page, id=path.stem))
    return pages


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", list_pages_of_the_night())
def test_the_code_of_a_page_runs(page: Page, tmp_path: Path) -> None:
    assert find_fault(page.path, tmp_path, night=True) == ""


def test_the_pattern_finds_a_style_sheet_but_no_link() -> None:
    match = LOADED.search('<a href="//here"><link rel="stylesheet" href="//elsewhere/x.css">')
    assert match[1] == "//elsewhere/x.css"


def test_the_site_is_built_without_warnings_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    """Build it as `make docs` does: a link that leads nowhere is an error."""
    environment = os.environ | {
        "NO_MKDOCS_2_WARNING": "1",
        # no proxy listens there, so nothing can be downloaded
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
        "all_proxy": "http://127.0.0.1:9",
    }
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]

    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    assert process.returncode == 0, process.stderr[-6000:]
    assert "WARNING" not in process.stderr
    pages = list(tmp_path.rglob("*.*ml"))
    style_sheets = list(tmp_path.rglob("*.css"))
    assert len({page.name for page in pages}) > 20
    for path in pages + style_sheets:
        match = LOADED.search(path.read_text(encoding="utf-8"))
        assert match is None, (path, match[0])
    assert '<a href="how-it-works.html">' in (tmp_path / "contributing.html").read_text(encoding="utf-8")
