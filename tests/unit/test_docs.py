"""The documentation as a site: links lead somewhere, pictures come from tests, nothing is loaded from elsewhere."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT

DOCS = ROOT / "docs"
SOURCES = [*PAGES, ROOT / "CHANGELOG.md"]


# -- links, pictures, names --------------------------------------------------------------------------------------------


def slug(heading: str) -> str:
    """The anchor of a heading, by the rule that code hosts and the site share for plain words."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path: Path) -> None:
    """As on a code host: files that exist, headings that exist."""
    text = re.sub(r"(?ms)^ *(```+).*?^ *\1$", "", path.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        file = path.parent / target if target else path
        assert file.exists(), link
        if anchor:
            headings = re.findall(r"(?m)^#+ (.*)$", file.read_text(encoding="utf-8"))
            assert anchor in map(slug, headings), link


def test_pictures_are_those_of_tests() -> None:
    """Every picture is named by a test that makes it; those of `mmkit show` by the name of their spec."""
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    shows = "".join(text for text in tests if 'f"show-{name}.svg"' in text)
    for picture in (DOCS / "images").iterdir():
        show = re.fullmatch(r"show-(.*)\.svg", picture.name)
        named = f'"{show[1]}"' in shows if show else any(picture.name in text for text in tests)
        assert named, picture.name


PUBLIC = [
    "__init__",
    "model/__init__",
    "offline",
    "serve/__init__",
    "serve/client",
    "testing/__init__",
    "training/__init__",
]
"""The modules of mmkit whose names are public."""


def public_names(module: str) -> set[str]:
    """What a module exports: `__all__`, and imports as the same name. It is read, not imported."""
    names: set[str] = set()
    for node in ast.parse((ROOT / "mmkit" / f"{module}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            names.update(ast.literal_eval(node.value))
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.name for alias in node.names if alias.name == alias.asname)
    return names


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference_with_an_example(module: str) -> None:
    """A heading or the first cell of a table row names it, and a block of Python uses it."""
    text = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    titles = re.findall(r"(?m)^(?:#+ (.*)|\| ([^|]*) \|.*)$", text)
    named = {word for title in titles for word in re.findall(r"\w+", "".join(title))}
    used = {word for block in re.findall(r"(?ms)^```python.*?\n(.*?)^```$", text) for word in re.findall(r"\w+", block)}
    names = public_names(module)
    assert names
    assert names - named == set()
    assert names - used == set()


def test_no_page_of_the_reference_is_long() -> None:
    lengths = {
        path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in (DOCS / "reference").glob("*.md")
    }
    assert {name: length for name, length in lengths.items() if length > 250} == {}


# -- the site ----------------------------------------------------------------------------------------------------------

LOADED = re.compile(
    r"<(?!a\b)\w[^>]*\s(?:src|srcset|href|data|poster)=\"((?:https?:)?//[^\"]+)"
    r"|(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)"
)
"""What a page or a style sheet loads from another host; a link is not loaded."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it: a link that leads nowhere, or to no heading, is an error."""
    folder = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")  # nothing is fetched
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert "WARNING" not in done.stderr
    return folder


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    assert LOADED.search('<a href="//here"><link rel="stylesheet" href="//elsewhere/x.css">')[1] == "//elsewhere/x.css"
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(files) > 20
    assert not [(file.name, match[0]) for file in files for match in LOADED.finditer(file.read_text(encoding="utf-8"))]


def test_only_files_of_the_repository_are_no_links_in_the_site(site: Path) -> None:
    gallery, contributing = ((site / name).read_text() for name in ("gallery.html", "contributing.html"))
    assert "<td>Fuyu</td>" in gallery
    assert 'href="versions.html"' in gallery
    assert '<a href="how-it-works.html">docs/how-it-works.md</a>' in contributing


def test_the_notebook_is_a_page(site: Path) -> None:
    text = (site / "tour.html").read_text(encoding="utf-8")
    assert '<h2 id="declare">' in text
    assert '<div class="highlight"><pre>' in text


# -- the changelog -----------------------------------------------------------------------------------------------------


def test_the_fragments_render() -> None:
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "9.9.9", "--date", "2030-01-02"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for path in (ROOT / "changelog.d").iterdir():
        if path.name not in ("README.md", "template.md.jinja"):
            assert re.fullmatch(r"[a-z0-9-]+\.(added|changed|fixed|removed)\.md", path.name)
            first, *_ = path.read_text(encoding="utf-8").splitlines()
            assert f"- {first}\n" in done.stdout
