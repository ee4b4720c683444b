"""The documentation: every block of code runs, every link leads somewhere, and the site is built without a warning."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

import docs_hooks
import mmkit

from . import pages
from .pages import PageError, matches, read, run

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "CONTRIBUTING.md"]
SOURCES = [*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"]
ENGINE_SECONDS = 900

pytestmark = pytest.mark.timeout(ENGINE_SECONDS)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parameter(path: Path) -> object:
    marks = [pytest.mark.engine] if pages.front_matter(path.read_text(encoding="utf-8")).get("engine") else []
    return pytest.param(path, id=name(path), marks=marks)


@pytest.mark.parametrize("path", [*map(parameter, PAGES)])
def test_page(path: Path, tmp_path: Path) -> None:
    if not read(path).blocks:
        return
    done = subprocess.run(
        [sys.executable, "-m", "tests.path.pages", str(path), str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=ENGINE_SECONDS,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


# -- the checker itself ------------------------------------------------------------------------------------------------


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for key, value in pages.environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def page(text: str, folder: Path) -> None:
    run(read(folder / "page.md", text), folder)


GOOD = """
---
engine: true
---
# A page

```python
import os
x = 1
print("one two   ")
print(3)
```

```text
one...two
3
```

```python title="made/thing.py"
VALUE = 5
```

- in a list

  ```console
  cat made/thing.py  # a comment
  python -c 'import made.thing, examples.terra'
  ls examples/terra/spec.py
  ```

  ```text
  VALUE = 5
  examples/terra/spec.py
  ```

<!-- not run: takes all day -->
```console
exit 7
```

```json
{"a": [1]}
```

```python title="examples/terra/spec.py"
TERRA = ModelSpec(
    "terra",
```

```python
import made.thing

assert x == 1 and made.thing.VALUE == 5
```
""".lstrip()


def test_a_good_page(in_folder: Path) -> None:
    assert read(in_folder / "page.md", GOOD).engine
    page(GOOD, in_folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("x = 1", "x = 1 / 0", r"page.md:7: .*page.md\", line 8.*ZeroDivisionError"),
        ("\n3\n", "\n4\n", "page.md:7: expected the output"),
        ("VALUE = 5\n  examples", "VALUE = 6\n  examples", r"page.md:25: expected the output"),
        ("ls examples", "ls nothing", "page.md:25: exit status"),
        ("cat made", "false | cat made", "page.md:25: exit status"),
        ("# a comment", "; exit 3", "page.md:25: exit status 3"),
        ("not run: takes all day", "not run: ", "no reason"),
        ("<!-- not run: takes all day -->", "<!-- skip: takes all day -->", "exit status 7"),
        ("<!-- not run: takes all day -->\n", "<!-- not run: takes all day -->\nBut:\n\n", "exit status 7"),
        ("exit 7", "exit '", "unexpected EOF"),
        ('{"a": [1]}', '{"a": 1]}', "JSONDecodeError"),
        ('    "terra",', '    "terre",', "no excerpt of examples/terra/spec.py"),
        ("```json", "```", "a block without a language"),
        ("```json", "```nginx", "a nginx block: no output, no file"),
        ("```json", "```text", "a text block: no output"),
        ("```json", "```Python", "a Python block"),
        ('made/thing.py"\n', '../thing.py"\n', "a title outside the folder"),
        ('```json\n{"a": [1]}\n```', "    x = 1", "an indented code block"),
        ("assert x == 1", "assert x == 2", "AssertionError"),
        ("assert x == 1", "import sys; sys.exit(0); assert x == 1", "SystemExit"),
    ],
)
def test_a_bad_page(old: str, new: str, message: str, in_folder: Path) -> None:
    with pytest.raises(PageError, match=f"(?s){message}"):
        page(GOOD.replace(old, new), in_folder)


def test_outputs() -> None:
    assert matches("a b\nc\n", "a b  \nc")
    assert matches("1 of 3 in 2.1 s\n", "... of 3 in ... s\n")
    assert matches("first\nsecond\nthird", "first\n...\nthird")
    assert not matches("a\nb", "a")
    assert not matches("a.b", "a+b")
    assert not matches("1 of 4 in 2 s", "... of 3 in ... s")


# -- links -------------------------------------------------------------------------------------------------------------


def slug(heading: str) -> str:
    """The anchor of a heading, by the rule that code hosts and the site share for plain words."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def links(path: Path) -> list[str]:
    text = re.sub(r"(?ms)^ *(```+).*?^ *\1$", "", path.read_text(encoding="utf-8"))
    return re.findall(r"\]\(([^)\s]+)\)", text)


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_links(path: Path) -> None:
    """As on a code host: files that exist, headings that exist."""
    for link in links(path):
        if re.match(r"https?://", link):
            continue
        target, _, anchor = link.partition("#")
        file = path.parent / target if target else path
        assert file.exists(), link
        if anchor:
            headings = re.findall(r"(?m)^#+ (.*)$", file.read_text(encoding="utf-8"))
            assert anchor in map(slug, headings), link


