"""The code of the pages of documentation that takes too long by day, and the site that they make."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, Page, find_fault, parse_page

LOADED = re.compile(
    r"<(?!a\b)\w[^>]*\s(?:src|srcset|href|data|poster)=\"((?:https?:)?//[^\"]+)"
    r"|(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)"
)
"""What a page or a style sheet loads from another host; a link is not loaded."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "page", [page for page in map(parse_page, PAGES) if page.night], ids=lambda page: page.path.stem
)
def test_page(page: Page, tmp_path: Path) -> None:
    assert find_fault(page.path, tmp_path, night=True) == ""


def test_site(tmp_path: Path) -> None:
    """As `make docs` builds it: a link that leads nowhere is an error, and nothing is loaded from elsewhere."""
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")  # nothing is fetched
    environment = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    assert "WARNING" not in done.stderr
    assert LOADED.search('<a href="//here"><link rel="stylesheet" href="//elsewhere/x.css">')[1] == "//elsewhere/x.css"
    texts = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.*ml")}
    assert len(texts) > 20
    texts |= {path.name: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.css")}
    assert not [(name, match[0]) for name, text in texts.items() for match in LOADED.finditer(text)]
    assert '<a href="how-it-works.html">' in texts["contributing.html"]