def test_pictures_are_those_of_tests() -> None:
    """Every picture of a page is named by a test that makes it, or by a block of a page that does."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    texts += [block.content for path in PAGES for block in read(path).blocks if not block.reason and not block.title]
    drawn = (ROOT / "tests" / "test_cli.py").read_text(encoding="utf-8")
    assert 'f"show-{name}.svg"' in drawn
    for picture in (DOCS / "images").iterdir():
        shown = re.fullmatch(r"show-(.*)\.svg", picture.name)
        assert (shown and f'"{shown[1]}": (' in drawn) or any(picture.name in text for text in texts), picture.name


def test_every_public_name_is_on_a_page_of_the_reference() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    for module, names in (("mmkit", mmkit.__all__), ("mmkit.testing", ["check", "parametrize", "check_registered"])):
        found = set(re.findall(rf"(?m)^::: {module}\.(?:\w+\.)*(\w+)$", text)) | set(re.findall(r"`(\w+)[`\[(]", text))
        assert set(names) <= found


# -- the site ----------------------------------------------------------------------------------------------------------


def build(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")  # nothing is fetched
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config), "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=ENGINE_SECONDS,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr[-6000:]
    assert "WARNING" not in done.stderr
    return folder


class Elements(HTMLParser):
    """What a page of the site loads and refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attributes}
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        self.loads += [values[key] for key in ("src", "srcset", "data", "poster") if key in values and tag != "a"]
        if tag == "link" and values.get("rel") != "canonical":
            self.loads.append(values.get("href", ""))
        elif tag == "a":
            self.links.append(values.get("href", ""))


@cache
def elements(path: Path) -> Elements:
    made = Elements()
    made.feed(path.read_text(encoding="utf-8"))
    return made


EXTERNAL = re.compile(r"(?:https?:)?//")
LOADED = re.compile(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)")


def complaints(site: Path) -> list[str]:
    """What is wrong in a built site: things loaded from elsewhere, links that lead nowhere."""
    found = []
    for path in sorted(site.rglob("*.html")):
        if path.name == "404.html":  # for servers: its links start at the root of the site
            continue
        made = elements(path)
        found += [f"{path.name} loads {url}" for url in made.loads if EXTERNAL.match(url)]
        for link in [*made.links, *made.loads]:
            if EXTERNAL.match(link) or link.startswith(("mailto:", "data:")):
                continue
            target, _, anchor = link.partition("#")
            file = (path.parent / target).resolve() if target else path
            if file.is_dir():
                file /= "index.html"
            if not file.exists():
                found.append(f"{path.name} leads to {link}")
            elif anchor and file.suffix == ".html" and anchor not in elements(file).anchors:
                found.append(f"{path.name} leads to {link}, which has no such anchor")
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        found += [f"{path.name} loads {url}" for url in LOADED.findall(text)]
    return found


def test_the_site_loads_nothing_from_elsewhere_and_its_links_lead_somewhere(site: Path) -> None:
    assert len(list(site.rglob("*.html"))) > 20
    assert complaints(site) == []


def test_files_of_the_repository_are_no_links_in_the_site(site: Path) -> None:
    text = (site / "gallery.html").read_text()
    assert "examples/gallery/fuyu.py" not in re.findall(r'href="([^"]+)"', text)
    assert "Fuyu" in text
    assert 'href="versions.html"' in text


BAD_SITE = """
site_name: bad
docs_dir: docs
theme: {name: material, font: false}
plugins: []
validation: {links: {anchors: warn, not_found: warn}}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [("[a](b.md)", "b.md"), ("[a](#nothing)", "#nothing"), ("Fine.", "")],
)
def test_a_bad_site(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(text)
    (tmp_path / "mkdocs.yml").write_text(BAD_SITE)
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert (done.returncode != 0) == bool(message)
    assert ("WARNING" in done.stderr) == bool(message)
    assert message in done.stderr


@pytest.mark.parametrize(
    ("html", "complaint"),
    [
        ('<script src="https://elsewhere/x.js"></script>', "loads https://elsewhere/x.js"),
        ('<link rel="stylesheet" href="//elsewhere/x.css">', "loads //elsewhere/x.css"),
        ('<img src="no.png">', "leads to no.png"),
        ('<a href="index.html#no">x</a>', "no such anchor"),
        ('<a href="https://elsewhere/">x</a><a href="#here" id="here">x</a>', ""),
    ],
)
def test_a_site_that_loads(html: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(html)
    found = complaints(tmp_path)
    assert len(found) == bool(complaint)
    assert all(complaint in text for text in found)


# -- the hooks of the site ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "home", "uri", "expected"),
    [
        ("serving.md", "docs/laws.md", "laws.md", "serving.md"),
        ("serving.md#errors", "docs/how-to/x.md", "how-to/x.md", "serving.md#errors"),
        ("../serving.md", "docs/how-to/x.md", "how-to/x.md", "../serving.md"),
        ("docs/laws.md#contracts", "CONTRIBUTING.md", "contributing.md", "laws.md#contracts"),
        ("../CHANGELOG.md", "docs/laws.md", "laws.md", "changelog.md"),
        ("tour.ipynb", "docs/index.md", "index.md", "tour.md"),
        ("../examples/terra/spec.py", "docs/laws.md", "laws.md", None),
        ("../examples", "docs/laws.md", "laws.md", None),
        ("../examples/nothing.py", "docs/laws.md", "laws.md", "../examples/nothing.py"),
        ("https://elsewhere/", "docs/laws.md", "laws.md", "https://elsewhere/"),
        ("#here", "docs/laws.md", "laws.md", "#here"),
    ],
)
def test_links_of_the_site(link: str, home: str, uri: str, expected: str | None) -> None:
    assert docs_hooks.site_link(link, home, uri) == expected


def test_links_in_code_stay() -> None:
    text = "a [b](c)\n```text\n[b](c)\n```\n  ````md\n```\n[b](c)\n````\n[b](c)"
    assert docs_hooks.outside_code(text, lambda line: line.replace("[b](c)", "X")) == (
        "a X\n```text\n[b](c)\n```\n  ````md\n```\n[b](c)\n````\nX"
    )


def test_a_notebook_is_a_page() -> None:
    def cell(source: str, *outputs: dict[str, object]) -> dict[str, object]:
        return {"cell_type": "code", "source": [source], "outputs": list(outputs)}

    notebook = {
        "cells": [
            {"cell_type": "markdown", "source": ["# Title\n", "text"]},
            cell("print(1)\n", {"output_type": "stream", "name": "stdout", "text": ["1\n"]}),
            cell("warn()", {"output_type": "stream", "name": "stderr", "text": ["no\n"]}),
            cell("x", {"data": {"image/svg+xml": ["<svg>\n\n</svg>"], "text/plain": ["<SVG>"]}}),
            cell("y", {"data": {"text/plain": ["\x1b[31m5\x1b[0m"]}}),
            cell(" "),
        ]
    }
    assert docs_hooks.notebook_page(notebook) == (
        "# Title\ntext\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\n```python\nwarn()\n```\n\n"
        "```python\nx\n```\n\n<div>\n<svg>\n</svg>\n</div>\n\n```python\ny\n```\n\n```text\n5\n```\n"
    )


# -- the changelog -----------------------------------------------------------------------------------------------------


def towncrier(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    options = ["--config", str(folder / "pyproject.toml"), "--dir", str(folder)]
    command = [sys.executable, "-m", "towncrier", "build", *options, "--version", "9.9.9", "--date", "2030-01-02"]
    return subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True)


def test_the_fragments_render() -> None:
    done = towncrier(ROOT, "--draft")
    assert done.returncode == 0, done.stdout + done.stderr
    names = [path.name for path in (ROOT / "changelog.d").iterdir()]
    assert [n for n in names if not re.fullmatch(r"[a-z0-9-]+\.(added|changed|fixed|removed)\.md", n)] == sorted(
        {"README.md", "template.md.jinja"}, key=names.index
    )
    for path in (ROOT / "changelog.d").glob("*.*.md"):
        assert path.read_text(encoding="utf-8").splitlines()[0] in done.stdout


def test_a_release_moves_fragments_into_the_changelog(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "changelog.d", tmp_path / "changelog.d")
    for file in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / file, tmp_path)
    (tmp_path / "changelog.d" / "a.fixed.md").write_text("A word.\nAnother line.\n")
    (tmp_path / "changelog.d" / "b.added.md").write_text("A thing.\n")
    done = towncrier(tmp_path, "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "CHANGELOG.md").read_text()
    released = text.partition("## 9.9.9 (2030-01-02)")[2].partition("\n## 0.1.0 ")[0]
    assert re.fullmatch(
        r"\s+### Added\s+(- .*\s+)*- A thing\.\s+(- .*\s+|### Changed\s+)*### Fixed\s+(.|\n)*", released
    )
    assert "- A word.\n  Another line.\n" in released
    assert text.index("9.9.9") < text.index("## 0.1.0 ")
    assert not list((tmp_path / "changelog.d").glob("*.fixed.md"))
